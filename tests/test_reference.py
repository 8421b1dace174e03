"""The reference in blocks against the dense formula that it spells out.

In float64, so that the two must agree to far more digits than any rounding hides.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import cotangents, make_call
from compare import assert_close

import jaxflash
from jaxflash import layout, reference
from jaxflash.spec import CORE_AXES, DIFFERENTIABLE, Spec

B, N, T, S, BLOCK = 2, 4, 11, 29, 8
RNG = np.random.default_rng(2)


def normal(*shape):
    return RNG.standard_normal(shape)


def int32(*values):
    return np.array(values, np.int32)


SEGMENTS = {
    "query_segment_ids": np.sort(RNG.integers(0, 3, (B, T))).astype(np.int32),
    "key_value_segment_ids": np.sort(RNG.integers(0, 3, (B, S))).astype(np.int32),
}
CASES = {
    "plain": {},
    "causal": {"is_causal": True, "query_offset": int32(18, -4)},
    "lengths": {
        "query_seq_lengths": int32(T, 5),
        "key_value_seq_lengths": int32(0, 20),
    },
    "window": {"window_left": 9, "window_right": 3, "query_offset": int32(7)},
    "bias": {"bias": normal(B, N, T, S)},
    "shared_bias": {"bias": normal(1, T, S)},
    "bias_of_keys": {"bias": normal(B, 1, 1, S)},
    "bias_of_queries": {"bias": normal(B, N, T, 1)},
    "mask": {"mask": RNG.random((B, 1, T, S)) < 0.4},
    "segments": SEGMENTS,
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": normal(N), "is_causal": True, "query_offset": int32(-4, 18)},
    "alibi": {"alibi_slopes": np.abs(normal(B, N)), "query_offset": int32(18)},
    "dropout": {
        "dropout_rate": 0.3,
        "dropout_seed": RNG.integers(0, 2**32, (B, 2), np.uint32),
    },
    "values_of_their_own_dim": {"value": normal(B, S, 2, 5)},
}
CASES["all"] = {
    argument: value
    for name in ("lengths", "causal", "window", "bias", "mask", "segments", "softcap")
    for argument, value in CASES[name].items()
}
CASES["all"] |= CASES["sinks"] | CASES["alibi"] | CASES["dropout"]


@pytest.fixture(params=CASES)
def name(request):
    return request.param


@pytest.fixture
def problem(name, monkeypatch):
    """A spec and its operands by name, with blocks smaller than the keys."""
    monkeypatch.setattr(layout, "_MIN_BLOCK", BLOCK)
    monkeypatch.setattr(layout, "_MAX_BLOCK", BLOCK)
    call = make_call(T, S, batch=(B,), N=N, K=2, H=6, dtype="float64")
    call |= {"scale": np.full((), 0.4)} | CASES[name]
    with jax.enable_x64(True):
        arrays = {name: jnp.asarray(call[name]) for name in CORE_AXES if name in call}
        rest = {name: x for name, x in call.items() if name not in arrays}
        yield Spec(operands=tuple(arrays), **rest), arrays


def differentiable(arrays):
    return {name: x for name, x in arrays.items() if name in DIFFERENTIABLE}


def dense(spec, arrays, inputs):
    return reference.attention(spec, *(arrays | inputs).values())


def cotangents_of(arrays):
    d_out, d_lse = cotangents(arrays)
    return jnp.asarray(d_out), jnp.asarray(np.swapaxes(d_lse, -1, -2), jnp.float64)


def in_blocks(spec, arrays, out, lse, cts):
    """Gradients by the blockwise backward pass."""
    inputs = differentiable(arrays)
    names = (*spec.operands, "out", "lse", "d_out", "d_lse")
    batch = {name: x.ndim - len(CORE_AXES[name]) for name, x in inputs.items()}
    full = arrays["query"].ndim - 3
    # An operand with fewer batch axes than the call is shared over those it lacks.
    summed = [
        tuple(
            -1 - axis
            for axis in range(full)
            if axis >= batch[name] or x.shape[batch[name] - 1 - axis] == 1
        )
        for name, x in inputs.items()
    ]
    grads = reference.backward(
        spec, names, tuple(inputs), summed, *arrays.values(), out, lse, *cts
    )
    return {
        name: grad.reshape(x.shape)
        for (name, x), grad in zip(inputs.items(), grads, strict=True)
    }


def check(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, leaf), target in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        wide = np.asarray(target)
        size = float(np.abs(wide[np.isfinite(wide)]).max(initial=0.1))
        assert_close(leaf, target, 1e-12 * size, jax.tree_util.keystr(path))


def test_blocks_are_blocks(problem):
    spec, arrays = problem
    text = str(jax.make_jaxpr(functools.partial(reference.forward, spec))(
        *arrays.values()))  # fmt: skip
    assert "scan" in text
    assert f"{BLOCK},{T}" in text or f"{T},{BLOCK}" in text


def test_forward_in_blocks_equals_dense(problem):
    spec, arrays = problem
    blocks = jax.jit(functools.partial(reference.forward, spec))(*arrays.values())
    check(blocks, jax.jit(functools.partial(dense, spec, arrays))({}))


def test_backward_in_blocks_equals_the_derivative_of_dense(problem):
    spec, arrays = problem
    cts = cotangents_of(arrays)

    @jax.jit
    def both():
        function = functools.partial(dense, spec, arrays)
        (out, lse), pullback = jax.vjp(function, differentiable(arrays))
        return in_blocks(spec, arrays, out, lse, cts), pullback(cts)[0]

    check(*both())


def test_tangent_in_blocks_equals_the_derivative_of_dense(problem):
    spec, arrays = problem
    inputs = differentiable(arrays)
    rng = np.random.default_rng(8)
    tangents = {
        name: jnp.asarray(rng.standard_normal(x.shape)) for name, x in inputs.items()
    }

    @jax.jit
    def both():
        function = functools.partial(dense, spec, arrays)
        primals, want = jax.jvp(function, (inputs,), (tangents,))
        given = (*arrays.values(), *primals, *tangents.values())
        return reference.tangent(spec, tuple(tangents), *given), want

    check(*both())


@pytest.mark.parametrize("name", ["plain", "sinks", "all"], indirect=True)
def test_second_derivative_in_blocks_equals_that_of_dense(problem):
    spec, arrays = problem
    cts = cotangents_of(arrays)
    inputs = differentiable(arrays)
    tangents = {name: jnp.cos(x) for name, x in inputs.items()}

    def by_dense(inputs):
        function = functools.partial(dense, spec, arrays)
        return jax.vjp(function, inputs)[1](cts)[0]

    def by_blocks(inputs):
        # out and lse move along with the inputs, as the primitive's rules have it.
        out, lse = dense(spec, arrays, inputs)
        return in_blocks(spec, arrays | inputs, out, lse, cts)

    got, want = (
        jax.jit(functools.partial(jax.jvp, f))((inputs,), (tangents,))[1]
        for f in (by_blocks, by_dense)
    )
    for name, leaf in want.items():
        size = float(jnp.abs(leaf).max())
        assert_close(got[name], leaf, 1e-11 * max(size, 0.1), name)


def test_weights_below_the_normal_numbers_of_float16_count():
    """Each of 32,768 keys weighs 2^-15, of which float16 has only a subnormal."""
    S = 32768
    query, key = np.zeros((1, 8, 1, 8), np.float16), np.zeros((1, S, 1, 8), np.float16)
    value = np.ones_like(key)

    def attend(*arrays):
        return jaxflash.dot_product_attention(*arrays, implementation="reference")

    out, transpose = jax.vjp(attend, query, key, value)
    d_value = transpose(jnp.full_like(out, 100))[2]
    _, t_out = jax.jvp(attend, (query, key, value), (query, key, value))
    np.testing.assert_array_equal(out, np.ones_like(query))
    np.testing.assert_allclose(d_value, 8 * 100 / S, rtol=2e-3)
    np.testing.assert_array_equal(t_out, np.ones_like(query))
