"""What the rules of the three primitives share."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import ShapedArray
from jax.interpreters import ad
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxflash.spec import CORE_AXES, batch_shape, core_rank, lead


def batch_operands(
    names: Sequence[str], arrays: Sequence[Array], dims: Sequence[int | None]
) -> list[Array]:
    """Puts the mapped axis in front of every mapped operand; the others stay as is.

    Batch axes are right-aligned, so a mapped operand that has fewer of them than
    another gets axes of size 1 behind the mapped one.
    """
    moved = [
        array if dim is None else jnp.moveaxis(array, dim, 0)
        for array, dim in zip(arrays, dims, strict=True)
    ]
    rank = max(
        len(lead(name, array.shape)) - (dim is not None)
        for name, array, dim in zip(names, moved, dims, strict=True)
    )
    padded = []
    for name, array, dim in zip(names, moved, dims, strict=True):
        missing = rank + 1 - len(lead(name, array.shape))
        if dim is not None and missing:
            array = jnp.expand_dims(array, tuple(range(1, missing + 1)))
        padded.append(array)
    return padded


def result_aval(
    name: str,
    shape: Sequence[int],
    dtype,
    names: Sequence[str],
    avals: Sequence[ShapedArray],
) -> ShapedArray:
    """Type of a result shaped like operand `name`.

    Explicit shardings: a gradient is sharded as its operand. Otherwise, each batch
    axis is sharded as in the first operand that shards it, and the heads as in query.
    """
    like = avals[names.index(name if name in names else "query")]
    rank = len(shape) - core_rank(name)
    spec: list[Any] = [None] * len(shape)
    for operand, aval in zip(names, avals, strict=True):
        own = len(lead(operand, aval.shape))
        for axis in range(-min(rank, own), 0):
            if aval.shape[own + axis] == shape[rank + axis]:
                spec[rank + axis] = spec[rank + axis] or aval.sharding.spec[own + axis]
    given = like.sharding.spec
    if name in names:
        for axis in range(-min(len(shape), like.ndim), 0):
            if like.shape[axis] == shape[axis]:
                spec[axis] = given[like.ndim + axis]
    else:
        heads = like.ndim - core_rank("query") + CORE_AXES["query"].index("N")
        spec[rank + CORE_AXES[name].index("N")] = given[heads]
    sharding = NamedSharding(like.sharding.mesh, PartitionSpec(*spec))
    return like.update(
        shape=tuple(shape), dtype=jnp.dtype(dtype), weak_type=False, sharding=sharding
    )


def full_batch(names: Sequence[str], arrays: Sequence) -> tuple[int, ...]:
    """The broadcast batch shape of arrays or avals."""
    return batch_shape(names, [array.shape for array in arrays])


def jvp_of_reference(function, primals, tangents, values):
    """Derivative of a reference function in the inputs whose tangents are not zero.

    `values`, what the function returns, tell how its derivative is sharded: the
    function itself is written for one device.
    """
    shardings = tuple(jax.typeof(value).sharding for value in values)
    if any(AxisType.Explicit in sharding.mesh.axis_types for sharding in shardings):
        specs = tuple(sharding.spec for sharding in shardings)
        function = jax.sharding.auto_axes(function, out_sharding=specs)
    live = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]

    def of_live(*some):
        arrays = list(primals)
        for i, array in zip(live, some, strict=True):
            arrays[i] = array
        return function(*arrays)

    return jax.jvp(of_live, [primals[i] for i in live], [tangents[i] for i in live])[1]
