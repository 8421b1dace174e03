"""The C API's results: layouts, poison around buffers, corners, threads, executors."""

from __future__ import annotations

import concurrent.futures
import ctypes

import c_api
import numpy as np
import pytest
from compare import assert_close, assert_equal, assert_forward, assert_gradients

DTYPES = ("float32", "bfloat16", "float16")


def check_forward(call: c_api.Call, executor=None) -> None:
    """Runs the forward pass and compares each batch element with the oracle."""
    status = c_api.run("forward", call.params, executor)
    assert status == c_api.OK, c_api.last_error()
    out, lse = (call.outputs[name].array for name in ("out", "lse"))
    for index in call.batch_elements():
        arguments = call.oracle_arguments(index)
        assert_forward(arguments, out[index], lse[index].T, f" of {index}")


def check_backward(call: c_api.Call, executor=None) -> None:
    """Runs the backward pass behind a forward pass and compares the gradients."""
    status = c_api.run("backward", call.backward, executor)
    assert status == c_api.OK, c_api.last_error()
    gradients = {name: buffer.array for name, buffer in call.gradients.items()}
    for index in call.batch_elements():
        d_out, d_lse = (call.inputs[name].array[index] for name in ("d_out", "d_lse"))
        got = {
            argument: gradients[name][index]
            for name, argument in {"dq": "query", "dk": "key", "dv": "value"}.items()
        }
        got["scale_rows"] = gradients["dscale"][index]
        arguments = call.oracle_arguments(index)
        assert_gradients(arguments, got, d_out, d_lse.T, f" of {index}")


def check_padding(buffers: dict[str, c_api.Buffer]) -> None:
    for name, buffer in buffers.items():
        assert buffer.padding_is_untouched(), f"wrote outside {name}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["dense", "gaps", "reversed"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"T": 1, "S": 1, "N": 1, "K": 1, "H": 1},
        {"T": 5, "S": 7, "N": 6, "K": 2, "H": 16},
        {"T": 67, "S": 129, "N": 2, "K": 1, "H": 40},
        {"T": 130, "S": 33, "N": 3, "K": 3, "H": 72},
    ],
    ids=lambda sizes: "T{T}S{S}N{N}K{K}H{H}".format(**sizes),
)
def test_views_give_the_formula_and_only_their_elements_are_touched(
    dtype, layout, sizes
):
    call = c_api.make_call(dtype=dtype, layout=layout, is_causal=True, **sizes)
    check_forward(call)
    check_backward(call)
    check_padding(call.inputs | call.outputs | call.gradients)


@pytest.mark.parametrize("batch", [(), (3,), (2, 1, 3), (1, 2, 1, 2, 1, 2)])
def test_every_batch_rank_works(batch):
    call = c_api.make_call(batch=batch, layout="gaps")
    check_forward(call)
    check_backward(call)
    check_padding(call.inputs | call.outputs | call.gradients)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("left", "right"), [(0, 0), (9, 40), (2**62, 3), (5, 2**62), (-1, 2)]
)
def test_windows(left, right, is_causal):
    call = c_api.make_call(
        T=130, S=90, dtype="bfloat16", is_causal=is_causal, layout="gaps"
    )
    for params in (call.params, call.backward.forward):
        params.window_left, params.window_right = left, right
    check_forward(call)
    check_backward(call)
    check_padding(call.inputs | call.outputs | call.gradients)


def test_inputs_may_be_shared_by_the_batch():
    scalars = {"kv_seq_lengths": np.int32(6), "scale": np.float32(0.3)}
    call = c_api.make_call(
        batch=(2, 3), layout="dense", inputs_layout="shared", scalars=scalars
    )
    assert not any(call.params.k.batch_strides)
    check_forward(call)
    check_backward(call)


def test_operands_per_batch_element_act_on_their_element():
    scalars = {
        "scale": np.array([0.5, -1.0, 0.0], np.float32),
        "query_offset": np.array([2, 0, -3], np.int32),
        "q_seq_lengths": np.array([9, 4, 0], np.int32),
        "kv_seq_lengths": np.array([0, 11, 5], np.int32),
    }
    call = c_api.make_call(
        batch=(3,), T=9, S=11, layout="gaps", is_causal=True, scalars=scalars
    )
    check_forward(call)
    check_backward(call)
    assert np.all(call.outputs["lse"].array[2] == -np.inf)
    for name in ("dq", "dk", "dv", "dscale"):
        assert not call.gradients[name].array[2].any(), name
    check_padding(call.inputs | call.outputs | call.gradients)


@pytest.mark.parametrize("wanted", ["dq", "dk", "dv", "dscale"])
def test_each_gradient_can_be_asked_for_alone(wanted):
    call = c_api.make_call(T=40, S=50, is_causal=True)
    check_forward(call)
    check_backward(call)
    alone = c_api.make_call(T=40, S=50, is_causal=True)
    c_api.run("forward", alone.params)
    for name in alone.gradients:
        if name != wanted:
            setattr(alone.backward, name, c_api.api.Tensor())
    assert c_api.run("backward", alone.backward) == c_api.OK, c_api.last_error()
    assert_equal(alone.gradients[wanted].array, call.gradients[wanted].array, wanted)
    for name, buffer in alone.gradients.items():
        assert name == wanted or buffer.is_untouched()


@pytest.mark.parametrize(
    "sizes",
    [
        {"T": 0},
        {"S": 0},
        {"T": 0, "S": 0},
        {"batch": (2, 0)},
        {"N": 0, "K": 0},
    ],
    ids=str,
)
def test_empty_calls_fill_what_is_not_empty(sizes):
    call = c_api.make_call(**sizes)
    assert c_api.run("forward", call.params) == c_api.OK, c_api.last_error()
    assert c_api.run("backward", call.backward) == c_api.OK, c_api.last_error()
    assert not call.outputs["out"].array.any()
    assert np.all(call.outputs["lse"].array == -np.inf)
    for name, buffer in call.gradients.items():
        assert not buffer.array.any(), name
    check_padding(call.outputs | call.gradients)


def backwards_on_one_thread(record: list[int]) -> c_api.Executor:
    """Runs the items of a loop in descending order."""

    @c_api.PARALLEL_FOR
    def parallel_for(context, count, task, argument):
        record.append(count)
        for index in reversed(range(count)):
            task(argument, index)

    return c_api.Executor(None, 5, parallel_for)


def on_many_threads(pool: concurrent.futures.Executor) -> c_api.Executor:
    @c_api.PARALLEL_FOR
    def parallel_for(context, count, task, argument):
        list(pool.map(lambda index: task(argument, index), range(count)))

    return c_api.Executor(None, 4, parallel_for)


def results(call: c_api.Call, executor=None) -> dict[str, np.ndarray]:
    assert c_api.run("forward", call.params, executor) == c_api.OK
    assert c_api.run("backward", call.backward, executor) == c_api.OK
    buffers = call.outputs | call.gradients
    return {name: buffer.array.copy() for name, buffer in buffers.items()}


def test_the_executor_does_the_work_in_any_order_and_on_any_threads():
    def make():
        return c_api.make_call(batch=(2,), T=150, S=170, N=4, K=2, is_causal=True)

    want = results(make())
    counts: list[int] = []
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for executor in (backwards_on_one_thread(counts), on_many_threads(pool)):
            call = make()
            got = results(call, executor)
            check_padding(call.inputs | call.outputs | call.gradients)
            for name in ("out", "lse"):
                assert_equal(got[name], want[name], name)
            for name in call.gradients:
                # Threads sum dQ in another order.
                size = np.abs(want[name])
                if name != "dscale":
                    size = size.max(-1, keepdims=True)
                assert_close(got[name], want[name], 1e-5 * size, name)
    assert max(counts) > 1


def test_calls_from_many_threads_do_not_disturb_each_other():
    calls = [c_api.make_call(T=60 + i, S=80, is_causal=bool(i % 2)) for i in range(16)]
    again = [c_api.make_call(T=60 + i, S=80, is_causal=bool(i % 2)) for i in range(16)]
    want = [results(call) for call in calls]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        got = list(pool.map(results, again))
    for one, other in zip(got, want, strict=True):
        for name in one:
            assert_equal(one[name], other[name], name)


def test_lse_has_heads_before_queries():
    call = c_api.make_call(
        batch=(), T=5, N=4, S=9, is_causal=True, scalars={"scale": np.float32(0)}
    )
    check_forward(call)
    lse = call.outputs["lse"].array
    assert lse.shape == (4, 5)
    np.testing.assert_allclose(lse, np.tile(np.log([1, 2, 3, 4, 5]), (4, 1)), rtol=1e-6)


def test_workspace_is_counted_in_bytes_that_suffice():
    call = c_api.make_call(T=33, S=65)
    for direction, params in (("forward", call.params), ("backward", call.backward)):
        status, size = c_api.workspace_bytes(direction, params)
        assert status == c_api.OK
        assert 0 <= size < 1 << 24
        query = c_api.entry(direction, "_workspace")
        assert query(ctypes.byref(params), None) == c_api.INVALID_ARGUMENT
        assert "bytes" in c_api.last_error()
