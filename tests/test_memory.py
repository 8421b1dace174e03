"""Temporaries stay linear in the length."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxflash import dot_product_attention

# A step of the reference holds some eight arrays of one block of scores, 64 MB each;
# kernels hold tiles. The scores of both heads would be 2 GB.
LIMIT = {"reference": 8 * 64 * 2**20, "cpu": 40 * 2**20}
N, H = 2, 64


def temporaries(implementation: str, length: int, pass_: str) -> int:
    """Bytes that XLA sets aside beside inputs and outputs, without running."""
    x = jax.ShapeDtypeStruct((1, length, N, H), jnp.float32)

    def forward(q, k, v):
        return dot_product_attention(
            q, k, v, is_causal=True, implementation=implementation
        )

    def backward(q, k, v):
        out, pullback = jax.vjp(forward, q, k, v)
        return pullback(out)

    def hvp(q, k, v):
        def loss(q):
            return (forward(q, k, v) ** 2).sum()

        return jax.jvp(jax.grad(loss), (q,), (v,))[1]

    function = {"forward": forward, "backward": backward, "hvp": hvp}[pass_]
    return bytes_of(jax.jit(function), x)


def bytes_of(function: Any, x: Any) -> int:
    analysis = function.lower(x, x, x).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


@pytest.mark.implementations("reference", "cpu")
@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_temporaries_are_linear_in_the_length(implementation, pass_):
    length = 16_384
    inputs = 4 * length * N * H
    half, full = (temporaries(implementation, n, pass_) for n in (length // 2, length))
    assert full < LIMIT[implementation] + 8 * inputs
    assert full <= 2.2 * half + 2**20


@pytest.mark.implementations("cpu")
@pytest.mark.parametrize("shape", [(1, N, 1, None), (1, 1, None, 1)])
def test_the_gradient_of_a_shared_bias_takes_no_more_than_the_bias(
    implementation, shape
):
    def temporaries(with_dbias):
        length = 16_384
        x = jax.ShapeDtypeStruct((1, length, N, H), jnp.float32)
        bias = jax.ShapeDtypeStruct([size or length for size in shape], jnp.float32)

        def gradients(x, bias, d_out):
            def attention(x, bias):
                return dot_product_attention(
                    x, x, x, bias, implementation=implementation
                )

            _, pullback = jax.vjp(attention, x, bias)
            return pullback(d_out)[: 2 if with_dbias else 1]

        lowered = jax.jit(gradients).lower(x, bias, x)
        analysis = lowered.compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes, bias.size * 4

    (without, _), (with_dbias, size) = temporaries(False), temporaries(True)
    assert with_dbias <= without + 4 * size


@pytest.mark.implementations("reference", "cpu")
def test_second_order_is_linear_in_the_length(implementation):
    half, full = (temporaries(implementation, n, "hvp") for n in (8_192, 16_384))
    assert full <= 2.2 * half + 2**20
    assert full < 4 * N * 16_384**2


def test_the_measure_sees_a_dense_attention():
    x = jax.ShapeDtypeStruct((1, 4_096, N, H), jnp.float32)
    dense = bytes_of(jax.jit(jax.nn.dot_product_attention), x)
    assert dense >= 4 * N * 4_096**2
