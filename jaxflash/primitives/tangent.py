"""attention_tangent: the derivative of attention_forward, linear in the tangents."""

from functools import partial

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from jaxflash import compat, reference
from jaxflash.primitives import common
from jaxflash.primitives.backward import attention_backward
from jaxflash.spec import Spec, accumulator, lead, residuals

attention_tangent_p = Primitive("attention_tangent")
attention_tangent_p.multiple_results = True


def _names(operands, spec: Spec, tangents: tuple[str, ...]) -> tuple[str, ...]:
    """What each operand is; a tangent is shaped like its primal."""
    query = operands[spec.operands.index("query")]
    return (*spec.operands, *residuals(query.dtype), *tangents)


def attention_tangent(*operands, spec: Spec, tangents: tuple[str, ...]):
    """Returns t_out and t_lse.

    Args:
        *operands: those of attention_forward, its residuals, and the tangents.
        spec: the call.
        tangents: the names of the operands whose tangents are given.
    """
    return compat.bind(attention_tangent_p, *operands, spec=spec, tangents=tangents)


def _abstract_eval(*avals, spec: Spec, tangents: tuple[str, ...]):
    names = _names(avals, spec, tangents)
    batch = common.full_batch(names, avals)
    out, lse = (avals[names.index(name)] for name in ("out", "lse"))
    dtype = accumulator(out.dtype)
    return [
        common.result_aval("out", (*batch, *out.shape[-3:]), out.dtype, names, avals),
        common.result_aval("lse", (*batch, *lse.shape[-2:]), dtype, names, avals),
    ]


def _lower(ctx, *operands, spec: Spec, tangents: tuple[str, ...]):
    return compat.lower_function(
        ctx, partial(reference.tangent, spec, tangents), *operands
    )


def _batch(operands, dims, *, spec: Spec, tangents: tuple[str, ...]):
    names = _names(operands, spec, tangents)
    operands = common.batch_operands(names, operands, dims)
    return attention_tangent(*operands, spec=spec, tangents=tangents), [0, 0]


def _jvp(primals, change, *, spec: Spec, tangents: tuple[str, ...]):
    values = attention_tangent(*primals, spec=spec, tangents=tangents)
    function = partial(reference.tangent, spec, tangents)
    return values, list(common.jvp_of_reference(function, primals, change, values))


def _transpose(cotangents, *operands, spec: Spec, tangents: tuple[str, ...]):
    count = len(operands) - len(tangents)
    linear = dict(zip(tangents, operands[count:], strict=True))
    shapes = {
        name: t.aval.shape for name, t in linear.items() if ad.is_undefined_primal(t)
    }
    d_out, d_lse = cotangents
    if type(d_out) is ad.Zero:
        d_out = ad.instantiate_zeros(d_out)
    known = (*operands[:count], d_out)
    if type(d_lse) is not ad.Zero:
        known = (*known, d_lse)
    batch = lead("d_out", d_out.shape)
    grads = attention_backward(
        *known,
        spec=spec,
        wanted=tuple(shapes),
        summed=tuple(_shared(lead(name, shapes[name]), batch) for name in shapes),
    )
    done = {
        name: grad.reshape(shapes[name])
        for name, grad in zip(shapes, grads, strict=True)
    }
    return [None] * count + [done.get(name) for name in tangents]


def _shared(own: tuple[int, ...], batch: tuple[int, ...]) -> tuple[int, ...]:
    """Batch axes, counted from the right, along which an operand does not vary."""
    own = (1,) * (len(batch) - len(own)) + own
    return tuple(
        axis for axis in range(-len(batch), 0) if own[axis] == 1 and batch[axis] != 1
    )


attention_tangent_p.def_impl(partial(xla.apply_primitive, attention_tangent_p))
attention_tangent_p.def_abstract_eval(_abstract_eval)
mlir.register_lowering(attention_tangent_p, _lower)
batching.primitive_batchers[attention_tangent_p] = _batch
ad.primitive_jvps[attention_tangent_p] = _jvp
ad.primitive_transposes[attention_tangent_p] = _transpose
