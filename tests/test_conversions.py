"""What may stand for an array: lists, wide integers, wrappers of traced values."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import make_call

from jaxflash import dot_product_attention

DTYPES = ("float32", "float16")
CALLS = {dtype: make_call(9, 11, batch=(2,), dtype=dtype) for dtype in DTYPES}


class Wrapper:
    """Like a parameter of Flax: unwrapped by JAX, everything else goes to its array."""

    def __init__(self, array):
        self.array = array

    def __jax_array__(self):
        return self.array

    def __getattr__(self, name):
        return getattr(self.array, name)


@pytest.fixture
def attention(implementation, working_dtype):
    return functools.partial(
        dot_product_attention,
        **CALLS[working_dtype],
        is_causal=True,
        implementation=implementation,
    )


@pytest.mark.parametrize("name", ["query_seq_lengths", "key_value_seq_lengths"])
def test_lengths_in_a_list_may_be_traced(attention, name):
    got = jax.jit(lambda n: attention(**{name: [n, 3]}))(jnp.int32(5))
    want = attention(**{name: np.array([5, 3], np.int32)})
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_wrapped_arrays_may_be_traced(attention):
    def loss(wrap, scale, lengths):
        return (
            attention(
                scale=wrap(scale),
                query_offset=wrap(lengths),
                key_value_seq_lengths=wrap(lengths),
            )
            .astype(jnp.float32)
            .sum()
        )

    step = jax.jit(jax.value_and_grad(loss, argnums=1), static_argnums=0)
    arrays = jnp.float32(0.3), jnp.array([5, 11], jnp.int32)
    got, want = step(Wrapper, *arrays), step(jnp.asarray, *arrays)
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("offset", [2**40, -(2**40), 2**32, 3])
def test_offsets_of_wider_integers_are_clamped_and_not_cut(attention, offset):
    want = attention(query_offset=offset)
    for wide in (np.array(offset), np.full(2, offset), np.int64(offset)):
        got = attention(query_offset=wide)
        np.testing.assert_array_equal(got, want)
