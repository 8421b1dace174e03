"""The corner cases that must come out the same on every backend."""

import numpy as np
import pytest
from calls import QKV, cotangents, make_call, run, run_gradients
from compare import (
    assert_close,
    assert_equal,
    assert_forward,
    assert_gradients,
)

INT32 = np.iinfo(np.int32)


def finite(x) -> bool:
    return bool(np.all(np.isfinite(np.asarray(x, np.float64))))


@pytest.mark.parametrize("is_causal", [False, True])
def test_no_keys_give_zero_rows(implementation, dtype, is_causal):
    call = make_call(7, 0, N=4, K=2, dtype=dtype, is_causal=is_causal)
    out, lse = run(call, implementation)
    assert out.shape == (2, 7, 4, 16)
    assert np.all(np.asarray(out) == 0)
    assert np.all(np.asarray(lse) == -np.inf)
    grads = run_gradients(call, implementation, *cotangents(call))
    assert np.all(np.asarray(grads["query"]) == 0)
    assert grads["key"].shape == grads["value"].shape == (2, 0, 2, 16)


@pytest.mark.parametrize(
    ("batch", "T", "S", "N", "K"),
    [
        ((2,), 0, 5, 4, 4),
        ((0,), 3, 5, 4, 4),
        ((2,), 3, 5, 0, 0),
        ((2,), 3, 5, 0, 2),
        ((0,), 0, 0, 2, 2),
    ],
)
def test_empty_arrays_have_the_right_shape(implementation, dtype, batch, T, S, N, K):
    call = make_call(T, S, batch=batch, N=N, K=K, dtype=dtype)
    out, lse = run(call, implementation)
    assert (out.shape, out.dtype) == ((*batch, T, N, 16), dtype)
    assert (lse.shape, lse.dtype) == ((*batch, T, N), np.float32)
    grads = run_gradients(call, implementation, *cotangents(call))
    for name in QKV:
        assert grads[name].shape == call[name].shape
        assert np.all(np.asarray(grads[name]) == 0)


def test_rows_without_keys_change_no_other_gradient(implementation, working_dtype):
    blind = 21
    call = make_call(50, 40, K=2, dtype=working_dtype, is_causal=True)
    call |= {"query_offset": -blind}
    d_out, d_lse = cotangents(call)
    grads = run_gradients(call, implementation, d_out, d_lse)
    assert all(finite(x) for x in grads.values())
    assert np.all(np.asarray(grads["query"][:, :blind]) == 0)
    seeing = call | {"query": call["query"][:, blind:], "query_offset": 0}
    assert_gradients(
        seeing,
        {"query": grads["query"][:, blind:], "key": grads["key"]}
        | {"value": grads["value"]},
        d_out[:, blind:],
        d_lse[:, blind:],
    )


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("hidden_by", ["length", "causal", "query_length"])
def test_garbage_that_no_row_sees_has_no_effect(
    implementation, dtype, hidden_by, garbage
):
    call = make_call(33, 70, K=2, dtype=dtype)
    first = 33
    if hidden_by == "length":
        call["key_value_seq_lengths"] = np.array([33, 0], np.int32)
    elif hidden_by == "causal":
        call["is_causal"] = True
    else:
        call |= {"is_causal": True, "query_offset": 5}
        call["query_seq_lengths"] = np.array([28, 3], np.int32)
    dirty = {name: call[name].copy() for name in QKV}
    for name in ("key", "value"):
        dirty[name][:, first:] = garbage
    if hidden_by == "length":
        dirty["key"][1], dirty["value"][1] = garbage, garbage
    if hidden_by == "query_length":
        dirty["query"][0, 28:], dirty["query"][1, 3:] = garbage, garbage
    dirty = call | dirty
    results = run(dirty, implementation), run(call, implementation)
    for got, want in zip(*results, strict=True):
        assert_equal(got, want)
    cts = cotangents(call)
    grads = run_gradients(dirty, implementation, *cts, deterministic=True)
    want = run_gradients(call, implementation, *cts, deterministic=True)
    for name in QKV:
        assert_equal(grads[name], want[name], f"d{name}")
        assert finite(grads[name])


@pytest.mark.implementations("reference")
@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_garbage_under_a_bias_of_minus_inf_has_no_effect(
    implementation, dtype, garbage
):
    call = make_call(33, 70, K=2, dtype=dtype, bias=np.zeros((33, 70), np.float32))
    call["bias"][:, 40:] = -np.inf
    call["bias"][5] = -np.inf
    dirty = {name: call[name].copy() for name in QKV}
    dirty["query"][:, 5] = garbage
    dirty["key"][:, 40:], dirty["value"][:, 40:] = garbage, garbage
    dirty = call | dirty
    for got, want in zip(
        run(dirty, implementation), run(call, implementation), strict=True
    ):
        assert_equal(got, want)
    cts = cotangents(call)
    want = run_gradients(call, implementation, *cts)
    for name, got in run_gradients(dirty, implementation, *cts).items():
        assert_equal(got, want[name], f"d{name}")
        assert finite(got)


@pytest.mark.parametrize("is_causal", [False, True])
def test_nan_in_a_query_row_stays_in_that_row(implementation, dtype, is_causal):
    call = make_call(40, 40, K=2, dtype=dtype, is_causal=is_causal)
    clean = run(call, implementation)
    call["query"][0, 17, 2, 3] = np.nan
    for got, want in zip(run(call, implementation), clean, strict=True):
        got, want = np.asarray(got, np.float64), np.array(want, np.float64)
        want[0, 17, 2] = np.nan
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_in_a_key_reaches_only_the_rows_that_see_it(implementation, dtype, bad):
    call = make_call(40, 40, K=2, dtype=dtype, is_causal=True)
    clean = run(call, implementation)
    call["key"][1, 25, 0, 3] = bad
    for got, want in zip(run(call, implementation), clean, strict=True):
        got, want = np.asarray(got, np.float64), np.array(want, np.float64)
        touched = np.zeros(got.shape, bool)
        touched[1, 25:, :2] = True
        np.testing.assert_array_equal(got[~touched], want[~touched])
        # +inf times a negative query is a logit of -inf, which is merely hidden.
        assert np.isnan(got[touched]).all() if np.isnan(bad) else True


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_in_a_value_stays_in_its_column(implementation, dtype, bad):
    call = make_call(40, 40, K=2, dtype=dtype, is_causal=True)
    out, lse = run(call, implementation)
    call["value"][1, 25, 0, 3] = bad
    got, got_lse = run(call, implementation)
    np.testing.assert_array_equal(got_lse, lse)
    want = np.array(out, np.float64)
    got = np.asarray(got, np.float64)
    assert not np.isfinite(got[1, 25:, :2, 3]).any()
    got[1, 25:, :2, 3] = want[1, 25:, :2, 3] = 0
    np.testing.assert_array_equal(got, want)


def test_nan_scale_is_no_uniform_mean(implementation, working_dtype):
    call = make_call(20, 30, N=4, K=2, dtype=working_dtype)
    out, lse = run(call | {"scale": np.array(np.nan, np.float32)}, implementation)
    assert np.all(np.isnan(np.asarray(out, np.float32)))
    assert np.all(np.isnan(np.asarray(lse)))


def check_blind_rows(call, implementation, blind):
    """Rows [B, T] that see no key give exactly nothing, whatever the others give."""
    out, lse = (np.asarray(x, np.float64) for x in run(call, implementation))
    assert np.all(out[blind] == 0)
    assert np.all(lse[blind] == -np.inf)
    grads = run_gradients(call, implementation, *cotangents(call))
    assert np.all(np.asarray(grads["query"], np.float64)[blind] == 0)
    return out, lse, grads


# 20: the portable CUDA kernels, also on Hopper.
@pytest.mark.parametrize("H", [20, 64, 192])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_visible_garbage_leaves_padded_rows_empty(
    implementation, dtype, bad, is_causal, H
):
    call = make_call(150, 140, N=2, K=1, H=H, dtype=dtype, is_causal=is_causal)
    lengths = np.array([70, 0], np.int32)
    call["query_seq_lengths"] = lengths
    call["key"][:, 3, 0, 2] = bad
    call["value"][:, 5] = bad
    out, _, _ = check_blind_rows(
        call, implementation, np.arange(150) >= lengths[:, None]
    )
    assert not np.isfinite(out[0, 5:70]).any()


@pytest.mark.parametrize("hidden_by", ["length", "causal", "query_length"])
@pytest.mark.parametrize("H", [20, 64, 192])
def test_nan_scale_leaves_rows_without_keys_empty(
    implementation, working_dtype, hidden_by, H
):
    call = make_call(90, 80, N=2, K=1, H=H, dtype=working_dtype)
    call["scale"] = np.array(np.nan, np.float32)
    blind = np.zeros((2, 90), bool)
    if hidden_by == "length":
        call["key_value_seq_lengths"] = np.array([0, 80], np.int32)
        blind[0] = True
    elif hidden_by == "causal":
        call |= {"is_causal": True, "query_offset": -21}
        blind[:, :21] = True
    else:
        call["query_seq_lengths"] = np.array([0, 70], np.int32)
        blind[0], blind[1, 70:] = True, True
    out, lse, grads = check_blind_rows(call, implementation, blind)
    assert np.all(np.isnan(out[~blind]))
    assert np.all(np.isnan(lse[~blind]))
    if hidden_by != "causal":
        # Nobody sees the keys of the first batch element.
        assert not np.asarray(grads["key"][0]).any()
        assert not np.asarray(grads["value"][0]).any()


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("offset", [INT32.max, INT32.min, 2**30, -(2**30)])
def test_extreme_query_offsets_do_not_wrap(
    implementation, working_dtype, offset, traced
):
    call = make_call(9, 12, dtype=working_dtype, is_causal=True)
    call["query_offset"] = np.asarray(offset, np.int32) if traced else offset
    call["key_value_seq_lengths"] = np.array([12, 5], np.int32)
    assert_forward(call, *run(call, implementation))
    d_out, d_lse = cotangents(call)
    grads = run_gradients(call, implementation, d_out, d_lse)
    assert_gradients(call, grads, d_out, d_lse)


@pytest.mark.parametrize(("B", "N"), [(65_600, 1), (1, 65_600), (10_923, 6)])
def test_more_batch_and_heads_than_a_cuda_grid_axis_holds(implementation, B, N):
    dtype = "float16"
    call = make_call(2, 3, batch=(B,), N=N, H=4, dtype=dtype)
    d_out, d_lse = cotangents(call)
    out, lse = run(call, implementation)
    grads = run_gradients(call, implementation, d_out, d_lse)
    axis, half = (0, B // 2) if B > 1 else (2, N // 2)

    def take(x):
        return np.take(x, range(half, 2 * half), axis)

    part = {name: take(call[name]) for name in QKV}
    part_out, part_lse = run(part, implementation)
    assert_equal(take(out), np.asarray(part_out))
    assert_equal(take(lse), np.asarray(part_lse))
    want = run_gradients(part, implementation, take(d_out), take(d_lse))
    for name in QKV:
        assert_close(take(grads[name]), want[name], 2e-3, f"d{name}")
    assert_forward(part, part_out, part_lse)


@pytest.mark.implementations("reference", "cpu")
def test_a_row_of_infinitely_low_logits_takes_no_part(implementation):
    call = make_call(40, 50, K=2)
    call["query"][:, 7] = 1e30
    call["key"][...] = -1e30 * np.abs(call["key"])
    out, lse = run(call, implementation)
    assert not np.asarray(out)[:, 7].any()
    assert np.all(np.asarray(lse)[:, 7] == -np.inf)
    grads = run_gradients(call, implementation, *cotangents(call))
    assert not np.asarray(grads["query"])[:, 7].any()
