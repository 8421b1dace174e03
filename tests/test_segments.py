"""Segment ids, on the implementations that serve them."""

import numpy as np
import pytest
from calls import KINDS, make_call, run, serving
from checks import check, check_bar, check_no_effect, check_reaches_only
from compare import assert_equal

SERVING = serving("query_segment_ids")
pytestmark = pytest.mark.implementations("reference", *SERVING)

B, N = 2, 4


def ids(length, *ends):
    """[B, length]: 0 before the first end, then 1, and so on."""
    one = np.searchsorted(np.array(ends), np.arange(length), side="right")
    return np.stack([one] * B).astype(np.int32)


def make(T, S, q_ids, kv_ids, dtype="float32", **arguments):
    call = make_call(T, S, N=N, K=2, dtype=dtype, **arguments)
    return call | {"query_segment_ids": q_ids, "key_value_segment_ids": kv_ids}


# Sorted, packed documents; the lengths of a document differ between the two sides.
@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_documents(implementation, dtype, is_causal):
    q_ids, kv_ids = ids(300, 40, 41, 200, 250), ids(280, 60, 100, 130, 250)
    call = make(300, 280, q_ids, kv_ids, dtype, is_causal=is_causal)
    check(call | {"scale": np.array(-0.3, np.float32)}, implementation)


def test_ids_in_any_order(implementation, dtype):
    rng = np.random.default_rng(2)
    q_ids, kv_ids = (rng.integers(-2, 3, (B, n)).astype(np.int32) for n in (130, 150))
    check(make(130, 150, q_ids, kv_ids, dtype), implementation)


def test_ids_of_any_size(implementation):
    values = np.array([-(2**31), -1, 0, 2**24, 2**24 + 1, 2**31 - 1], np.int32)
    rng = np.random.default_rng(3)
    q_ids, kv_ids = (rng.choice(values, (B, n)) for n in (40, 50))
    check(make(40, 50, q_ids, kv_ids), implementation)


def test_ids_per_batch_element(implementation):
    call = make(90, 90, ids(90, 30), ids(90, 30))
    for name in ("query_segment_ids", "key_value_segment_ids"):
        call[name] = np.stack([call[name][0], np.roll(call[name][0], 17)])
    check(call, implementation)


def test_a_segment_without_keys_is_empty(implementation):
    call = make(60, 70, ids(60, 20, 40), ids(70, 35) * 2)
    out, lse = run(call, implementation)
    assert not np.asarray(out)[:, 20:40].any()
    assert np.all(np.asarray(lse)[:, 20:40] == -np.inf)
    check(call, implementation)


def test_one_segment_is_plain_attention(implementation):
    call = make(70, 80, ids(70), ids(80))
    plain = {name: call[name] for name in ("query", "key", "value")}
    got, want = run(call, implementation), run(plain, implementation)
    for result, expected in zip(got, want, strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)


# The segments begin and end inside of blocks.
def test_other_segments_have_no_effect(implementation, dtype):
    segments = ids(250, 70, 111)
    call = make(250, 250, segments, segments, dtype, is_causal=True)
    changed = {name: call[name].copy() for name in ("query", "key", "value")}
    for x in changed.values():
        x[:, 70:111] *= 3
    before, after = (run(x, implementation) for x in (call, call | changed))
    others = np.r_[0:70, 111:250]
    for got, want in zip(after, before, strict=True):
        assert_equal(np.asarray(got)[:, others], np.asarray(want)[:, others])
    assert not np.array_equal(after[1][:, 70:111], before[1][:, 70:111])


@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_garbage_in_padding_has_no_effect(implementation, dtype, garbage):
    kv_ids = ids(200, 61)
    kv_ids[:, 150:] = 9
    call = make(110, 200, ids(110, 50), kv_ids, dtype)
    dirty = {name: call[name].copy() for name in ("key", "value")}
    for x in dirty.values():
        x[:, 150:] = garbage
    check_no_effect(call, dirty, implementation)


def test_nan_reaches_only_its_segment(implementation, dtype):
    segments = ids(140, 33, 90)
    call = make(140, 140, segments, segments, dtype)
    dirty = {name: call[name].copy() for name in ("key", "value")}
    for x in dirty.values():
        x[1, 40, 1, 2] = np.nan
    touched = np.zeros((B, 140, N), bool)
    touched[1, 33:90, 2:] = True
    check_reaches_only(call, dirty, touched, implementation)


@pytest.mark.implementations(*SERVING)
@pytest.mark.parametrize("kind", KINDS)
def test_segments_meet_the_accuracy_bar(implementation, dtype, kind):
    call = make_call(208, K=2, H=64, dtype=dtype, kind=kind, seed=3)
    segments = ids(208, 50, 140)
    call |= {"query_segment_ids": segments, "key_value_segment_ids": segments}
    check_bar(call, implementation, dtype)
