"""attention_forward: (query, key, value, ...) -> (out, lse[, out_low])."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from jaxflash import compat, ffi, reference, selection
from jaxflash.primitives import common
from jaxflash.primitives.tangent import attention_tangent
from jaxflash.spec import DIFFERENTIABLE, Spec, accumulator, residuals

attention_forward_p = Primitive("attention_forward")
attention_forward_p.multiple_results = True


def attention_forward(*operands, spec: Spec, with_residuals: bool = False):
    """Returns out [*batch, T, N, V] and lse [*batch, N, T].

    Args:
        *operands: one array per name in spec.operands, each with its own leading batch
            axes, right-aligned, of size 1 or the full size.
        spec: the call.
        with_residuals: return all of spec.residuals: for a 16-bit query also
            out_low [*batch, T, N, V] int8.
    """
    return compat.bind(
        attention_forward_p, *operands, spec=spec, with_residuals=with_residuals
    )


def _results(spec: Spec, operands, with_residuals: bool) -> tuple[str, ...]:
    """What the results are."""
    query = operands[spec.operands.index("query")]
    return residuals(query.dtype) if with_residuals else ("out", "lse")


def _abstract_eval(*avals, spec: Spec, with_residuals: bool):
    names = spec.operands
    batch = common.full_batch(names, avals)
    q, v = avals[names.index("query")], avals[names.index("value")]
    q_len, num_heads, _ = q.shape[-3:]
    rows, columns = (*batch, num_heads, q_len), (*batch, q_len, num_heads, v.shape[-1])
    shapes = {"out": columns, "lse": rows, "out_low": columns}
    dtypes = {"out": q.dtype, "lse": accumulator(q.dtype), "out_low": jnp.int8}
    return [
        common.result_aval(name, shapes[name], dtypes[name], names, avals)
        for name in _results(spec, avals, with_residuals)
    ]


def _lower(ctx, *operands, spec: Spec, with_residuals: bool, platform: str | None):
    backend = selection.choose(spec, ctx.avals_in, platform)
    if backend == "reference":
        function = partial(_reference, spec, with_residuals)
        return compat.lower_function(ctx, function, *operands)
    names = _results(spec, ctx.avals_in, with_residuals)
    results = list(zip(names, ctx.avals_out, strict=True))
    return ffi.call(ctx, operands, backend, "forward", spec, spec.operands, results)


def _reference(spec: Spec, with_residuals: bool, *operands):
    out, lse = reference.forward(spec, *operands)
    # reference.backward sums delta from its own terms and needs no more of out.
    low = jnp.zeros(out.shape, jnp.int8)
    results = {"out": out, "lse": lse, "out_low": low}
    return [results[name] for name in _results(spec, operands, with_residuals)]


def _batch(operands, dims, *, spec: Spec, with_residuals: bool):
    operands = common.batch_operands(spec.operands, operands, dims)
    results = attention_forward(*operands, spec=spec, with_residuals=with_residuals)
    return results, [0] * len(results)


def _jvp(primals, tangents, *, spec: Spec, with_residuals: bool):
    values = attention_forward(*primals, spec=spec, with_residuals=True)
    # The tangent's residuals are these very values, so the names must be on them here:
    # names that a caller puts on the results would not save the kernel from rerunning.
    # out_low goes by the name of out, which it is a part of.
    values = [
        checkpoint_name(value, f"jaxflash_{name.removesuffix('_low')}")
        for name, value in zip(_results(spec, primals, True), values, strict=True)
    ]
    live = {
        name: t
        for name, t in zip(spec.operands, tangents, strict=True)
        if name in DIFFERENTIABLE and type(t) is not ad.Zero
    }
    derivative = attention_tangent(
        *primals, *values, *live.values(), spec=spec, tangents=tuple(live)
    )
    results = values if with_residuals else values[:2]
    return results, [
        *derivative,
        *(ad.Zero(jax.typeof(low).to_tangent_aval()) for low in results[2:]),
    ]


attention_forward_p.def_impl(partial(xla.apply_primitive, attention_forward_p))
attention_forward_p.def_abstract_eval(_abstract_eval)
mlir.register_lowering(attention_forward_p, partial(_lower, platform=None))
for _platform in selection.PLATFORMS:
    mlir.register_lowering(
        attention_forward_p, partial(_lower, platform=_platform), platform=_platform
    )
batching.primitive_batchers[attention_forward_p] = _batch
ad.primitive_jvps[attention_forward_p] = _jvp
