"""Boolean masks, on the implementations that serve them."""

import numpy as np
import pytest
from calls import KINDS, QKV, cotangents, make_call, run, run_gradients, serving
from checks import check, check_bar, check_no_effect, check_reaches_only

SERVING = serving("mask")
pytestmark = pytest.mark.implementations("reference", *SERVING)

T, S, N, B = 19, 23, 4, 2


def random_mask(*shape, share=0.6, seed=5):
    return np.random.default_rng(seed).random(shape) < share


def make(T=T, S=S, dtype="float32", **arguments):
    return make_call(T, S, N=N, K=2, dtype=dtype, **arguments)


SHAPES = [
    *((B, N, T, S), (B, 1, T, S), (1, N, T, S), (1, 1, T, S), (B, 1, 1, S)),
    *((1, N, T, 1), (T, S), (1, S), (T, 1), (1, 1)),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape(implementation, shape):
    call = make(mask=random_mask(*shape), scale=np.array(-0.4, np.float32))
    check(call, implementation)


# Blocks of keys that no row sees, rows that see no key, and odd lengths.
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("T", "S"), [(300, 210), (131, 333)])
def test_many_blocks(implementation, dtype, T, S, is_causal):
    mask = random_mask(B, 1, T, S, share=0.3)
    mask[0, :, :, 20:170] = False
    mask[1, :, 64:140] = False
    mask[:, :, 5] = False
    check(make(T, S, dtype, mask=mask, is_causal=is_causal), implementation)


def test_with_everything_else_that_hides(implementation, dtype):
    call = make(150, 140, dtype, mask=random_mask(1, N, 150, 140))
    call["local_window_size"] = (60, 20)
    call["query_offset"] = np.array([3, -40], np.int32)
    call["query_seq_lengths"] = np.array([150, 77], np.int32)
    call["key_value_seq_lengths"] = np.array([100, 140], np.int32)
    check(call, implementation)


def test_rows_that_see_nothing_are_empty(implementation, dtype):
    call = make(70, 90, dtype)
    mask = np.ones((B, 1, 70, 90), bool)
    mask[:, :, 30:50] = False
    mask[1] = False
    call["mask"] = mask
    out, lse = run(call, implementation)
    blind = ~np.any(mask[:, 0], axis=-1)
    assert not np.asarray(out, np.float32)[blind].any()
    assert np.all(np.asarray(lse)[blind] == -np.inf)
    grads = run_gradients(call, implementation, *cotangents(call))
    assert not np.asarray(grads["query"], np.float32)[blind].any()
    for name in ("key", "value"):
        assert not np.asarray(grads[name], np.float32)[1].any(), name
    check(call, implementation)


@pytest.mark.parametrize("share", [True, False])
def test_a_mask_that_hides_nothing_or_all(implementation, share):
    call = make()
    got = run(call | {"mask": np.full((1, 1, T, S), share)}, implementation)
    if share:
        for result, want in zip(got, run(call, implementation), strict=True):
            np.testing.assert_allclose(result, want, rtol=1e-6, atol=1e-6)
    else:
        assert not np.asarray(got[0]).any()
        assert np.all(np.asarray(got[1]) == -np.inf)


def test_a_triangular_mask_is_causality(implementation, dtype):
    call = make(100, 120, dtype)
    mask = np.tril(np.ones((100, 120), bool), 20)
    masked = run(call | {"mask": mask}, implementation)
    causal = run(call | {"is_causal": True, "query_offset": 20}, implementation)
    for got, want in zip(masked, causal, strict=True):
        got, want = (np.asarray(x, np.float32) for x in (got, want))
        eps = 1e-2 if dtype == "bfloat16" else 2e-3 if dtype == "float16" else 1e-6
        np.testing.assert_allclose(got, want, rtol=eps, atol=eps)


# A third of the keys, all around those that are seen, and two queries.
@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_garbage_that_the_mask_hides_has_no_effect(implementation, dtype, garbage):
    call = make(110, 220, dtype)
    mask = random_mask(B, N, 110, 220)
    mask[..., ::3] = mask[:, :, 7] = mask[:, :, 64] = False
    call["mask"] = mask
    dirty = {name: call[name].copy() for name in QKV}
    dirty["query"][:, [7, 64]] = garbage
    for name in ("key", "value"):
        dirty[name][:, ::3] = garbage
    d_out, _ = cotangents(call)
    d_out[:, [7, 64]] = garbage
    check_no_effect(call, dirty, implementation, d_out)


def test_nan_reaches_only_the_rows_that_see_it(implementation, dtype):
    call = make(140, 140, dtype, mask=random_mask(B, 1, 140, 140))
    dirty = {name: call[name].copy() for name in ("key", "value")}
    for x in dirty.values():
        x[1, 24, 0, 3] = np.nan
    touched = np.zeros((B, 140, N), bool)
    touched[1, :, :2] = call["mask"][1, 0, :, 24, None]
    check_reaches_only(call, dirty, touched, implementation)


@pytest.mark.implementations(*SERVING)
@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_meets_the_accuracy_bar(implementation, dtype, kind):
    call = make_call(208, K=2, H=64, dtype=dtype, kind=kind, seed=3)
    check_bar(call | {"mask": random_mask(2, 1, 208, 208)}, implementation, dtype)
