"""attention_forward: (query, key, value, ...) -> (out, lse)."""

from functools import partial

from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from jaxflash import compat, ffi, reference
from jaxflash.primitives import common
from jaxflash.primitives.tangent import attention_tangent
from jaxflash.spec import DIFFERENTIABLE, Spec, accumulator

attention_forward_p = Primitive("attention_forward")
attention_forward_p.multiple_results = True


def attention_forward(*operands, spec: Spec):
    """Returns out [*batch, T, N, V] and lse [*batch, N, T].

    Args:
        *operands: one array per name in spec.operands, each with its own leading batch
            axes, right-aligned, of size 1 or the full size.
        spec: the call.
    """
    return compat.bind(attention_forward_p, *operands, spec=spec)


def _abstract_eval(*avals, spec: Spec):
    names = spec.operands
    batch = common.full_batch(names, avals)
    q, v = avals[names.index("query")], avals[names.index("value")]
    q_len, num_heads, _ = q.shape[-3:]
    out = (*batch, q_len, num_heads, v.shape[-1])
    lse = (*batch, num_heads, q_len)
    return [
        common.result_aval("out", out, q.dtype, names, avals),
        common.result_aval("lse", lse, accumulator(q.dtype), names, avals),
    ]


def _lower(ctx, *operands, spec: Spec, platform: str | None):
    backend = ffi.choose(spec, ctx.avals_in, platform)
    if backend == "reference":
        return compat.lower_function(ctx, partial(reference.forward, spec), *operands)
    results = list(zip(("out", "lse"), ctx.avals_out, strict=True))
    return ffi.call(ctx, operands, backend, "forward", spec, spec.operands, results)


def _batch(operands, dims, *, spec: Spec):
    operands = common.batch_operands(spec.operands, operands, dims)
    return attention_forward(*operands, spec=spec), [0, 0]


def _jvp(primals, tangents, *, spec: Spec):
    out, lse = attention_forward(*primals, spec=spec)
    # The tangent's residuals are these very values, so the names must be on them here:
    # names that a caller puts on the results would not save the kernel from rerunning.
    out = checkpoint_name(out, "jaxflash_out")
    lse = checkpoint_name(lse, "jaxflash_lse")
    live = {
        name: t
        for name, t in zip(spec.operands, tangents, strict=True)
        if name in DIFFERENTIABLE and type(t) is not ad.Zero
    }
    derivative = attention_tangent(
        *primals, out, lse, *live.values(), spec=spec, tangents=tuple(live)
    )
    return [out, lse], derivative


attention_forward_p.def_impl(partial(xla.apply_primitive, attention_forward_p))
attention_forward_p.def_abstract_eval(_abstract_eval)
mlir.register_lowering(attention_forward_p, partial(_lower, platform=None))
for _platform in ffi.PLATFORMS:
    mlir.register_lowering(
        attention_forward_p, partial(_lower, platform=_platform), platform=_platform
    )
batching.primitive_batchers[attention_forward_p] = _batch
ad.primitive_jvps[attention_forward_p] = _jvp
