"""Softcap, sinks and ALiBi over many blocks, where the kernels serve them."""

import numpy as np
import pytest
from calls import KINDS, QKV, cotangents, make_call, run, run_gradients, serving
from checks import check, check_bar, check_no_effect
from compare import assert_equal

SCALE = np.array(-0.3, np.float32)


def softcap_on():
    return pytest.mark.implementations("reference", *serving("softcap"))


def sinks_on():
    return pytest.mark.implementations("reference", *serving("sinks"))


def alibi_on():
    return pytest.mark.implementations("reference", *serving("alibi_slopes"))


def make(T=150, S=220, dtype="float32", **arguments):
    return make_call(T, S, K=2, dtype=dtype, scale=SCALE, **arguments)


@softcap_on()
@pytest.mark.parametrize("is_causal", [False, True])
def test_softcap(implementation, dtype, is_causal):
    call = make(dtype=dtype, softcap=1.5, is_causal=is_causal, query_offset=50)
    check(call, implementation)


# Products up to some 1e4, caps far below and far above them.
@softcap_on()
@pytest.mark.parametrize("softcap", [10.0, 30.0, 50.0, 1e5])
def test_softcap_of_large_logits(implementation, dtype, softcap):
    call = make_call(70, 90, K=2, H=128, dtype=dtype, softcap=softcap)
    for name in ("query", "key"):
        call[name] = (call[name] * np.float32(60)).astype(call[name].dtype)
    check(call, implementation)


@softcap_on()
def test_saturated_softcap_has_no_gradient(implementation, dtype):
    call = make_call(70, 90, K=2, dtype=dtype, softcap=10.0)
    call["scale"] = np.array(8, np.float32)
    call["query"] = np.abs(call["query"]) + call["query"].dtype.type(20)
    call["key"] = np.abs(call["key"]) + call["key"].dtype.type(20)
    wrt = ("query", "key", "scale")
    grads = run_gradients(call, implementation, *cotangents(call), wrt)
    for name in wrt:
        assert not np.asarray(grads[name], np.float32).any(), name


@pytest.mark.implementations(*serving("softcap"))
@pytest.mark.parametrize("kind", KINDS)
def test_softcap_meets_the_accuracy_bar(implementation, dtype, kind):
    call = make_call(208, K=2, H=64, dtype=dtype, kind=kind, seed=3, softcap=20.0)
    check_bar(call, implementation, dtype)


SINKS = np.array([0.5, -np.inf, 3.0, -40.0], np.float32)


@sinks_on()
@pytest.mark.parametrize("is_causal", [False, True])
def test_sinks(implementation, dtype, is_causal):
    call = make(dtype=dtype, sinks=SINKS, is_causal=is_causal, query_offset=-20)
    call["query_seq_lengths"] = np.array([150, 70], np.int32)
    call["key_value_seq_lengths"] = np.array([0, 210], np.int32)
    check(call, implementation)


# One that leaves nothing to the keys, and others far above and below all scores.
@sinks_on()
@pytest.mark.parametrize("sink", [30.0, 1e4, -1e4])
def test_sinks_of_any_size(implementation, dtype, sink):
    sinks = np.array([sink, 0, sink, 0], np.float32)
    check(make(dtype=dtype, sinks=sinks), implementation)


@sinks_on()
def test_an_infinite_sink_takes_everything(implementation, dtype):
    sinks = np.array([np.inf, 0, np.inf, -1], np.float32)
    call = make(dtype=dtype, sinks=sinks)
    out, lse = (np.asarray(x, np.float32) for x in run(call, implementation))
    assert not out[:, :, ::2].any()
    assert np.all(lse[:, :, ::2] == np.inf)
    wrt = (*QKV, "sinks", "scale")
    grads = run_gradients(call, implementation, *cotangents(call), wrt)
    assert not np.asarray(grads["query"], np.float32)[:, :, ::2].any()
    assert not np.asarray(grads["sinks"])[::2].any()
    check(call, implementation)


@sinks_on()
def test_rows_without_keys_have_their_sink(implementation, dtype):
    call = make(70, 90, dtype, sinks=SINKS)
    call["query_seq_lengths"] = np.array([70, 40], np.int32)
    call["is_causal"], call["query_offset"] = True, -30
    _, lse = run(call, implementation)
    lse = np.asarray(lse)
    assert np.all(lse[:, :30] == SINKS)
    assert np.all(lse[1, 40:] == -np.inf)
    d_out, d_lse = cotangents(call)
    d_out[:, 30:], d_lse[:, 30:] = 0, 0
    grad = run_gradients(call, implementation, d_out, d_lse, ["sinks"])["sinks"]
    want = np.where(np.isinf(SINKS), 0, d_lse[:, :30].sum((0, 1), np.float64))
    np.testing.assert_allclose(np.asarray(grad), want, rtol=1e-5, atol=1e-5)


@alibi_on()
@pytest.mark.parametrize("offset", [0, 70, -100])
def test_alibi(implementation, dtype, offset):
    slopes = np.array([[0.5, 0.1, 0.0, -0.02], [0.3, 2.0, 0.01, 0.2]], np.float32)
    call = make(dtype=dtype, alibi_slopes=slopes)
    check(call | {"query_offset": np.array(offset, np.int32)}, implementation)


# All keys are far away: the terms are large, and what lse lacks is not.
@alibi_on()
def test_alibi_of_distant_keys(implementation, working_dtype):
    slopes = np.array([0.5, 0.25, 0.125, 1.0], np.float32)
    call = make(70, 150, working_dtype, alibi_slopes=slopes)
    check(call | {"query_offset": 4096, "scale": np.array(0, "f")}, implementation)


@alibi_on()
@pytest.mark.parametrize("offset", [2**30, -(2**31), 2**31 - 1])
def test_alibi_of_extreme_offsets(implementation, offset):
    call = make(5, 7, alibi_slopes=np.full(4, 1e-9, np.float32))
    check(call | {"query_offset": np.array(offset, np.int32)}, implementation)


@pytest.mark.implementations(
    "reference", *serving("softcap", "sinks", "alibi_slopes", "mask")
)
@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_hidden_garbage_has_no_effect(implementation, dtype, garbage):
    call = make(110, 200, dtype, softcap=5.0, sinks=SINKS, is_causal=True)
    call["alibi_slopes"] = np.abs(SINKS[:1]).repeat(4)
    call["mask"] = np.random.default_rng(0).random((1, 1, 1, 200)) < 0.5
    dirty = {name: call[name].copy() for name in ("key", "value")}
    for x in dirty.values():
        x[:, ~call["mask"][0, 0, 0]] = x[:, 110:] = garbage
    check_no_effect(call, dirty, implementation)


# lse and the sink are as large as the bias, which leaves no bits of their distance.
@pytest.mark.implementations("reference", *serving("sinks"))
@pytest.mark.parametrize("size", [-1e9, -300.0, 300.0, 1e9])
def test_sinks_as_large_as_the_bias(implementation, dtype, size):
    call = make_call(40, 70, K=2, dtype=dtype, scale=SCALE)
    call["query"] = np.zeros_like(call["query"])  # products have no room beside it
    call["bias"] = np.full((40, 1), size, np.float32)
    call["sinks"] = np.float32(size) + np.array([0, 10, -3, 40], np.float32)
    check(call, implementation)


@pytest.mark.implementations("reference", *serving("sinks"))
def test_sinks_of_blind_rows_with_any_cotangent(implementation, working_dtype):
    call = make_call(20, 30, K=2, dtype=working_dtype)
    call["mask"] = np.arange(20)[:, None] % 3 > 0
    call["sinks"] = np.array([0.5, -1.0, 2.0, 0.0], np.float32)
    d_out, d_lse = cotangents(call)
    want = run_gradients(call, implementation, d_out, d_lse, (*QKV, "sinks"))
    d_out[:, ::3] = np.nan
    got = run_gradients(call, implementation, d_out, d_lse, (*QKV, "sinks"))
    for name, gradient in got.items():
        assert_equal(gradient, want[name], f"d{name}")


# A scale that is NaN makes NaN of what is seen, and nothing of what is not.
@softcap_on()
@pytest.mark.parametrize("hides", ["mask", "bias", "segments"])
def test_softcap_and_a_nan_scale(implementation, working_dtype, hides):
    call = make_call(20, 30, K=2, dtype=working_dtype, softcap=5.0)
    call["scale"] = np.array(np.nan, np.float32)
    seen = np.arange(30) % 4 > 0
    if hides == "mask":
        call["mask"] = seen[None, :]
    elif hides == "bias":
        call["bias"] = np.where(seen, 0, -np.inf).astype(np.float32)[None, :]
    else:
        call["query_segment_ids"] = np.ones((2, 20), np.int32)
        call["key_value_segment_ids"] = np.tile(seen, (2, 1)).astype(np.int32)
    grads = run_gradients(call, implementation, *cotangents(call))
    for name in ("key", "value"):
        gradient = np.asarray(grads[name], np.float32)
        assert not gradient[:, ~seen].any(), name
        assert np.isnan(gradient[:, seen]).all(), name


# Nothing is as large as such a cap, but scores divided by it would vanish.
@softcap_on()
def test_softcap_of_any_size(implementation, working_dtype):
    call = make_call(20, 30, K=2, dtype=working_dtype)
    want = run(call, implementation)
    for cap in (1e31, 3e38):
        got = run(call | {"softcap": cap}, implementation)
        for a, b in zip(got, want, strict=True):
            assert_equal(a, b)
