"""A call with jax.nn's arguments gives jax.nn's results; three differences apart."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import QKV, make_call
from compare import assert_close, jax_nn_attention

from jaxflash import dot_product_attention

TOLERANCE = {"float32": 2e-6, "bfloat16": 1.6e-2, "float16": 2e-3}
T, S, N = 13, 17, 4
RNG = np.random.default_rng(11)
EVERY_ROW_SEES_KEY_0 = RNG.random((2, N, T, S)) < 0.5
EVERY_ROW_SEES_KEY_0[..., 0] = True

SERVED = {
    "plain": {},
    "scale": {"scale": 0.3},
    "causal": {"is_causal": True},
    "query_lengths": {"query_seq_lengths": np.array([13, 4], np.int32)},
    "key_lengths": {"key_value_seq_lengths": np.array([3, 17], np.int32)},
    "causal_lengths": {
        "is_causal": True,
        "query_seq_lengths": np.array([9, 13], np.int32),
        "key_value_seq_lengths": np.array([17, 5], np.int32),
    },
}
REFERENCE_ONLY = {
    "bias": {"bias": RNG.standard_normal((2, N, T, S)).astype(np.float32)},
    "bias_of_one_head": {"bias": RNG.standard_normal((2, 1, T, S)).astype(np.float32)},
    "bias_of_rank_2": {"bias": RNG.standard_normal((T, S)).astype(np.float32)},
    "mask": {"mask": EVERY_ROW_SEES_KEY_0},
    "mask_of_keys": {"mask": EVERY_ROW_SEES_KEY_0[:, :1, :1]},
    "mask_of_rank_3": {"mask": EVERY_ROW_SEES_KEY_0[0]},
    "window": {"local_window_size": 5},
    "window_pair": {"local_window_size": (6, 2)},
    "causal_window": {"local_window_size": (6, 2), "is_causal": True},
    "everything": {
        "bias": RNG.standard_normal((1, N, T, S)).astype(np.float32),
        "mask": EVERY_ROW_SEES_KEY_0,
        "scale": -0.2,
        "is_causal": True,
        "query_seq_lengths": np.array([13, 4], np.int32),
        "key_value_seq_lengths": np.array([17, 8], np.int32),
        "local_window_size": (T, 0),
    },
}


@pytest.fixture(autouse=True)
def _promotion_as_jax_nn_needs_it():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def compare(implementation, dtype, arguments, call):
    """out and the gradients of both functions."""

    def results(function, implementation):
        def attention(inputs):
            return function(**inputs, **arguments, implementation=implementation)

        out, pullback = jax.vjp(attention, {name: call[name] for name in QKV})
        return {"out": out} | pullback(jnp.cos(3 * out))[0]

    got = results(dot_product_attention, implementation)
    want = results(jax_nn_attention, "xla")
    for name, leaf in got.items():
        target = np.asarray(want[name])
        assert leaf.dtype == target.dtype
        size = float(np.abs(target).max())
        assert_close(leaf, target, TOLERANCE[dtype] * size, name)


@pytest.mark.parametrize("arguments", SERVED)
def test_served_arguments_mean_the_same(implementation, dtype, arguments):
    call = make_call(T, S, N=N, K=2, H=8, dtype=dtype)
    compare(implementation, dtype, SERVED[arguments], call)


@pytest.mark.implementations("reference")
@pytest.mark.parametrize("arguments", REFERENCE_ONLY)
def test_all_arguments_mean_the_same(implementation, dtype, arguments):
    call = make_call(T, S, N=N, K=2, H=8, dtype=dtype)
    compare(implementation, dtype, REFERENCE_ONLY[arguments], call)


def test_arrays_without_a_batch_axis(implementation, dtype):
    call = make_call(T, S, batch=(), N=N, K=1, H=8, dtype=dtype)
    compare(implementation, dtype, {"is_causal": True}, call)


def test_residual_has_the_shape_of_jax_nn(implementation, working_dtype):
    for batch in ((), (2,)):
        call = make_call(T, S, batch=batch, dtype=working_dtype)
        _, got = dot_product_attention(
            **call, implementation=implementation, return_residual=True
        )
        _, want = jax_nn_attention(**call, return_residual=True)
        assert got.shape == want.shape
        unit = float(jnp.finfo(working_dtype).eps)
        assert_close(got, want, unit * float(jnp.abs(want).max()), "lse")


def test_signature_begins_with_that_of_jax_nn():
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    ours = inspect.signature(dot_product_attention).parameters
    assert list(ours)[:5] == list(theirs)[:5]
    for name, parameter in theirs.items():
        assert ours[name].kind == parameter.kind, name
        assert ours[name].default == parameter.default, name


def test_difference_rows_without_keys_are_zero_not_a_mean(implementation, dtype):
    call = make_call(T, S, N=N, dtype=dtype)
    call["key_value_seq_lengths"] = np.array([0, 17], np.int32)
    ours = dot_product_attention(**call, implementation=implementation)
    theirs = jax_nn_attention(**call)
    assert np.all(np.asarray(ours[0]) == 0)
    assert np.all(np.asarray(theirs[0]) != 0)
    want = np.asarray(theirs[1], np.float64)
    assert_close(ours[1], want, TOLERANCE[dtype] * np.abs(want).max())


def test_difference_residual_is_float32_and_differentiable(implementation, dtype):
    call = make_call(T, S, N=N, dtype=dtype)

    def residual(function, implementation):
        def lse(query):
            arguments = call | {"query": query, "implementation": implementation}
            return function(**arguments, return_residual=True)[1]

        value, pullback = jax.vjp(lse, jnp.asarray(call["query"]))
        return value.dtype, np.asarray(pullback(jnp.ones_like(value))[0])

    ours, our_grad = residual(dot_product_attention, implementation)
    theirs, their_grad = residual(jax_nn_attention, "xla")
    assert (ours, theirs) == (np.float32, dtype)
    assert np.any(our_grad != 0)
    assert np.all(their_grad == 0)


def test_difference_implementations_have_our_names():
    call = make_call(T, S)
    for name in ("xla", "cudnn"):
        with pytest.raises(ValueError, match="implementation"):
            dot_product_attention(**call, implementation=name)
    for name in (None, "reference"):
        dot_product_attention(**call, implementation=name)
