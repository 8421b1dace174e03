"""Every name that JAX keeps private or that differs between JAX 0.9 and 0.12."""

import contextlib
from typing import Any

import jax
from jax._src import core as _core
from jax.core import ShapedArray
from jax.interpreters import mlir


def _find_unify() -> Any:
    """What marks arrays as varying over the same manual mesh axes.

    It has no public name in any version of JAX: the first name is that of jax >= 0.10,
    the second that of 0.9.
    """
    names = ("auto_insert_reshard", "standard_insert_pvary")
    for name in names:
        if hasattr(_core, name):
            return getattr(_core, name)
    raise ImportError(
        f"jaxflash supports jax 0.9 to 0.12 and found jax {jax.__version__}, which has "
        f"none of {', '.join(names)} in jax._src.core; install one that is supported"
    )


_unify = _find_unify()


def bind(primitive, *args, **params):
    """Binds after marking all operands as varying over the same manual mesh axes.

    Inside shard_map with check_vma=True, JAX's own primitives do this in their
    wrappers; a primitive bound directly must ask for it.
    """
    return primitive.bind(*_unify(*args), **params)


def vary_like(values, others):
    """`values`, marked as varying over every manual mesh axis of `others`.

    A scan demands that its carry has the type that its body returns.
    """
    flat, tree = jax.tree.flatten(values)
    return jax.tree.unflatten(tree, _unify(*flat, *others)[: len(flat)])


@contextlib.contextmanager
def _no_mesh():
    # An empty mesh that is already empty must not be entered again: doing so would
    # change the trace context and miss JAX's caches.
    if jax.sharding.get_abstract_mesh().empty:
        yield
    else:
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            yield


def lower_function(ctx: mlir.LoweringRuleContext, function, *args):
    """Lowers plain JAX code for operands whose types carry shardings or mesh axes.

    Lowering happens inside the partitioned program, where those types have done their
    work: jnp code is traced as on one device and the partitioner splits the result.
    """
    with _no_mesh():
        given: Any = ctx.avals_in
        avals = [ShapedArray(aval.shape, aval.dtype) for aval in given]
        plain = ctx.replace(avals_in=avals)
        return mlir.lower_fun(function, multiple_results=True)(plain, *args)
