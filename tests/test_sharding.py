"""Batches spread over two devices, by plain jit and by shard_map."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import QKV, make_call
from compare import assert_close
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxflash import dot_product_attention

pytestmark = pytest.mark.implementations("reference", "cpu")


@pytest.fixture
def mesh():
    return jax.make_mesh(
        (2,), ("data",), (AxisType.Auto,), devices=jax.devices("cpu")[:2]
    )


def loss(qkv, implementation):
    out, lse = dot_product_attention(
        *qkv, is_causal=True, implementation=implementation, return_residual=True
    )
    return (out**2).sum() + (lse**2).sum()


@pytest.fixture
def qkv():
    call = make_call(18, 18, batch=(4,), K=2)
    return tuple(jnp.asarray(call[name]) for name in QKV)


def check(got, want):
    for leaf, target in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        size = float(np.abs(np.asarray(target)).max())
        assert_close(np.asarray(leaf), target, 1e-5 * size)


def test_batch_sharded_inputs_under_jit(implementation, mesh, qkv):
    step = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    want = step(qkv, implementation)
    sharded = jax.device_put(qkv, NamedSharding(mesh, P("data")))
    got = step(sharded, implementation)
    assert len(sharded[0].sharding.device_set) == 2
    check(got, want)


def test_only_some_inputs_sharded(implementation, mesh, qkv):
    step = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    want = step(qkv, implementation)
    placed = tuple(
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(qkv, (P("data"), P(), P(None, "data")), strict=True)
    )
    check(step(placed, implementation), want)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_over_the_batch(implementation, mesh, qkv, check_vma):
    attention = functools.partial(
        dot_product_attention, is_causal=True, implementation=implementation
    )
    spec = P("data")
    local = jax.shard_map(
        attention, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma
    )

    def total(function, qkv):
        return (function(*qkv) ** 2).sum()

    step = jax.value_and_grad(total, argnums=1)
    got = jax.jit(functools.partial(step, local))(qkv)
    check(got, jax.jit(functools.partial(step, attention))(qkv))


def test_devices_do_not_wait_for_each_other(implementation, mesh, qkv):
    """The same program on both devices at once, with a collective between calls."""
    attention = functools.partial(
        dot_product_attention, is_causal=True, implementation=implementation
    )

    def ring(q, k, v):
        out = attention(q, k, v)
        for _ in range(3):
            k, v = (jax.lax.ppermute(x, "data", [(0, 1), (1, 0)]) for x in (k, v))
            out = out + attention(q, k, v)
        return out

    spec = P("data")
    got = jax.jit(jax.shard_map(ring, mesh=mesh, in_specs=spec, out_specs=spec))(*qkv)
    q, k, v = qkv
    other = [jnp.roll(x, 2, axis=0) for x in (k, v)]
    want = 2 * attention(q, k, v) + 2 * attention(q, *other)
    check(got, want)


EXPLICIT = [
    (P("data"), P("data")),
    (P(None, None, "data"), P(None, None, "data")),
    (P(None, "data"), P()),
    (P(), P("data")),
]


@pytest.mark.parametrize(("of_query", "of_keys"), EXPLICIT, ids=str)
def test_explicit_shardings_of_gradients(implementation, qkv, of_query, of_keys):
    """A gradient has the type of its operand, to any order."""

    def curvature(qkv):
        slopes = jax.grad(loss)(qkv, implementation)
        return sum((slope**2).sum() for slope in slopes)

    small = tuple(x[:2, :6] for x in qkv)
    both = jax.jit(lambda qkv: (jax.grad(loss)(qkv, implementation),
                                jax.grad(curvature)(qkv)))  # fmt: skip
    want = both(small)
    mesh = jax.make_mesh(
        (2,), ("data",), (AxisType.Explicit,), devices=jax.devices("cpu")[:2]
    )
    with jax.set_mesh(mesh):
        placed = tuple(
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(small, (of_query, of_keys, of_keys), strict=True)
        )
        got = both(placed)
    for leaf, x in zip(got[0], placed, strict=True):
        assert jax.typeof(leaf) == jax.typeof(x)
    check(got, want)
