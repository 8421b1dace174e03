"""The oracle itself: against a scalar loop, and its derivatives by differences."""

import math

import numpy as np
import oracle
import pytest
from calls import QKV, cotangents, make_call
from compare import assert_close, assert_gradients, jax_nn_attention


def every_argument(seed: int = 0) -> dict:
    """A call that uses every argument at once; rows of each corner kind are in it."""
    rng = np.random.default_rng(seed)
    B, T, S, N = 2, 6, 7, 4
    call = make_call(T, S, batch=(B,), N=N, K=2, H=3, Hv=5, dtype="float64", seed=seed)
    return call | {
        "bias": rng.standard_normal((B, 1, T, S)),
        "mask": rng.random((1, N, T, S)) < 0.8,
        "scale": 0.7,
        "is_causal": True,
        "query_seq_lengths": np.array([T, T - 1]),
        "key_value_seq_lengths": np.array([S - 1, S]),
        "local_window_size": (4, 3),
        "query_offset": np.array([1, -1]),
        "query_segment_ids": np.array([[0, 0, 0, 1, 1, 1], [0] * T]),
        "key_value_segment_ids": np.array([[0, 0, 0, 0, 1, 1, 1], [0] * S]),
        "softcap": 2.0,
        "sinks": rng.standard_normal(N),
        "alibi_slopes": rng.random((B, N)),
        "dropout_rate": 0.25,
        "keep": rng.random((B, N, T, S)) < 0.75,
    }


def direction(call: dict, seed: int = 5) -> dict:
    rng = np.random.default_rng(seed)
    return {
        name: np.asarray(rng.standard_normal(np.shape(call[name])))
        for name in oracle.DIFFERENTIABLE
    }


def moved(call: dict, tangents: dict, step: float) -> dict:
    return call | {name: call[name] + step * t for name, t in tangents.items()}


def scalar_loop(c: dict, b: int, n: int, i: int) -> tuple[np.ndarray, float]:
    """One row of `every_argument`, in words of one index each."""
    group = c["query"].shape[2] // c["key"].shape[2]
    position = i + c["query_offset"][b]
    keys, values = c["key"][b, :, n // group], c["value"][b, :, n // group]
    scores = {}
    for j in range(len(keys)):
        hidden = (
            not c["mask"][0, n, i, j]
            or j >= c["key_value_seq_lengths"][b]
            or i >= c["query_seq_lengths"][b]
            or j > position
            or j < position - c["local_window_size"][0]
            or c["query_segment_ids"][b, i] != c["key_value_segment_ids"][b, j]
        )
        if not hidden:
            s = c["scale"] * math.fsum(c["query"][b, i, n] * keys[j])
            s = c["softcap"] * math.tanh(s / c["softcap"])
            s += c["bias"][b, 0, i, j]
            scores[j] = s - c["alibi_slopes"][b, n] * abs(position - j)
    if i >= c["query_seq_lengths"][b]:
        return np.zeros(values.shape[-1]), -math.inf
    total = math.fsum(map(math.exp, scores.values())) + math.exp(c["sinks"][n])
    out = sum(
        math.exp(s) / total * c["keep"][b, n, i, j] / 0.75 * values[j]
        for j, s in scores.items()
    )
    return np.broadcast_to(np.asarray(out), values.shape[-1]), math.log(total)


def test_forward_matches_a_scalar_loop():
    call = every_argument()
    out, lse = oracle.forward(call)
    for b, i, n in np.ndindex(lse.shape):
        want_out, want_lse = scalar_loop(call, b, n, i)
        assert_close(out[b, i, n], want_out, 1e-13, f"out{b, i, n}")
        assert_close(lse[b, i, n], want_lse, 1e-13, f"lse{b, i, n}")


def test_forward_matches_jax_nn():
    call = make_call(9, 11, K=2, is_causal=True, local_window_size=(5, 2), scale=0.3)
    call["key_value_seq_lengths"] = np.array([11, 4], np.int32)
    out, _ = oracle.forward(call)
    assert_close(jax_nn_attention(**call), out, 2e-6, "out")


@pytest.mark.parametrize("name", oracle.DIFFERENTIABLE)
def test_backward_matches_finite_differences(name):
    call = every_argument()
    rng = np.random.default_rng(9)
    out, lse = oracle.forward(call)
    d_out, d_lse = rng.standard_normal(out.shape), rng.standard_normal(lse.shape)

    def loss(step: float) -> float:
        out, lse = oracle.forward(moved(call, {name: t}, step))
        return np.sum(out * d_out) + np.sum(np.where(np.isfinite(lse), lse * d_lse, 0))

    t = direction(call)[name]
    want = (loss(1e-5) - loss(-1e-5)) / 2e-5
    grad = oracle.backward(call, d_out, d_lse)[name]
    assert grad.shape == np.shape(call[name])
    assert_close(np.sum(grad * t), want, 1e-8 * np.abs(grad * t).sum(), f"d{name}")


@pytest.mark.parametrize("names", [*[(n,) for n in oracle.DIFFERENTIABLE], None])
def test_tangent_matches_finite_differences(names):
    call = every_argument()
    tangents = direction(call)
    tangents = {name: tangents[name] for name in names or tangents}
    got = oracle.tangent(call, tangents)
    above, below = (oracle.forward(moved(call, tangents, x)) for x in (1e-5, -1e-5))
    for name, t, up, down in zip(("t_out", "t_lse"), got, above, below, strict=True):
        difference = np.where(np.isfinite(up), up, 0) - np.where(
            np.isfinite(down), down, 0
        )
        assert_close(t, difference / 2e-5, 1e-8, name)


def test_backward_magnitudes_bound_the_gradients():
    call = every_argument()
    out, lse = oracle.forward(call)
    d_out, d_lse = np.cos(np.arange(out.size)).reshape(out.shape), np.ones(lse.shape)
    grads = oracle.backward(call, d_out, d_lse)
    sizes = oracle.backward(call, d_out, d_lse, absolute=True)
    for name, grad in grads.items():
        assert np.all(np.abs(grad) <= sizes[name] * (1 + 1e-12)), name
        assert np.abs(grad).max() > 1e-3 * sizes[name].max(), name


def test_rows_without_keys_are_zero():
    call = make_call(4, 5, N=2, H=3, dtype="float64", query_offset=-2, is_causal=True)
    out, lse = oracle.forward(call)
    assert_close(out[:, :2], np.zeros((2, 2, 2, 3)), 0.0)
    assert np.all(lse[:, :2] == -np.inf)
    assert np.all(np.isfinite(lse[:, 2:]))
    grads = oracle.backward(call, np.ones(out.shape), np.ones(lse.shape))
    assert_close(grads["query"][:, :2], np.zeros((2, 2, 2, 3)), 0.0)


def test_assert_close_reports_the_worst_element():
    want = np.zeros((2, 3))
    got = want.copy()
    got[1, 2], got[0, 1] = 0.5, 0.25
    with pytest.raises(AssertionError) as failure:
        assert_close(got, want, 0.1, "out")
    text = str(failure.value)
    assert "out(1, 2): got 0.5, want 0" in text
    assert "max abs error 5.000e-01" in text
    assert "33.33% of 6 elements fail" in text


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_assert_close_rejects_values_that_are_not_finite(bad):
    with pytest.raises(AssertionError, match="want 1"):
        assert_close(np.array([1.0, bad]), np.ones(2), 1e30)
    with pytest.raises(AssertionError, match="got 1"):
        assert_close(np.ones(2), np.array([1.0, bad]), 1e30)
    assert_close(np.array([bad]), np.array([bad]), 0.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_assert_gradients_rejects_one_position_of_zeros(dtype):
    # The last keys of a causal call have the smallest gradients by far.
    call = make_call(192, batch=(1,), N=2, K=1, dtype=dtype, is_causal=True)
    cts = cotangents(call)
    exact = oracle.backward(call, *cts)
    grads = {name: exact[name].astype(call[name].dtype) for name in QKV}
    assert_gradients(call, grads, *cts)
    for name in QKV:
        for position in (100, 191):
            wrong = grads[name].copy()
            wrong[0, position, 0] = 0
            with pytest.raises(AssertionError, match=rf"d{name}\(0, {position}, 0,"):
                assert_gradients(call, {name: wrong}, *cts)
