"""Random shapes and arguments, zero and one included, against the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import EVERYTHING, make_call, serving
from checks import check
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

BIAS_DTYPES = ("float32", "bfloat16", "float16")
# No shrinking: each step would compile anew, and the calls are small to begin with.
SETTINGS = settings(
    deadline=None,
    derandomize=True,
    max_examples=40,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
LENGTH = st.one_of(st.integers(0, 3), st.integers(4, 40), st.integers(60, 150))


@st.composite
def kernel_calls(draw, dtype):
    """A call of what every kernel serves."""
    B = draw(st.integers(0, 3))
    T, S = draw(LENGTH), draw(LENGTH)
    K, group = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    H = draw(st.one_of(st.integers(1, 9), st.integers(10, 70)))
    call = make_call(
        T, S, batch=(B,), N=K * group, K=K, H=H, dtype=dtype, seed=draw(st.integers(0))
    )
    call["scale"] = np.asarray(draw(st.floats(-1, 1, width=32)), np.float32)
    call["is_causal"] = draw(st.booleans())

    def per_batch(low, high):
        return np.asarray(
            draw(st.lists(st.integers(low, high), min_size=B, max_size=B)), np.int32
        )

    if draw(st.booleans()):
        call["query_offset"] = per_batch(-T - 2, S + 2)
    if draw(st.booleans()):
        call["query_seq_lengths"] = per_batch(0, T)
    if draw(st.booleans()):
        call["key_value_seq_lengths"] = per_batch(0, S)
    return call


@st.composite
def windowed_calls(draw, dtype):
    """A call with a window that may be unlimited on a side."""
    side = st.one_of(st.none(), st.integers(0, 50))
    return draw(kernel_calls(dtype)) | {"local_window_size": (draw(side), draw(side))}


@st.composite
def full_calls(draw, dtype):
    """Any mixture of all arguments."""
    call = draw(windowed_calls(dtype))
    (B, T, N, _), (_, S, K, _) = call["query"].shape, call["key"].shape
    rng = np.random.default_rng(draw(st.integers(0)))
    full = (B, N, T, S)

    def broadcastable():
        ones = draw(st.lists(st.booleans(), min_size=4, max_size=4))
        return tuple(1 if one else n for one, n in zip(ones, full, strict=True))

    if draw(st.booleans()):
        Hv = draw(st.one_of(st.integers(1, 9), st.integers(10, 70)))
        call["value"] = rng.standard_normal((B, S, K, Hv)).astype(dtype)
    if draw(st.booleans()):
        bias = rng.standard_normal(broadcastable())
        bias = np.where(rng.random(bias.shape) < 0.1, -np.inf, bias)
        call["bias"] = bias.astype(jnp.dtype(draw(st.sampled_from(BIAS_DTYPES))))
    if draw(st.booleans()):
        call["mask"] = rng.random(broadcastable()) < draw(st.sampled_from([0.02, 0.7]))
    if draw(st.booleans()):
        ids = [rng.integers(0, 3, (B, length)).astype(np.int32) for length in (T, S)]
        if draw(st.booleans()):
            ids = [np.sort(x) for x in ids]
        call["query_segment_ids"], call["key_value_segment_ids"] = ids
    if draw(st.booleans()):
        call["softcap"] = draw(st.floats(0.5, 20))
    if draw(st.booleans()):
        sinks = rng.standard_normal(N)
        call["sinks"] = np.where(rng.random(N) < 0.2, -np.inf, sinks).astype(np.float32)
    if draw(st.booleans()):
        call["alibi_slopes"] = rng.random((B, N)).astype(np.float32)
    if draw(st.booleans()):
        call["dropout_rate"] = draw(st.floats(0, 0.9))
        call["dropout_key"] = jax.random.key(draw(st.integers(0, 2**31)))
    return call


def check_drawn(calls, implementation):
    @SETTINGS
    @given(call=calls)
    def run_all(call):
        check(call, implementation)

    run_all()


def test_random_calls(implementation, working_dtype):
    check_drawn(kernel_calls(working_dtype), implementation)


@pytest.mark.implementations(*serving("window"))
def test_random_calls_with_a_window(implementation, working_dtype):
    check_drawn(windowed_calls(working_dtype), implementation)


@pytest.mark.implementations("reference", *serving(*EVERYTHING))
def test_random_calls_with_every_argument(implementation, dtype):
    check_drawn(full_calls(dtype), implementation)
