"""The accuracy bar: no worse than XLA's own attention, on inputs of many kinds."""

import functools

import numpy as np
import oracle
import pytest
from calls import KINDS, cotangents, make_call, run_gradients, serving
from checks import check_backward_bar, check_bar, check_forward_bar
from compare import assert_gradients, xla_results

pytestmark = pytest.mark.every_dtype


@functools.cache
def case(kind: str, is_causal: bool, dtype: str, platform: str, H: int = 64):
    """A call, its cotangents, and XLA's results on this platform."""
    T, S = (64, 1024) if kind == "one_hot" else (208, 208)
    call = make_call(T, S, K=2, H=H, dtype=dtype, kind=kind, seed=3)
    call |= {"is_causal": is_causal, "query_offset": S - T}
    cts = cotangents(call)
    return call, cts, xla_results(call, *cts)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_forward_meets_the_accuracy_bar(implementation, dtype, kind, is_causal):
    call, _, xla = case(kind, is_causal, dtype, implementation)
    check_forward_bar(call, implementation, dtype, xla[0])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_backward_meets_the_accuracy_bar(implementation, dtype, kind, is_causal):
    call, cts, xla = case(kind, is_causal, dtype, implementation)
    check_backward_bar(call, implementation, dtype, cts, xla[1])


# More keys than those along whose mean the CPU kernels correct dQ.
@pytest.mark.implementations(*serving("window"))
@pytest.mark.parametrize("kind", KINDS)
def test_a_window_meets_the_accuracy_bar(implementation, dtype, kind):
    call = make_call(300, K=2, H=64, dtype=dtype, kind=kind, seed=3)
    check_bar(call | {"local_window_size": (150, 0)}, implementation, dtype)


# CUDA backward kernels of their own.
@pytest.mark.implementations("cuda")
@pytest.mark.parametrize("H", [128, 256])
@pytest.mark.parametrize("kind", ["gaussian", "offset_mean"])
def test_backward_of_wide_heads_meets_the_accuracy_bar(implementation, dtype, kind, H):
    call, cts, xla = case(kind, True, dtype, implementation, H)
    check_backward_bar(call, implementation, dtype, cts, xla[1])


def test_logits_beyond_float16_are_exact(implementation, dtype):
    call = make_call(24, 72, N=2, H=128, dtype=dtype)
    for name in ("query", "key"):
        call[name] = (call[name] * call[name].dtype.type(1000)).astype(dtype)
    assert np.abs(oracle.evaluate(**call).dots).max() > 65504
    check_bar(call, implementation, dtype)


def test_rows_of_huge_negative_logits_are_shift_invariant(implementation, dtype):
    call = make_call(16, 90, N=2, H=128, dtype=dtype, seed=4)
    call["query"] = np.full_like(call["query"], 44.0)
    call["key"] = (call["key"] * np.float32(0.25) - 44).astype(dtype)
    assert oracle.evaluate(**call).dots.max() < -2e5
    if implementation != "cuda":
        check_bar(call, implementation, dtype)
        return
    # XLA keeps dS in float32 and has no rounding of it to multiply by the -44 that all
    # keys share, 176 of their standard deviations: no yardstick for 16-bit products.
    cts = cotangents(call)
    check_forward_bar(call, implementation, dtype, xla_results(call, *cts)[0])
    assert_gradients(call, run_gradients(call, implementation, *cts), *cts)


def test_gradients_of_a_single_row_of_low_probability_mass(implementation, dtype):
    call = make_call(1, 128, batch=(1,), N=2, H=64, dtype=dtype)
    call["query"] = np.full_like(call["query"], 3.0)
    call["key"] = (call["key"] * np.float32(0.25) - 5).astype(dtype)
    assert oracle.forward(call)[1].max() < -100
    check_bar(call, implementation, dtype)


def test_small_inputs_keep_their_accuracy(implementation, dtype):
    call = make_call(70, 70, N=2, H=32, dtype=dtype)
    for name in ("query", "key"):
        call[name] = (call[name] * np.float32(0.07)).astype(dtype)
    check_bar(call, implementation, dtype)
