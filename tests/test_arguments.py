"""Arguments that change the scores, against the oracle, with every gradient."""

import jax
import numpy as np
import oracle
import pytest
from calls import (
    EVERYTHING,
    QKV,
    cotangents,
    make_call,
    run,
    run_gradients,
    serving,
)
from compare import assert_equal, assert_forward, assert_gradients

from jaxflash import options

pytestmark = pytest.mark.implementations("reference", *serving(*EVERYTHING))

B, N, T, S = 2, 4, 19, 23
LOWEST = np.finfo(np.float32).min
SEGMENTS = {
    "query_segment_ids": np.repeat([[0, 1, 2], [4, 3, 3]], (5, 6, 8), 1),
    "key_value_segment_ids": np.repeat([[0, 1, 2], [3, 4, 5]], (7, 7, 9), 1),
}
SEGMENTS = {name: ids.astype(np.int32) for name, ids in SEGMENTS.items()}


def make(dtype="float32", **arguments):
    return make_call(T, S, batch=(B,), N=N, K=2, dtype=dtype, **arguments)


def check(call, implementation, wrt=(), lse=True):
    """out, lse and the gradients with respect to query, key, value and `wrt`."""
    out, lse_out = run(call, implementation)
    assert_forward(call, out, lse_out)
    d_out, d_lse = cotangents(call)
    grads = run_gradients(call, implementation, d_out, d_lse, (*QKV, *wrt))
    assert_gradients(call, grads, d_out, d_lse)
    for name, grad in grads.items():
        assert grad.dtype == np.asarray(call[name]).dtype, name
        assert np.all(np.isfinite(np.asarray(grad, np.float64))), name
    return out, lse_out, grads


def rng_array(shape, dtype="float32", seed=7):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def rng_mask(shape, seed=7):
    return np.random.default_rng(seed).random(shape) < 0.6


SHAPES = [(B, N, T, S), (1, N, T, S), (B, 1, T, S), (1, 1, T, S), (B, 1, 1, S)]
SHAPES += [(T, S), (N, T, S), (B, N, T, 1), (B, N, 1, S), (1, N, 1, 1), (1, 1, T, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bias_of_any_broadcastable_shape_has_a_gradient(implementation, shape):
    check(make(bias=rng_array(shape)), implementation, wrt=("bias",))


@pytest.mark.every_dtype
@pytest.mark.parametrize("bias_dtype", ["float32", "bfloat16", "float16"])
def test_bias_of_any_float_dtype(implementation, dtype, bias_dtype):
    bias = rng_array((B, 1, T, S)).astype(np.dtype(bias_dtype))
    call = make(dtype, bias=bias, is_causal=True, query_offset=4)
    check(call, implementation, wrt=("bias",))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mask_of_any_broadcastable_shape(implementation, shape):
    call = make(mask=rng_mask(shape))
    assert_forward(call, *run(call, implementation))


def test_mask_with_empty_rows_changes_no_other_gradient(implementation, dtype):
    mask = rng_mask((B, N, T, S))
    mask[0, :, 3:9] = False
    call = make(dtype, mask=mask)
    out, lse, grads = check(call, implementation)
    assert np.all(np.asarray(out[0, 3:9]) == 0)
    assert np.all(np.asarray(lse[0, 3:9]) == -np.inf)
    assert np.all(np.asarray(grads["query"][0, 3:9]) == 0)


def test_lowest_bias_in_part_of_a_row_is_exact(implementation):
    bias = np.zeros((B, 1, T, S), np.float32)
    bias[..., :12] = LOWEST
    out, _, _ = check(make(bias=bias), implementation, wrt=("bias",))
    mask = np.arange(S) >= 12
    want, _ = run(make(mask=mask[None, None, None]), implementation)
    np.testing.assert_allclose(out, want, rtol=1e-6, atol=1e-6)


def test_lowest_bias_over_a_whole_row_is_a_uniform_average(implementation):
    bias = np.zeros((1, 1, T, S), np.float32)
    bias[..., 5, :] = LOWEST
    call = make(bias=bias)
    out, _ = run(call, implementation)
    want = call["value"].mean(1).repeat(2, axis=1)
    np.testing.assert_allclose(out[:, 5], want, rtol=1e-5, atol=1e-6)


def test_minus_infinity_bias_over_a_whole_row_is_a_row_without_keys(implementation):
    bias = np.zeros((1, 1, T, S), np.float32)
    bias[..., 5, :] = -np.inf
    bias[..., 6, ::2] = -np.inf
    out, lse, grads = check(make(bias=bias), implementation, wrt=("bias",))
    assert np.all(np.asarray(out[:, 5]) == 0)
    assert np.all(np.asarray(lse[:, 5]) == -np.inf)
    assert np.all(np.asarray(grads["bias"][..., 5, :]) == 0)


@pytest.mark.parametrize("is_causal", [False, True])
def test_segments(implementation, dtype, is_causal):
    check(make(dtype, **SEGMENTS, is_causal=is_causal), implementation)


def test_segments_do_not_see_each_other(implementation):
    call = make(**SEGMENTS)
    changed = call | {name: call[name].copy() for name in ("key", "value")}
    for name in ("key", "value"):
        changed[name][0, :7] = np.nan
    for got, want in zip(
        run(changed, implementation), run(call, implementation), strict=True
    ):
        assert_equal(np.asarray(got)[0, 5:], np.asarray(want)[0, 5:])
        assert_equal(np.asarray(got)[1], np.asarray(want)[1])


def test_segment_boundaries_stop_gradients(implementation):
    call = make(**SEGMENTS)
    d_out, d_lse = (x.copy() for x in cotangents(call))
    d_out[0, 5:], d_lse[0, 5:] = 0, 0
    grads = run_gradients(call, implementation, d_out, d_lse)
    assert np.all(np.asarray(grads["query"][0, 5:]) == 0)
    for name in ("key", "value"):
        assert np.all(np.asarray(grads[name][0, 7:]) == 0)
        assert np.any(np.asarray(grads[name][0, :7]) != 0)


@pytest.mark.parametrize("softcap", [0.5, 10, 50.0])
def test_softcap(implementation, softcap):
    call = make(softcap=softcap, is_causal=True, query_offset=4)
    for size in (1, 300):
        check(call | {"query": call["query"] * np.float32(size)}, implementation)


def test_saturated_softcap_has_gradient_zero(implementation):
    call = make(softcap=10.0)
    call["query"] = np.abs(call["query"]) * np.float32(1e4) + 1e4
    call["key"] = np.abs(call["key"]) + np.float32(1)
    grads = run_gradients(call, implementation, *cotangents(call))
    for name in ("query", "key"):
        assert np.all(np.asarray(grads[name]) == 0), name


@pytest.mark.every_dtype
def test_sinks(implementation, dtype):
    call = make(dtype, sinks=rng_array((N,)), is_causal=True, query_offset=-3)
    call["query_seq_lengths"] = np.array([T, 7], np.int32)
    out, lse, _ = check(call, implementation, wrt=("sinks",))
    np.testing.assert_array_equal(lse[0, :3], np.tile(call["sinks"], (3, 1)))
    assert np.all(np.asarray(lse[1, 7:]) == -np.inf)
    assert np.all(np.asarray(out[1, 7:]) == 0)


def test_infinite_sinks(implementation):
    sinks = np.array([-np.inf, np.inf, 0.0, 1.0], np.float32)
    call = make(sinks=sinks)
    cts = cotangents(call)
    out, lse = run(call, implementation)
    assert_forward(call, out, lse)
    bare, bare_lse = run(make(), implementation)
    np.testing.assert_array_equal(out[:, :, 0], bare[:, :, 0])
    np.testing.assert_array_equal(lse[:, :, 0], bare_lse[:, :, 0])
    assert np.all(np.asarray(out[:, :, 1]) == 0)
    assert np.all(np.asarray(lse[:, :, 1]) == np.inf)
    grads = run_gradients(call, implementation, *cts, (*QKV, "sinks"))
    assert np.all(np.asarray(grads["sinks"][:2]) == 0)
    assert np.all(np.asarray(grads["query"][:, :, 1]) == 0)
    assert_gradients(call, grads, *cts)


OFFSETS = [np.asarray(offset, np.int32) for offset in (0, 4, -6)]


@pytest.mark.parametrize("shape", [(N,), (B, N), (1, N)])
def test_alibi(implementation, shape):
    call = make(alibi_slopes=np.abs(rng_array(shape)))
    for offset in OFFSETS:
        call["query_offset"] = offset
        check(call, implementation, wrt=("alibi_slopes",))


@pytest.mark.parametrize(("H", "Hv"), [(24, 16), (16, 24), (12, 1), (1, 12)])
def test_value_head_dim_of_its_own(implementation, dtype, H, Hv):
    check(make(dtype, H=H, Hv=Hv, is_causal=True), implementation)


PRECISION = jax.lax.Precision


@pytest.mark.parametrize(
    "one", [*PRECISION, "highest", "high", "tensorfloat32"], ids=str
)
def test_pair_of_equal_precisions_is_that_precision(one):
    assert options.precision((one, one)) == options.precision(one)
    assert options.precision([one, one]) == options.precision(one)


@pytest.mark.parametrize(
    "pair", [(PRECISION.HIGHEST, PRECISION.DEFAULT), ("highest", "high")], ids=str
)
def test_pair_of_unequal_precisions_is_refused(implementation, pair):
    with pytest.raises(ValueError, match=r"precision must be the same for both.*\(.*,"):
        run(make(precision=pair), implementation)


def test_all_arguments_at_once(implementation):
    call = make(
        bias=rng_array((B, 1, T, S)),
        mask=rng_mask((1, N, T, S)),
        scale=np.full((), 0.4, np.float32),
        is_causal=True,
        query_seq_lengths=np.array([T, T - 3], np.int32),
        key_value_seq_lengths=np.array([S - 2, S], np.int32),
        local_window_size=(9, 3),
        query_offset=np.array([3, -2], np.int32),
        softcap=3.0,
        sinks=rng_array((N,), seed=8),
        alibi_slopes=np.abs(rng_array((B, N), seed=9)),
        **SEGMENTS,
    )
    check(call, implementation, wrt=("bias", "scale", "sinks", "alibi_slopes"))
    assert set(oracle.DIFFERENTIABLE) <= call.keys()
