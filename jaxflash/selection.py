"""The compiled kernels: loading them, and choosing between them."""

import functools
import importlib
import importlib.util
import inspect
import itertools
import pathlib
import traceback
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxflash.spec import KERNELS, Spec

# Platforms with kernels, in JAX's spelling for lowering, and the name under which the
# FFI registers targets for them.
PLATFORMS = {"cpu": "cpu", "cuda": "CUDA"}
MIN_COMPUTE_CAPABILITY = (8, 0)
_HOW_TO_BUILD = {
    "cpu": "run `pip install .` with a C++ compiler",
    "cuda": "run `pip install .` with nvcc on PATH, or `make CUDA=pip`",
}
_FALLBACK = (
    "; the call runs implementation='reference' (exact, O(T) memory, slower). "
    "Pass implementation='reference' to choose it and silence this warning."
)
# Packages whose frames a warning skips, to point at the caller's line. JAX's own calls
# pass through contextlib.
_INSIDE = {"jaxflash", "jax", "contextlib"}


@functools.cache
def load(backend: str) -> ModuleType | str:
    """The compiled module of a backend, registered with XLA, or why there is none."""
    try:
        module = importlib.import_module(f"jaxflash._{backend}")
    except ImportError as error:
        package = pathlib.Path(__file__).parent
        # An editable installation finds its modules elsewhere.
        compiled = importlib.util.find_spec("jaxflash._cpu") is not None
        if (package.parent / "csrc").is_dir() and not compiled:
            return (
                f"the {backend} kernels are not compiled in the source tree {package}, "
                "which jaxflash was imported from and which hides an installed one; "
                "start Python in another folder, as `python -P`, or as "
                ".venv/bin/python after `make install`"
            )
        return (
            f"the {backend} kernels are not part of this installation ({error}); "
            f"to build them, {_HOW_TO_BUILD[backend]}"
        )
    for name, target in module.registrations().items():
        jax.ffi.register_ffi_target(name, target, platform=PLATFORMS[backend])
    return module


@functools.cache
def _device_refusal() -> str | None:
    """Why the CUDA devices of this process cannot run the kernels, or None.

    A process without CUDA devices may still lower for them, to export a program.
    """
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:
        return None
    for device in devices:
        text = str(getattr(device, "compute_capability", "8.0"))
        version = tuple(int(part) for part in text.split("."))
        if version < MIN_COMPUTE_CAPABILITY:
            arch = "sm_" + text.replace(".", "")
            return f"GPU {device.device_kind} ({arch}); the kernels need sm_80 or newer"
    return None


def unavailable(backend: str) -> str | None:
    """Why the kernels of a backend cannot run in this process, or None."""
    module = load(backend)
    if isinstance(module, str):
        return module
    return _device_refusal() if backend == "cuda" else None


def refusal(backend: str, spec: Spec, operands: Sequence) -> str | None:
    """The first thing about a call that a backend's kernels do not serve, or None."""
    # The backward pass has more operands, behind those of the forward pass.
    by_name = dict(zip(spec.operands, operands, strict=False))
    query, value = by_name["query"], by_name["value"]
    for name, operand in by_name.items():
        if not all(isinstance(size, int) for size in operand.shape):
            return f"{name} of the symbolic shape {operand.shape}"
    return KERNELS[backend].refusal(
        spec, jnp.dtype(query.dtype).name, query.shape[-1], value.shape[-1]
    )


def check_implementation(spec: Spec, operands: Sequence) -> None:
    """Raises where a call that names an implementation can never be served by it."""
    backend = spec.implementation
    if backend not in KERNELS:
        return
    what = refusal(backend, spec, operands)
    if what is not None:
        raise NotImplementedError(
            f"implementation={backend!r} does not serve {what}; it serves "
            f"{KERNELS[backend].describe()}. implementation='reference' serves "
            "everything, and None falls back to it"
        )
    why = unavailable(backend)
    if why is not None:
        raise NotImplementedError(
            f"implementation={backend!r} cannot run: {why}. implementation=None takes "
            "what can run, of 'cuda', 'cpu' and 'reference'"
        )


@functools.cache
def _warn_once(message: str) -> None:
    """Warns in the name of the first frame outside jaxflash and JAX."""
    stack = traceback.walk_stack(inspect.currentframe())
    packages = (f.f_globals.get("__name__", "").partition(".")[0] for f, _ in stack)
    inside = itertools.takewhile(_INSIDE.__contains__, packages)
    warnings.warn(message, stacklevel=1 + len(list(inside)))


class Choice(NamedTuple):
    """What serves a call, why, and whether that is second best."""

    implementation: str
    reason: str
    is_fallback: bool = False


def decide(spec: Spec, avals: Sequence, platform: str | None) -> Choice:
    """What serves a call that is being lowered for a platform.

    Returns:
        "cpu", "cuda" or "reference", and the reason.

    Raises:
        NotImplementedError: the call names another backend's kernels, or kernels that
            cannot run here.
    """
    query = avals[spec.operands.index("query")]
    asked = f"implementation={spec.implementation!r} asks for it"
    if spec.implementation == "reference":
        return Choice("reference", asked)
    if query.shape[-2] == 0:
        return Choice("reference", "without heads there is nothing to launch")
    if spec.implementation is not None:
        if spec.implementation != platform:
            raise NotImplementedError(
                f"implementation={spec.implementation!r} cannot serve a call that is "
                f"compiled for {platform or 'a platform without kernels'}; use "
                "implementation=None, which picks what serves the platform, or "
                "'reference'"
            )
        check_implementation(spec, avals)
        return Choice(spec.implementation, asked)
    if platform is None:
        why = "jaxflash has no kernels for this platform"
        return Choice("reference", why, is_fallback=True)
    what = refusal(platform, spec, avals)
    why = f"do not serve {what} yet" if what else unavailable(platform)
    if why is None:
        return Choice(platform, f"the {platform} kernels serve the call")
    prefix = f"jaxflash's {platform} kernels " if what else "jaxflash: "
    return Choice("reference", prefix + why, is_fallback=True)


def choose(spec: Spec, avals: Sequence, platform: str | None) -> str:
    """Decides, and warns once of every reason to fall back to the reference."""
    choice = decide(spec, avals, platform)
    if choice.is_fallback:
        _warn_once(choice.reason + _FALLBACK)
    return choice.implementation
