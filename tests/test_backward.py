"""Gradients against the oracle, for what every kernel serves."""

import jax
import numpy as np
import oracle
import pytest
from calls import QKV, cotangents, make_call, run_gradients
from compare import assert_close, assert_equal, assert_gradients

HEAD_DIMS = (1, 5, 20, 40, 63, 64, 72, 80, 96, 104, 128, 160, 192, 255, 256)
LENGTHS = ((1, 1), (1, 130), (130, 1), (64, 64), (63, 65), (129, 257), (192, 192))


def check(call, implementation, *, lse=True, wrt=QKV, **more):
    d_out, d_lse = cotangents(call, lse=lse)
    grads = run_gradients(call, implementation, d_out, d_lse if lse else None, wrt)
    assert_gradients(call, grads, d_out, d_lse)
    for name in wrt:
        assert grads[name].dtype == np.asarray(call[name]).dtype, name
    return grads


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("T", "S"), LENGTHS)
def test_backward_of_any_length(implementation, dtype, T, S, is_causal):
    call = make_call(T, S, N=2, K=1, dtype=dtype, is_causal=is_causal)
    check(call, implementation)


@pytest.mark.parametrize("H", HEAD_DIMS)
def test_backward_of_any_head_dim(implementation, dtype, H):
    check(make_call(34, 70, batch=(1,), N=2, H=H, dtype=dtype), implementation)


@pytest.mark.parametrize(("N", "K"), [(12, 4), (32, 1), (7, 7), (48, 8), (3, 3)])
def test_backward_sums_over_the_group(implementation, dtype, N, K):
    call = make_call(17, 33, N=N, K=K, dtype=dtype, is_causal=True)
    check(call, implementation)


@pytest.mark.parametrize("batch", [(), (1,), (5,), (2, 3), (2, 1, 2)])
def test_backward_of_any_number_of_batch_axes(implementation, working_dtype, batch):
    call = make_call(9, 12, batch=batch, dtype=working_dtype)
    call["key_value_seq_lengths"] = np.arange(
        1, np.prod(batch, dtype=int) + 1, dtype=np.int32
    ).reshape(batch)
    check(call, implementation)


@pytest.mark.parametrize("offset", [0, 7, -7, 48, -48, 95, -96, 200, -200])
def test_causal_backward_counts_positions_from_the_query_offset(
    implementation, working_dtype, offset
):
    call = make_call(96, 48, N=1, dtype=working_dtype, is_causal=True)
    call["query_offset"] = np.asarray(offset, np.int32)
    check(call, implementation)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("which", ["query", "key_value", "both"])
def test_padding_gets_and_gives_no_gradient(implementation, dtype, which, is_causal):
    lengths = [24, 125, 53, 0, 128]
    call = make_call(128, batch=(5,), N=2, K=1, dtype=dtype, is_causal=is_causal)
    if which != "key_value":
        call["query_seq_lengths"] = np.array(lengths, np.int32)
    if which != "query":
        call["key_value_seq_lengths"] = np.array(lengths[::-1], np.int32)
    grads = check(call, implementation)
    for b, length in enumerate(lengths):
        if which != "key_value":
            assert np.all(np.asarray(grads["query"][b, length:]) == 0)
        if which != "query":
            for name in ("key", "value"):
                assert np.all(np.asarray(grads[name][b, lengths[4 - b] :]) == 0)


def test_backward_with_lengths_and_causal_offset(implementation, working_dtype):
    lengths = np.array([76, 34, 40, 1], np.int32), np.array([1, 1, 76, 0], np.int32)
    call = make_call(76, batch=(4,), N=1, H=32, dtype=working_dtype, is_causal=True)
    call["value"] = call["value"] * call["value"].dtype.type(3)
    call |= {"query_seq_lengths": lengths[0], "key_value_seq_lengths": lengths[1]}
    call["query_offset"] = lengths[1] - lengths[0]
    check(call, implementation)


@pytest.mark.parametrize("scale", [-0.5, 0.0, 1e-8, 3.0])
def test_traced_scale_has_a_gradient(implementation, working_dtype, scale):
    call = make_call(18, 40, dtype=working_dtype, is_causal=True, query_offset=3)
    call["scale"] = np.full((), scale, np.float32)
    check(call, implementation, wrt=(*QKV, "scale"))
    check(call, implementation, wrt=("scale",))


@pytest.mark.parametrize(
    "wrt", [("query",), ("key",), ("value",), ("query", "value"), ("key", "value")]
)
def test_a_subset_of_gradients_equals_the_full_set(implementation, working_dtype, wrt):
    call = make_call(40, 50, K=2, dtype=working_dtype, is_causal=True)
    d_out, d_lse = cotangents(call)
    some = run_gradients(call, implementation, d_out, d_lse, wrt, deterministic=True)
    full = run_gradients(call, implementation, d_out, d_lse, deterministic=True)
    for name in wrt:
        # A kernel computes each gradient the same way; XLA fuses two programs of plain
        # JAX in two ways.
        if implementation == "reference":
            size = np.abs(np.asarray(full[name])).max()
            assert_close(some[name], full[name], 4e-7 * size, f"d{name}")
        else:
            assert_equal(some[name], full[name], f"d{name}")


def test_cotangent_of_lse_alone(implementation, dtype):
    call = make_call(33, 47, K=2, dtype=dtype, is_causal=True)
    _, d_lse = cotangents(call)
    d_out = np.zeros_like(call["query"])
    grads = run_gradients(call, implementation, d_out, d_lse)
    assert_gradients(call, grads, d_out, d_lse)
    assert np.all(np.asarray(grads["value"]) == 0)
    assert np.any(np.asarray(grads["query"]) != 0)


def test_z_loss_reaches_the_query(implementation, working_dtype):
    from jaxflash import dot_product_attention

    call = make_call(12, 20, dtype=working_dtype)

    def z_loss(q):
        arguments = call | {"query": q, "implementation": implementation}
        _, lse = dot_product_attention(**arguments, return_residual=True)
        return (lse**2).sum()

    grad = jax.jit(jax.grad(z_loss))(call["query"])
    _, lse = oracle.forward(call)
    d_out = np.zeros_like(call["query"])
    assert_gradients(call, {"query": grad}, d_out, 2 * lse)


def test_without_a_residual_lse_has_no_cotangent(implementation, dtype):
    call = make_call(33, 47, K=2, dtype=dtype, is_causal=True)
    check(call, implementation, lse=False)


def test_zero_cotangents_give_exactly_zero(implementation, dtype):
    call = make_call(19, 35, K=2, dtype=dtype, is_causal=True, query_offset=-3)
    call["scale"] = np.ones((), np.float32)
    d_out, d_lse = (np.zeros_like(x) for x in cotangents(call))
    grads = run_gradients(call, implementation, d_out, d_lse, (*QKV, "scale"))
    for name, grad in grads.items():
        assert np.all(np.asarray(grad) == 0), name
