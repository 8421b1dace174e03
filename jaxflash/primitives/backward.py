"""attention_backward: the transpose of attention_tangent."""

from functools import partial

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from jaxflash import compat, ffi, reference, selection
from jaxflash.primitives import common
from jaxflash.spec import Spec, core_rank, residuals

attention_backward_p = Primitive("attention_backward")
attention_backward_p.multiple_results = True


def operand_names(operands, spec: Spec) -> tuple[str, ...]:
    """What each operand is."""
    query = operands[spec.operands.index("query")]
    names = (*spec.operands, *residuals(query.dtype), "d_out", "d_lse")
    return names[: len(operands)]


def attention_backward(
    *operands,
    spec: Spec,
    wanted: tuple[str, ...],
    summed: tuple[tuple[int, ...], ...],
):
    """Returns one gradient per wanted operand, in its dtype.

    Args:
        *operands: those of attention_forward, its residuals, d_out, and d_lse unless
            it is zero.
        spec: the call.
        wanted: the names of the operands whose gradients are returned.
        summed: for each, the batch axes over which its gradient is summed because the
            operand is shared. They count from the right, so that vmap adds axes in
            front without changing them, and stay in the gradient with size 1.
    """
    return compat.bind(
        attention_backward_p, *operands, spec=spec, wanted=wanted, summed=summed
    )


def _abstract_eval(*avals, spec: Spec, wanted, summed):
    names = operand_names(avals, spec)
    batch = common.full_batch(names, avals)
    results = []
    for name, axes in zip(wanted, summed, strict=True):
        aval = avals[names.index(name)]
        own = tuple(
            1 if i - len(batch) in axes else size for i, size in enumerate(batch)
        )
        shape = own + aval.shape[aval.ndim - core_rank(name) :]
        results.append(common.result_aval(name, shape, aval.dtype, names, avals))
    return results


def _lower(ctx, *operands, spec: Spec, wanted, summed, platform: str | None):
    names = operand_names(ctx.avals_in, spec)
    backend = selection.choose(spec, ctx.avals_in, platform)
    if backend == "reference":
        function = partial(reference.backward, spec, names, wanted, summed)
        return compat.lower_function(ctx, function, *operands)
    return ffi.call_backward(ctx, operands, backend, spec, names, wanted, summed)


def _batch(operands, dims, *, spec: Spec, wanted, summed):
    operands = common.batch_operands(operand_names(operands, spec), operands, dims)
    grads = attention_backward(*operands, spec=spec, wanted=wanted, summed=summed)
    return grads, [0] * len(grads)


def _jvp(primals, tangents, *, spec: Spec, wanted, summed):
    grads = attention_backward(*primals, spec=spec, wanted=wanted, summed=summed)
    names = operand_names(primals, spec)
    function = partial(reference.backward, spec, names, wanted, summed)
    return grads, list(common.jvp_of_reference(function, primals, tangents, grads))


attention_backward_p.def_impl(partial(xla.apply_primitive, attention_backward_p))
attention_backward_p.def_abstract_eval(_abstract_eval)
mlir.register_lowering(attention_backward_p, partial(_lower, platform=None))
for _platform in selection.PLATFORMS:
    mlir.register_lowering(
        attention_backward_p, partial(_lower, platform=_platform), platform=_platform
    )
batching.primitive_batchers[attention_backward_p] = _batch
ad.primitive_jvps[attention_backward_p] = _jvp
