"""Sizes where 32-bit arithmetic would fail; they need a GPU's memory and speed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_close, assert_equal

from jaxflash import dot_product_attention

pytestmark = pytest.mark.gpu


def random(shape, dtype, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    return tuple(jax.random.normal(key, shape, dtype) for key in keys)


@jax.jit
def attention(q, k, v):
    return dot_product_attention(
        q, k, v, is_causal=True, implementation="cuda", return_residual=True
    )


@jax.jit
def gradients(q, k, v):
    (out, lse), pullback = jax.vjp(attention, q, k, v)
    return pullback((out, lse))


def wide(x):
    return np.asarray(x, np.float32)


@pytest.mark.parametrize("length", [17_476, 17_477])
def test_more_than_two_to_the_31_elements(length):
    qkv = random((16, length, 60, 128), jnp.bfloat16)
    out, lse = attention(*qkv)
    last = tuple(x[15:] for x in qkv)
    for got, want in zip((out, lse), attention(*last), strict=True):
        assert_equal(wide(got[15:]), wide(want))


def test_gradients_of_more_than_two_to_the_31_elements():
    qkv = random((16, 17_477, 60, 128), jnp.bfloat16)
    last = gradients(*(x[15:] for x in qkv))
    # The order of additions into dq is free, hence a rounding unit of slack.
    for got, want in zip(gradients(*qkv), last, strict=True):
        want = wide(want)
        assert_close(wide(got[15:]), want, 2**-8 * float(np.abs(want).max()))


def test_half_a_million_batch_heads():
    qkv = random((65_536, 4, 8, 64), jnp.float16)
    results = attention(*qkv), gradients(*qkv)
    tail = tuple(x[65_530:] for x in qkv)
    for got, want in zip(results[0], attention(*tail), strict=True):
        assert_equal(wide(got[65_530:]), wide(want))
    for got, want in zip(results[1], gradients(*tail), strict=True):
        assert_close(wide(got[65_530:]), wide(want), 2**-10)


def test_more_heads_than_a_grid_axis_holds():
    qkv = random((1, 4, 65_536, 16), jnp.float16)
    tail = tuple(x[:, :, 65_530:] for x in qkv)
    for got, want in zip(attention(*qkv), attention(*tail), strict=True):
        assert_equal(wide(got[:, :, 65_530:]), wide(want))


def test_long_rows_agree_with_their_chunks():
    q, k, v = random((1, 131_072, 2, 64), jnp.bfloat16)
    out, lse = attention(q, k, v)
    start = 131_072 - 100
    got, got_lse = dot_product_attention(
        q[:, start:],
        k,
        v,
        is_causal=True,
        query_offset=start,
        implementation="cuda",
        return_residual=True,
    )
    assert_close(wide(got), wide(out[:, start:]), 2**-8)
    assert_close(wide(got_lse), wide(lse[:, start:]), 1e-4)
