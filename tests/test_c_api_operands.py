"""The C API with every operand of the formula, in any layout and of any stride."""

from __future__ import annotations

import ctypes

import c_api
import jax.numpy as jnp
import numpy as np
import pytest
from calls import with_keep
from compare import assert_equal, assert_forward, assert_gradients

B, T, S, N = 2, 67, 131, 4
DTYPES = ("float32", "bfloat16", "float16")
LAYOUTS = ("dense", "gaps", "reversed")
GRADIENTS = {
    **{"dq": "query", "dk": "key", "dv": "value", "dbias": "bias"},
    **{"dsinks": "sinks", "dalibi": "alibi_slopes"},
}


def make(dtype="float32", layout="dense", operands=None, T=T, S=S, **sizes):
    return c_api.make_call(
        (B,), T, S, N, 2, dtype=dtype, layout=layout, operands=operands, **sizes
    )


def set_all(call, **members):
    for params in (call.params, call.backward.forward):
        for name, value in members.items():
            setattr(params, name, value)


def check(call: c_api.Call, keep=None) -> None:
    """Both passes, the whole batch at once, which may share bias and sinks."""
    for direction, params in (("forward", call.params), ("backward", call.backward)):
        assert c_api.run(direction, params) == c_api.OK, c_api.last_error()
    arguments = call.oracle_arguments(())
    for name, buffer in call.inputs.items():
        if isinstance(buffer, c_api.Shared) and name != "dropout_seed":
            arguments[c_api.ORACLE_NAMES.get(name, name)] = buffer.own
    for name in ("sinks", "alibi_slopes"):
        if name in arguments:
            arguments[name] = arguments[name][0]
    if keep is not None:
        arguments |= {"keep": keep, "dropout_rate": call.params.dropout_rate}
    out, lse = (call.outputs[name].array for name in ("out", "lse"))
    assert_forward(arguments, out, np.swapaxes(lse, -1, -2))
    grads = {}
    for name, argument in GRADIENTS.items():
        if name in call.gradients:
            buffer = call.gradients[name]
            grad = buffer.own if name == "dbias" else buffer.array
            grads[argument] = grad.sum((0, -1)) if name in c_api.ROW_GRADIENTS else grad
    d_out, d_lse = (call.inputs[name].array for name in ("d_out", "d_lse"))
    assert_gradients(arguments, grads, d_out, np.swapaxes(d_lse, -1, -2))
    for name, buffer in (call.inputs | call.outputs | call.gradients).items():
        assert buffer.padding_is_untouched(), f"wrote outside {name}"


def random(*shape, dtype="float32", seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype))


def ids(length):
    return np.sort(np.random.default_rng(1).integers(0, 4, (B, length))).astype(
        np.int32
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_everything_at_once(dtype, layout):
    operands = {
        "bias": random(1, N, T, S),
        "mask": np.random.default_rng(2).random((B, 1, T, S)) < 0.8,
        "q_segment_ids": ids(T),
        "kv_segment_ids": ids(S),
        "sinks": random(1, N),
        "alibi_slopes": random(1, N) / 50,
    }
    call = make(dtype, layout, operands, H=24, Hv=40, softcap=3.0)
    set_all(call, window_left=90, window_right=30)
    check(call)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(B, N, T, S), (1, 1, T, 1), (1, N, 1, S), (B, 1, 1, 1)], ids=str
)
def test_dbias_has_the_shape_and_dtype_of_bias(shape, dtype, layout):
    check(make(layout=layout, operands={"bias": random(*shape, dtype=dtype)}))


def test_dbias_may_be_summed_where_bias_varies():
    call = make(operands={"bias": random(B, N, T, S)})
    assert c_api.run("forward", call.params) == c_api.OK
    assert c_api.run("backward", call.backward) == c_api.OK
    whole = call.gradients["dbias"].own
    summed = c_api.Buffer((1, N, 1, S), np.dtype(np.float32), "gaps", 3)
    call.backward.dbias = summed.tensor
    call.backward.dbias.batch_strides[0] = call.backward.dbias.strides[1] = 0
    assert c_api.run("backward", call.backward) == c_api.OK
    want = whole.sum((0, 2), np.float64, keepdims=True)
    np.testing.assert_allclose(summed.array, want, rtol=1e-5, atol=1e-5)
    assert summed.padding_is_untouched()


@pytest.mark.parametrize("shape", [(1, N, T, S), (1, 1, 1, 1), (0, N, 1, S)], ids=str)
def test_dbias_of_an_empty_batch_is_zero(shape):
    call = make(operands={"bias": random(*(max(size, 1) for size in shape))})
    call.backward.forward.batch_shape[0] = 0
    call.gradients["dbias"].memory[...] = np.nan
    if shape[0] == 0:
        call.backward.dbias.batch_strides[0] = 1
    assert c_api.run("backward", call.backward) == c_api.OK, c_api.last_error()
    dbias = call.gradients["dbias"].own
    assert np.all(np.isnan(dbias)) if shape[0] == 0 else np.all(dbias == 0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout(dtype, layout):
    seed = np.array([[1, 2**32 - 1], [77, 5]], np.uint32)
    call = make(dtype, layout, {"dropout_seed": seed})
    set_all(call, dropout_rate=0.3)
    shape = {"query": call.inputs["q"].array, "key": call.inputs["k"].array}
    check(call, with_keep(shape | {"dropout_rate": 0.3}, seed)["keep"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("H", "Hv"), [(1, 256), (256, 1), (64, 256), (40, 72), (129, 127), (255, 256)]
)
def test_any_pair_of_head_dims(dtype, H, Hv):
    check(make(dtype, "gaps", H=H, Hv=Hv))


def test_the_bits_do_not_depend_on_the_threads():
    operands = {"bias": random(1, 1, T, S), "sinks": random(1, N)}
    results = []
    for threads in (1, 7):
        call = make(operands=operands)
        executor = backwards(threads)
        for direction, params in (
            ("forward", call.params),
            ("backward", call.backward),
        ):
            assert c_api.run(direction, params, executor) == c_api.OK
        results.append(call.outputs | call.gradients)
    for name, buffer in results[0].items():
        assert_equal(results[1][name].array, buffer.array, name)


def backwards(threads: int) -> c_api.Executor:
    """Runs the tasks from the last to the first."""

    def parallel_for(_context, count, task, argument):
        for index in reversed(range(count)):
            task(argument, index)

    return c_api.Executor(ctypes.c_void_p(), threads, c_api.PARALLEL_FOR(parallel_for))
