"""The compiled kernels: loading them, choosing between them, calling them."""

import functools
import importlib
import importlib.util
import inspect
import itertools
import math
import pathlib
import traceback
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.interpreters import mlir

from jaxflash import compat
from jaxflash.spec import KERNELS, Spec, batch_shape, core_rank, lead

# Platforms with kernels, in JAX's spelling for lowering, and the name under which the
# FFI registers targets for them.
PLATFORMS = {"cpu": "cpu", "cuda": "CUDA"}
MIN_COMPUTE_CAPABILITY = (8, 0)
# The kernels walk this many batch axes; where a call needs more, its operands are
# broadcast.
_MAX_BATCH_RANK = 6
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
# What the kernels call the gradients.
_GRADIENTS = {
    "query": "dq",
    "key": "dk",
    "value": "dv",
    "scale": "dscale",
    "bias": "dbias",
    "sinks": "dsinks",
    "alibi_slopes": "dalibi",
}
# Gradients that the kernel returns per row [N, T], and the axes that make them whole.
_ROW_SUMS = {"scale": (-2, -1), "sinks": (-1,), "alibi_slopes": (-1,)}


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


def call(
    ctx: mlir.LoweringRuleContext,
    operands: Sequence,
    backend: str,
    direction: str,
    spec: Spec,
    names: Sequence[str],
    results: Sequence[tuple[str, ShapedArray]],
) -> list:
    """Emits one call of a kernel and hides its workspace.

    Args:
        ctx: the lowering context.
        operands: IR values, one per name.
        backend: "cpu" or "cuda".
        direction: "forward" or "backward".
        spec: the call.
        names: what each operand is.
        results: name and type of each result.
    """
    given: Sequence[Any] = ctx.avals_in
    taken = kernel_operands(names, given)
    if taken is not given:
        full = [aval.shape for aval in taken]
        operands = compat.lower_function(
            ctx, lambda *arrays: list(map(jnp.broadcast_to, arrays, full)), *operands
        )
        ctx = ctx.replace(avals_in=taken)
    workspace = workspace_bytes(backend, direction, spec, names, given)
    result_names, result_avals = zip(*results, strict=True)
    types = [*result_avals, ShapedArray((workspace,), jnp.uint8)]
    rule = jax.ffi.ffi_lowering(f"jaxflash_attention_{direction}")
    values = rule(
        ctx.replace(avals_out=types),
        *operands,
        operands=",".join(names),
        results=",".join((*result_names, "workspace")),
        is_causal=spec.is_causal,
        window_left=spec.window_left,
        window_right=spec.window_right,
        softcap=spec.softcap,
        dropout_rate=spec.dropout_rate,
        deterministic=spec.deterministic,
        precision=spec.precision,
    )
    return list(values)[:-1]


def workspace_bytes(
    backend: str, direction: str, spec: Spec, names: Sequence[str], avals: Sequence
) -> int:
    """Bytes of workspace that a call has, whatever kernels of the backend it runs."""
    module = load(backend)
    assert isinstance(module, ModuleType)
    by_name = dict(zip(names, avals, strict=True))
    q_len, num_heads, head_dim = by_name["query"].shape[-3:]
    kv_len, num_kv_heads, value_head_dim = by_name["value"].shape[-3:]
    return module.workspace_bytes(
        direction,
        by_name["query"].dtype.name,
        math.prod(batch_shape(names, [aval.shape for aval in avals])),
        q_len,
        kv_len,
        num_heads,
        num_kv_heads,
        head_dim,
        value_head_dim,
        spec.deterministic,
    )


def kernel_operands(names: Sequence[str], avals: Sequence) -> Sequence:
    """The types of a call's operands as its kernel gets them."""
    batch = batch_shape(names, [aval.shape for aval in avals])
    if _merged_rank(names, avals, batch) <= _MAX_BATCH_RANK:
        return avals
    return [
        ShapedArray((*batch, *aval.shape[len(lead(name, aval.shape)) :]), aval.dtype)
        for name, aval in zip(names, avals, strict=True)
    ]


def _merged_rank(names: Sequence[str], avals: Sequence, batch: Sequence[int]) -> int:
    """Batch axes that are left when neighbours merge that the same operands vary on."""
    leads = [lead(name, aval.shape) for name, aval in zip(names, avals, strict=True)]
    patterns = [
        tuple(len(own) >= -axis and own[axis] != 1 for own in leads)
        for axis in range(-len(batch), 0)
        if batch[axis] != 1
    ]
    return len(list(itertools.groupby(patterns)))


def kernel_gradients(
    names: Sequence[str],
    avals: Sequence,
    wanted: Sequence[str],
    summed: Sequence[Sequence[int]],
) -> list[tuple[str, ShapedArray]]:
    """Name and type of each gradient as the backward kernel returns it."""
    batch = batch_shape(names, [aval.shape for aval in avals])
    by_name = dict(zip(names, avals, strict=True))
    results = []
    for name, axes in zip(wanted, summed, strict=True):
        aval = by_name[name]
        core = aval.shape[aval.ndim - core_rank(name) :]
        if name in _ROW_SUMS:
            core = by_name["lse"].shape[-2:]
        dtype = jnp.float32 if axes or name in _ROW_SUMS else aval.dtype
        results.append((_GRADIENTS[name], ShapedArray((*batch, *core), dtype)))
    return results


def call_backward(
    ctx: mlir.LoweringRuleContext,
    operands: Sequence,
    backend: str,
    spec: Spec,
    names: Sequence[str],
    wanted: Sequence[str],
    summed: Sequence[Sequence[int]],
) -> list:
    """Emits the backward kernel and the sums over what its operands share."""
    results = kernel_gradients(names, ctx.avals_in, wanted, summed)
    sums = [
        (_ROW_SUMS.get(name), [axis - core_rank(name) for axis in axes])
        for name, axes in zip(wanted, summed, strict=True)
    ]
    values = call(ctx, operands, backend, "backward", spec, names, results)

    def finish(*grads):
        done = []
        for grad, (row_axes, axes), aval in zip(
            grads, sums, ctx.avals_out, strict=True
        ):
            if row_axes:
                grad = grad.sum(row_axes)
            done.append(grad.sum(axes, keepdims=True).astype(aval.dtype))
        return done

    raw = ctx.replace(avals_in=[aval for _, aval in results])
    return compat.lower_function(raw, finish, *values)
