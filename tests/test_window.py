"""Local windows, on the implementations that serve them."""

import numpy as np
import pytest
from calls import KINDS, QKV, cotangents, make_call, run, run_gradients, serving
from checks import check, check_no_effect
from compare import assert_equal, assert_forward

pytestmark = pytest.mark.implementations("reference", *serving("window"))

T, S = 19, 23
OFFSETS = [np.asarray(offset, np.int32) for offset in (0, 4, -6)]


def make(T=T, S=S, dtype="float32", **arguments):
    return make_call(T, S, K=2, dtype=dtype, **arguments)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "window", [0, 3, (3, 0), (0, 5), (2, 1), (None, 2), (2, None), (None, None), 99]
)
def test_forward(implementation, window, is_causal):
    for offset in OFFSETS:
        call = make(local_window_size=window, query_offset=offset, is_causal=is_causal)
        assert_forward(call, *run(call, implementation))


SCALE = np.array(-0.3, np.float32)


@pytest.mark.parametrize("window", [3, (2, 1), (None, 2), (5, None)])
def test_gradients(implementation, window):
    check(make(local_window_size=window, query_offset=2, scale=SCALE), implementation)


# Of rows that see nothing, too: the window of the last ones lies behind the keys.
@pytest.mark.parametrize("window", [(60, 0), (0, 60), (7, 70), (130, None), (None, 3)])
@pytest.mark.parametrize(("T", "S", "offset"), [(300, 210, 0), (150, 320, 130)])
def test_many_blocks(implementation, dtype, window, T, S, offset):
    call = make(T, S, dtype, local_window_size=window, scale=SCALE)
    check(call | {"query_offset": np.array(offset, np.int32)}, implementation)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "gaussian"])
def test_structured_inputs(implementation, dtype, kind):
    call = make_call(300, K=2, H=64, dtype=dtype, kind=kind, local_window_size=(90, 0))
    check(call, implementation)


def test_with_lengths(implementation):
    call = make(150, 140, local_window_size=(20, 30), scale=SCALE)
    call["query_seq_lengths"] = np.array([150, 31], np.int32)
    call["key_value_seq_lengths"] = np.array([0, 100], np.int32)
    check(call, implementation)


@pytest.mark.parametrize("left", [S, S - 1, 10_000, 2**31 - 1, None])
def test_a_window_as_long_as_the_keys_is_causal(implementation, left):
    call = make()
    windowed = run(call | {"local_window_size": (left, 0)}, implementation)
    causal = run(call | {"is_causal": True}, implementation)
    for got, want in zip(windowed, causal, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("offset", [2**30, 2**31 - 1, -(2**31)])
def test_extreme_sides_hide_nothing_at_extreme_offsets(implementation, offset):
    call = make(query_offset=np.array(offset, np.int32))
    for window in (2**31 - 1, None), (None, 2**31 - 1):
        got = run(call | {"local_window_size": window}, implementation)
        for result, want in zip(got, run(call, implementation), strict=True):
            assert_equal(result, want)


# The window of all rows lies behind the keys, or that of the last 30 does.
@pytest.mark.parametrize("offset", [200, 60])
def test_nan_scale_leaves_what_no_window_joins_empty(implementation, offset):
    call = make(90, 80, local_window_size=(10, 0), query_offset=offset)
    call["scale"] = np.array(np.nan, np.float32)
    blind = np.arange(90) + offset - 10 >= 80
    out, lse = run(call, implementation)
    assert not np.asarray(out)[:, blind].any()
    assert np.all(np.asarray(lse)[:, blind] == -np.inf)
    assert np.isnan(np.asarray(out)[:, ~blind]).all()
    grads = run_gradients(call, implementation, *cotangents(call))
    assert not np.asarray(grads["query"])[:, blind].any()
    unseen = slice(0, 50 if offset == 60 else 80)
    for name in ("key", "value"):
        assert not np.asarray(grads[name])[:, unseen].any(), name


# The rows see the keys 51 to 142 of 220, the first one an odd one.
@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_garbage_outside_of_all_windows_has_no_effect(implementation, dtype, garbage):
    call = make(33, 220, dtype, local_window_size=(49, 10), query_offset=100)
    dirty = {name: call[name].copy() for name in QKV}
    for name in ("key", "value"):
        dirty[name][:, :51], dirty[name][:, 143:] = garbage, garbage
    check_no_effect(call, dirty, implementation)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_garbage_reaches_only_the_rows_that_see_it(implementation, dtype, bad):
    call = make(140, 140, dtype, local_window_size=(41, 0))
    cts = cotangents(call)
    clean = run(call, implementation)
    clean_dq = run_gradients(call, implementation, *cts, deterministic=True)["query"]
    call["value"][1, 24, 0, 3] = call["key"][1, 24, 0, 3] = bad
    got = run(call, implementation)
    dq = run_gradients(call, implementation, *cts, deterministic=True)["query"]
    touched = np.zeros((2, 140, 4), bool)
    touched[1, 24:66, :2] = True
    for result, want in (*zip(got, clean, strict=True), (dq, clean_dq)):
        assert_equal(np.asarray(result)[~touched], np.asarray(want)[~touched])
    if np.isnan(bad):
        assert np.all(np.isnan(np.asarray(got[1])[touched]))
