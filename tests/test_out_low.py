"""out_low: the bits of out that rounding takes, and what the gradients gain by them."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from calls import cotangents, make_call, run_gradients
from compare import assert_close, with_low_bits

from jaxflash import dot_product_attention
from jaxflash.primitives.forward import attention_forward
from jaxflash.spec import Spec

KERNELS = pytest.mark.implementations("cpu", "cuda")


@pytest.fixture
def half(dtype):
    """The dtype, where it has 16 bits."""
    if dtype == "float32":
        pytest.skip("float32 has no out_low")
    return dtype


def forward(call, implementation):
    """out, lse and out_low of the primitive."""
    names = ["query", "key", "value", "scale"]
    operands = [jnp.asarray(call[name]) for name in names[:3]]
    operands.append(jnp.float32(call["scale"]))
    if "query_offset" in call:
        names.append("query_offset")
        operands.append(jnp.int32(call["query_offset"]))
    spec = Spec(
        tuple(names),
        is_causal=call.get("is_causal", False),
        implementation=implementation,
    )
    return attention_forward(*operands, spec=spec, with_residuals=True)


@KERNELS
@pytest.mark.parametrize("H", [8, 30, 64, 80, 128, 256])
def test_out_and_out_low_together_have_eight_bits_more(implementation, half, H):
    # Equal scores: every weight is 1, so nothing but the last rounding is inexact.
    call = make_call(70, 96, N=2, H=H, dtype=half, scale=0.0)
    out, _, low = forward(call, implementation)
    want = oracle.forward(call)[0]
    eps = float(jnp.finfo(half).eps)
    exact = with_low_bits(out, low)
    normal = np.abs(want) > float(jnp.finfo(half).tiny)
    assert_close(exact[normal], want[normal], eps / 256 * np.abs(want[normal]) + 1e-7)
    # Not the same without: the test would see bits that are not there.
    assert np.abs(np.asarray(out).astype(np.float64) - want).max() > eps / 40


@KERNELS
@pytest.mark.parametrize("H", [64, 96, 128, 192, 256])
def test_out_is_an_exact_mean_of_constant_values(implementation, dtype, H):
    # Logits that grow with the key: the maximum moves from tile to tile.
    call = make_call(33, 500, N=2, H=H, dtype=dtype, scale=0.3)
    call["key"] *= np.linspace(0.1, 2, 500)[:, None, None].astype(call["key"].dtype)
    call["value"][...] = 50.0
    results = forward(call, implementation)
    out = np.asarray(results[0]).astype(np.float32)
    np.testing.assert_allclose(out, 50.0, rtol=2e-6)
    if dtype != "float32":
        np.testing.assert_allclose(
            with_low_bits(results[0], results[2]), 50.0, rtol=2e-5
        )


@KERNELS
@pytest.mark.parametrize("S", [0, 3, 150])
def test_rows_without_keys_lose_nothing(implementation, half, S):
    # The first five rows come before the first key.
    call = make_call(140, S, N=2, H=64, dtype=half, scale=1.0)
    call |= {"is_causal": True, "query_offset": -5}
    out, _, low = forward(call, implementation)
    empty = slice(None) if S == 0 else slice(0, 5)
    assert not np.asarray(out)[:, empty].any()
    assert not np.asarray(low)[:, empty].any()
    assert S == 0 or np.asarray(low)[:, 8:].any()


@pytest.mark.implementations("reference", "cpu")
def test_float32_has_no_low_bits(implementation):
    call = make_call(5, 7, N=2, H=16, scale=1.0)
    assert len(forward(call, implementation)) == 2


@pytest.mark.every_dtype
def test_a_constant_channel_of_values_gives_query_no_gradient(implementation, dtype):
    call = make_call(40, 90, N=2, H=64, dtype=dtype)
    call["value"][...] = 300.0
    d_out, d_lse = cotangents(call, lse=False)
    grads = run_gradients(call, implementation, d_out, d_lse)
    # Every dP of a row is the same number, so dS is 0 but for the rounding of delta.
    size = oracle.backward(call, d_out, d_lse, absolute=True)["query"].max()
    assert np.abs(np.asarray(grads["query"]).astype(np.float64)).max() < 3e-5 * size


def test_a_gradient_with_a_residual_can_be_differentiated(
    implementation, working_dtype
):
    dtype = "bfloat16" if working_dtype == "float32" else working_dtype
    call = make_call(9, 11, N=2, H=8, dtype=dtype, batch=())

    def loss(query):
        out = dot_product_attention(
            query, call["key"], call["value"], implementation=implementation
        )
        return (out.astype(jnp.float32) ** 2).sum()

    query = jnp.asarray(call["query"])
    forward_over_reverse = jax.jvp(jax.grad(loss), (query,), (query,))[1]
    assert np.isfinite(np.asarray(forward_over_reverse).astype(np.float32)).all()
