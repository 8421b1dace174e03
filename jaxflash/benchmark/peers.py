"""Who is measured, and how each is called."""

import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxflash.benchmark.cases import Case
from jaxflash.benchmark.programs import JaxProgram, TorchProgram


def _jaxflash(case: Case) -> JaxProgram:
    module = importlib.import_module("jaxflash")
    # Named explicitly, so that a shape that the kernels do not serve is an error.
    implementation = "cuda" if jax.default_backend() == "gpu" else "cpu"
    return JaxProgram(
        case,
        functools.partial(
            module.dot_product_attention,
            is_causal=case.is_causal,
            implementation=implementation,
        ),
    )


def _jax_nn(case: Case, implementation) -> JaxProgram:
    if implementation == "cudnn" and jax.default_backend() != "gpu":
        raise NotImplementedError("cuDNN needs an NVIDIA GPU")
    return JaxProgram(
        case,
        functools.partial(
            jax.nn.dot_product_attention,
            is_causal=case.is_causal,
            implementation=implementation,
        ),
    )


def _flash_attn3(case: Case) -> JaxProgram:
    if case.head_dim != 128:
        raise NotImplementedError("flash_attn3_jax is built for head dim 128 only")
    module = importlib.import_module("flash_attn3_jax")
    return JaxProgram(
        case, functools.partial(module.flash_mha, is_causal=case.is_causal)
    )


def _tokamax(case: Case) -> JaxProgram:
    if jax.default_backend() != "gpu":
        raise NotImplementedError("tokamax's mosaic kernels need an NVIDIA GPU")
    _stand_in_for_xprof()
    module = importlib.import_module("tokamax")
    return JaxProgram(
        case,
        functools.partial(
            module.dot_product_attention,
            is_causal=case.is_causal,
            implementation="mosaic",
        ),
    )


def _stand_in_for_xprof():
    """Lets tokamax be imported without xprof, whose profiles are not used here."""
    name = "xprof"
    if name in sys.modules or importlib.util.find_spec(name) is not None:
        return
    for part in ("cli", "tools", "get_kernel_stats_tool", None):
        module = types.ModuleType(name)
        module.__path__ = []
        sys.modules[name] = module
        name = f"{name}.{part}"


# In the order of the table. Each builds the program of a case, or raises.
PEERS: dict[str, Callable[[Case], JaxProgram | TorchProgram]] = {
    "jaxflash": _jaxflash,
    "xla": functools.partial(_jax_nn, implementation="xla"),
    "cudnn": functools.partial(_jax_nn, implementation="cudnn"),
    "flash_attn3_jax": _flash_attn3,
    "tokamax": _tokamax,
    "torch": functools.partial(TorchProgram, backend=None),
    "torch_flash": functools.partial(TorchProgram, backend="FLASH_ATTENTION"),
}

_PACKAGES = {
    "flash_attn3_jax": "flash_attn3_jax",
    "tokamax": "tokamax",
    "torch": "torch",
    "torch_flash": "torch",
}


def installed_peers(backend: str) -> list[str]:
    """Names of the peers that can be tried here."""
    names = [
        name
        for name in PEERS
        if name not in _PACKAGES or importlib.util.find_spec(_PACKAGES[name])
    ]
    if backend != "gpu":
        # torch has one CPU kernel for attention: its default choice.
        names = [n for n in names if n not in ("cudnn", "flash_attn3_jax", "tokamax")]
        names = [n for n in names if n != "torch_flash"]
    return names


def matmul_program(dtype: str, size: int):
    """The roofline: one square matrix product by XLA, and its FLOP count."""
    a, b = jax.random.normal(jax.random.key(0), (2, size, size), jnp.float32).astype(
        dtype
    )
    program = _Matmul(a, b)
    return program, 2.0 * size**3


class _Matmul(JaxProgram):
    """A product in the interface of a program, loaded from the start."""

    def __init__(self, a, b):
        self._compiled = jax.jit(jnp.matmul).lower(a, b).compile()
        self._args = jax.block_until_ready((a, b))
        self.memory = None
