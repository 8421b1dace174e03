"""Calls of the compiled kernels in programs that are being lowered."""

import itertools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.interpreters import mlir

from jaxflash import compat, selection
from jaxflash.spec import Spec, batch_shape, core_rank, lead

# The kernels walk this many batch axes; where a call needs more, its operands are
# broadcast.
_MAX_BATCH_RANK = 6
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
    workspace = workspace_bytes(backend, direction, spec, names, given, results)
    result_names, result_avals = zip(*results, strict=True)
    types = [*result_avals, ShapedArray((workspace,), jnp.uint8)]
    rule = jax.ffi.ffi_lowering(f"jaxflash_attention_{direction}")
    values = rule(
        ctx.replace(avals_out=types),
        *operands,
        operands=",".join(names),
        results=",".join((*result_names, "workspace")),
        **attributes(spec),
    )
    return list(values)[:-1]


def attributes(spec: Spec) -> dict[str, Any]:
    """What the handlers are told beside the tensors."""
    return {
        "is_causal": spec.is_causal,
        "window_left": spec.window_left,
        "window_right": spec.window_right,
        "softcap": spec.softcap,
        "dropout_rate": spec.dropout_rate,
        "deterministic": spec.deterministic,
        "precision": spec.precision,
    }


def tensor_types(
    names: Sequence[str], avals: Sequence
) -> list[tuple[str, str, tuple[int, ...]]]:
    """Tensors as the compiled modules take them before there are arrays."""
    return [
        (name, aval.dtype.name, aval.shape)
        for name, aval in zip(names, avals, strict=True)
    ]


def workspace_bytes(
    backend: str,
    direction: str,
    spec: Spec,
    names: Sequence[str],
    avals: Sequence,
    results: Sequence[tuple[str, ShapedArray]],
) -> int:
    """Bytes of workspace that a call has, whatever kernels of the backend it runs."""
    module = selection.load(backend)
    assert isinstance(module, ModuleType)
    return module.workspace_bytes(
        direction,
        tensor_types(names, kernel_operands(names, avals)),
        tensor_types(*zip(*results, strict=True)),
        attributes(spec),
    )


def kernel_operands(names: Sequence[str], avals: Sequence) -> Sequence:
    """The types of a call's operands as its kernel gets them."""
    batch = batch_shape(names, [aval.shape for aval in avals])
    if _merged_rank(_leads(names, avals), batch) <= _MAX_BATCH_RANK:
        return avals
    return [
        ShapedArray((*batch, *aval.shape[len(lead(name, aval.shape)) :]), aval.dtype)
        for name, aval in zip(names, avals, strict=True)
    ]


def _leads(names: Sequence[str], avals: Sequence) -> list[tuple[int, ...]]:
    return [lead(name, aval.shape) for name, aval in zip(names, avals, strict=True)]


def _merged_rank(leads: Sequence[Sequence[int]], batch: Sequence[int]) -> int:
    """Batch axes that are left when neighbours merge that the same tensors vary on."""
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
    """Name and type of each gradient as the backward kernel returns it.

    That of bias comes summed over what shares it, the others cover the batch shape.
    """
    batch = batch_shape(names, [aval.shape for aval in avals])
    by_name = dict(zip(names, avals, strict=True))
    results = []
    for name, axes in zip(wanted, summed, strict=True):
        aval = by_name[name]
        core = aval.shape[aval.ndim - core_rank(name) :]
        own, is_summed = batch, bool(axes) or name in _ROW_SUMS
        if name in _ROW_SUMS:
            core = by_name["lse"].shape[-2:]
        elif name == "bias":
            own = _bias_batch(names, avals, batch, axes)
            rows = by_name["lse"].shape[-2:]
            is_summed |= core != (*rows, by_name["key"].shape[-3])
        dtype = jnp.float32 if is_summed else aval.dtype
        results.append((_GRADIENTS[name], ShapedArray((*own, *core), dtype)))
    return results


def _bias_batch(
    names: Sequence[str], avals: Sequence, batch: tuple[int, ...], axes: Sequence[int]
) -> tuple[int, ...]:
    """Batch axes of dbias: 1 where the kernel sums, unless it cannot walk them so."""
    own = tuple(
        1 if axis - len(batch) in axes else size for axis, size in enumerate(batch)
    )
    rank = _merged_rank([*_leads(names, avals), own], batch)
    return own if rank <= _MAX_BATCH_RANK else batch


def call_backward(
    ctx: mlir.LoweringRuleContext,
    operands: Sequence,
    backend: str,
    spec: Spec,
    names: Sequence[str],
    wanted: Sequence[str],
    summed: Sequence[Sequence[int]],
) -> list:
    """Emits the backward kernel and the sums over what is shared that it leaves."""
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
