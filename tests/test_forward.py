"""out and lse against the oracle, for what every kernel serves."""

import jax
import numpy as np
import oracle
import pytest
from calls import make_call, run
from compare import (
    assert_close,
    assert_forward,
    assert_meets_bar,
    jax_nn_attention,
    xla_attention,
)

import jaxflash

HEAD_DIMS = (1, 5, 20, 40, 63, 64, 72, 80, 96, 104, 128, 160, 192, 255, 256)
LENGTHS = ((1, 1), (1, 130), (130, 1), (64, 64), (63, 65), (129, 257), (192, 192))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("T", "S"), LENGTHS)
def test_forward_of_any_length(implementation, dtype, T, S, is_causal):
    call = make_call(T, S, N=2, K=1, dtype=dtype, is_causal=is_causal)
    assert_forward(call, *run(call, implementation))


@pytest.mark.parametrize("H", HEAD_DIMS)
def test_forward_of_any_head_dim(implementation, dtype, H):
    call = make_call(34, 70, batch=(1,), N=2, H=H, dtype=dtype)
    assert_forward(call, *run(call, implementation))


@pytest.mark.parametrize(("N", "K"), [(12, 4), (32, 1), (7, 7), (48, 8), (3, 3)])
def test_forward_of_grouped_heads(implementation, dtype, N, K):
    call = make_call(17, 33, N=N, K=K, dtype=dtype, is_causal=True)
    assert_forward(call, *run(call, implementation))


@pytest.mark.parametrize("batch", [(), (1,), (5,), (2, 3), (2, 1, 2)])
def test_forward_of_any_number_of_batch_axes(implementation, working_dtype, batch):
    call = make_call(9, 12, batch=batch, dtype=working_dtype)
    call["key_value_seq_lengths"] = np.arange(
        1, np.prod(batch, dtype=int) + 1, dtype=np.int32
    ).reshape(batch)
    assert_forward(call, *run(call, implementation))


@pytest.mark.parametrize("offset", [0, 7, -7, 48, -48, 95, -96, 200, -200])
def test_causal_counts_positions_from_the_query_offset(
    implementation, working_dtype, offset
):
    call = make_call(96, 48, N=1, dtype=working_dtype, is_causal=True)
    call["query_offset"] = np.asarray(offset, np.int32)
    assert_forward(call, *run(call, implementation))


def test_causal_alignment_is_top_left_by_default_and_bottom_right_by_offset(
    implementation, working_dtype
):
    T, S = 80, 40
    call = make_call(T, S, N=1, dtype=working_dtype, is_causal=True)
    _, top_left = run(call, implementation)
    _, unmasked = run(call | {"is_causal": False}, implementation)
    out, bottom_right = run(call | {"query_offset": S - T}, implementation)
    np.testing.assert_array_equal(top_left[:, S - 1 :], unmasked[:, S - 1 :])
    assert np.all(np.asarray(bottom_right[:, : T - S]) == -np.inf)
    assert np.all(np.asarray(out[:, : T - S]) == 0)
    assert np.all(np.isfinite(np.asarray(bottom_right[:, T - S :])))


def test_query_offset_per_batch_element(implementation, working_dtype):
    call = make_call(20, 30, batch=(4,), dtype=working_dtype, is_causal=True)
    call["query_offset"] = np.array([0, 10, -5, 29], np.int32)
    assert_forward(call, *run(call, implementation))


def test_chunks_by_query_offset_equal_the_whole(implementation, working_dtype):
    call = make_call(60, 60, dtype=working_dtype, is_causal=True)
    out, lse = run(call, implementation)
    for start, stop in ((0, 1), (1, 23), (23, 60)):
        chunk = call | {"query": call["query"][:, start:stop], "query_offset": start}
        got, got_lse = run(chunk, implementation)
        assert_close(got, out[:, start:stop], 2e-3 if out.itemsize == 2 else 1e-6)
        assert_close(got_lse, lse[:, start:stop], 1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("which", ["query", "key_value", "both"])
def test_sequence_lengths_hide_the_padding(implementation, dtype, which, is_causal):
    lengths = [24, 125, 53, 0, 128]
    call = make_call(128, batch=(5,), N=2, K=1, dtype=dtype, is_causal=is_causal)
    if which != "key_value":
        call["query_seq_lengths"] = np.array(lengths, np.int32)
    if which != "query":
        call["key_value_seq_lengths"] = np.array(lengths[::-1], np.int32)
    assert_forward(call, *run(call, implementation))


def test_lengths_with_causal_offset_leave_rows_without_keys(
    implementation, working_dtype
):
    lengths = np.array([76, 34, 40, 1], np.int32), np.array([1, 1, 76, 0], np.int32)
    call = make_call(76, batch=(4,), N=1, H=32, dtype=working_dtype, is_causal=True)
    call |= {"query_seq_lengths": lengths[0], "key_value_seq_lengths": lengths[1]}
    call["query_offset"] = lengths[1] - lengths[0]
    assert_forward(call, *run(call, implementation))


@pytest.mark.parametrize("scale", [-0.5, 0.0, 1e-8, 300.0])
@pytest.mark.parametrize("traced", [False, True])
def test_scale_is_applied_before_anything_is_hidden(
    implementation, working_dtype, scale, traced
):
    call = make_call(18, 40, dtype=working_dtype, is_causal=True, query_offset=3)
    call["scale"] = np.full((), scale, np.float32) if traced else scale
    results = run(call, implementation), jax.jit(lambda: xla_attention(call))()
    results = (*results, oracle.forward(call), oracle.forward_terms(call))
    out, lse = zip(*results, strict=True)
    assert_meets_bar(*out, working_dtype, "out")
    assert_meets_bar(*lse, "float32", "lse")


def test_default_scale_is_the_inverse_root_of_the_head_dim(
    implementation, working_dtype
):
    call = make_call(H=25, dtype=working_dtype)
    default = run(call, implementation)
    explicit = run(call | {"scale": 0.2}, implementation)
    for got, want in zip(default, explicit, strict=True):
        np.testing.assert_array_equal(got, want)


def test_residual_is_float32_with_heads_last(implementation, dtype):
    call = make_call(5, 6, batch=(2, 3), N=4, dtype=dtype)
    arrays = {name: jax.numpy.asarray(x) for name, x in call.items()}
    out = jaxflash.dot_product_attention(**arrays, implementation=implementation)
    both, lse = jaxflash.dot_product_attention(
        **arrays, implementation=implementation, return_residual=True
    )
    assert (lse.shape, lse.dtype) == ((2, 3, 5, 4), np.float32)
    assert (out.shape, out.dtype) == ((2, 3, 5, 4, 16), dtype)
    np.testing.assert_array_equal(out, both)


def test_yardstick_is_the_attention_of_jax_nn():
    for dtype in ("float32", "bfloat16", "float16"):
        call = make_call(33, 40, K=2, dtype=dtype)
        want = jax_nn_attention(**call)
        got, _ = xla_attention(call)
        # Two programs: the sums of softmax and of the product may round either way in
        # each of them.
        unit = float(jax.numpy.finfo(dtype).eps)
        assert_close(got, want, 4 * unit * np.abs(np.asarray(want, np.float64)).max())
