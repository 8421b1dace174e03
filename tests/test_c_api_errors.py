"""The C API refuses what cannot work: a status, a sentence, and nothing written."""

from __future__ import annotations

import concurrent.futures
import ctypes
from collections.abc import Callable

import c_api
import ctypes_numpy as api
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

INT64_MAX = 2**63 - 1
DTYPE = api.DTYPES


def tensor_with(name: str, **fields) -> Callable:
    """Changes members of a tensor; `strides` is (axis, value)."""

    def change(params):
        tensor = getattr(params, name)
        for field, value in fields.items():
            if isinstance(value, tuple):
                getattr(tensor, field)[value[0]] = value[1]
            else:
                setattr(tensor, field, value)

    return change


def sizes(**members) -> Callable:
    def change(params):
        for name, value in members.items():
            setattr(params, name, value)

    return change


def batch(axis: int, size: int) -> Callable:
    def change(params):
        params.batch_shape[axis] = size

    return change


OVERLAP = "is written, so its elements must not overlap"
INVALID_FORWARD = {
    "struct_size": (sizes(struct_size=8), "struct_size", "got 8"),
    "batch_rank": (sizes(batch_rank=7), "batch_rank must be in [0, 6]", "got 7"),
    "negative rank": (sizes(batch_rank=-1), "batch_rank", "got -1"),
    "negative batch": (batch(0, -2), "batch_shape", "got -2"),
    "batch overflow": (batch(0, 2**62), "below 2^59", "got 4 *"),
    "q_len": (sizes(q_len=-1), "q_len must be in [0, 1073740800]", "got -1"),
    "kv_len": (sizes(kv_len=2**40), "kv_len", "got 1099511627776"),
    "num_heads": (sizes(num_heads=3), "multiple of num_kv_heads", "got 3 and 2"),
    "no heads": (sizes(num_heads=0), "multiple of num_kv_heads", "got 0 and 2"),
    "num_kv_heads": (sizes(num_kv_heads=0), "num_kv_heads", "got 4 and 0"),
    "negative heads": (sizes(num_kv_heads=-2), "num_kv_heads", "got -2"),
    "head_dim": (sizes(head_dim=0), "head_dim must be in [1,", "got 0"),
    "value_head_dim": (sizes(value_head_dim=-16), "value_head_dim", "got -16"),
    "window_left": (sizes(window_left=-2), "window_left", "got -2"),
    "window_right": (sizes(window_right=-9), "window_right", "got -9"),
    "softcap nan": (sizes(softcap=np.nan), "softcap must be finite", "got nan"),
    "softcap inf": (sizes(softcap=np.inf), "softcap must be finite", "got inf"),
    "softcap": (sizes(softcap=-1), "softcap must be", "got -1"),
    "dropout_rate 1": (sizes(dropout_rate=1), "dropout_rate", "got 1"),
    "dropout_rate nan": (sizes(dropout_rate=np.nan), "dropout_rate", "got nan"),
    "dropout_seed": (sizes(dropout_rate=0.5), "dropout_seed is required", "NULL"),
    "precision": (sizes(precision=3), "precision must be in [0, 2]", "got 3"),
    "q": (tensor_with("q", data=None), "q is required", "NULL"),
    "v": (tensor_with("v", data=None), "v is required", "NULL"),
    "lse": (tensor_with("lse", data=None), "lse is required", "NULL"),
    "q dtype": (tensor_with("q", dtype=DTYPE["int32"]), "q must have", "int32"),
    "k dtype": (tensor_with("k", dtype=DTYPE["float16"]), "k must have", "float16"),
    "out dtype": (tensor_with("out", dtype=77), "out must have", "(77)"),
    "lse dtype": (tensor_with("lse", dtype=3), "lse must have", "float32"),
    "negative stride": (tensor_with("k", strides=(0, -32)), "k.strides[0]", "got -32"),
    "negative batch stride": (
        tensor_with("v", batch_strides=(0, -1)),
        "v.batch_strides[0]",
        "got -1",
    ),
    "extent": (tensor_with("q", strides=(0, 2**62)), "q must span", "axis of size 5"),
    "misaligned": (lambda p: sizes(data=p.k.data + 1)(p.k), "k.data", "4-byte"),
    "out overlaps": (tensor_with("out", strides=(0, 0)), OVERLAP, "stride 0"),
    "lse overlaps": (tensor_with("lse", strides=(0, 3)), OVERLAP, "overlap"),
    "shared out": (
        tensor_with("out", batch_strides=(0, 0)),
        OVERLAP,
        "stride 0",
    ),
}


def refuses(direction: str, call: c_api.Call, status: int, *texts: str) -> None:
    """Query and run refuse alike, say why, and write nothing."""
    params = call.params if direction == "forward" else call.backward
    asked, size = c_api.workspace_bytes(direction, params)
    said = c_api.last_error()
    assert asked == status, said
    assert size == 12345, "the query wrote its answer"
    for text in texts:
        assert text in said
    # Room enough for any pass: the refusal is not about the workspace.
    room = np.zeros(1 << 20, np.uint8)
    workspace = ctypes.c_void_p(room.ctypes.data + -room.ctypes.data % 64)
    arguments = (workspace, ctypes.c_size_t(room.size - 64), None)
    assert c_api.entry(direction)(ctypes.byref(params), *arguments) == status
    assert c_api.last_error() == said
    written = call.outputs if direction == "forward" else call.gradients
    for name, buffer in written.items():
        assert buffer.is_untouched(), f"wrote to {name}"


@pytest.mark.parametrize("case", INVALID_FORWARD)
def test_invalid_forward_parameters_are_refused(case):
    change, *texts = INVALID_FORWARD[case]
    call = c_api.make_call()
    change(call.params)
    refuses("forward", call, c_api.INVALID_ARGUMENT, *texts)


# The backward pass reads out and lse, whose elements may then overlap.
@pytest.mark.parametrize(
    "case",
    [case for case, (_, *texts) in INVALID_FORWARD.items() if OVERLAP not in texts],
)
def test_invalid_forward_parameters_are_refused_by_the_backward_pass(case):
    change, *texts = INVALID_FORWARD[case]
    call = c_api.make_call()
    change(call.backward.forward)
    refuses("backward", call, c_api.INVALID_ARGUMENT, *texts)


INVALID_BACKWARD = {
    "struct_size": (sizes(struct_size=0), "struct_size", "backward_params", "got 0"),
    "d_out": (tensor_with("d_out", data=None), "d_out is required", "NULL"),
    "d_out dtype": (tensor_with("d_out", dtype=2), "d_out must have", "bfloat16"),
    "d_lse dtype": (tensor_with("d_lse", dtype=3), "d_lse must have", "float16"),
    "dq dtype": (tensor_with("dq", dtype=3), "dq must have", "float32", "float16"),
    "dk overlaps": (tensor_with("dk", strides=(0, 0)), "dk is written", "stride 0"),
    "shared dv": (tensor_with("dv", batch_strides=(0, 0)), "dv is", "stride 0"),
    "dbias": (lambda p: setattr(p, "dbias", p.dq), "dbias needs", "bias"),
    "dsinks": (lambda p: setattr(p, "dsinks", p.dscale), "dsinks needs", "sinks"),
    "dalibi": (lambda p: setattr(p, "dalibi", p.dscale), "dalibi needs", "alibi"),
}


@pytest.mark.parametrize("case", INVALID_BACKWARD)
def test_invalid_backward_parameters_are_refused(case):
    change, *texts = INVALID_BACKWARD[case]
    call = c_api.make_call()
    change(call.backward)
    refuses("backward", call, c_api.INVALID_ARGUMENT, *texts)


@pytest.mark.parametrize(("H", "Hv"), [(257, 257), (8, 257), (257, 8)])
def test_head_dims_over_the_limit_are_unsupported(H, Hv):
    call = c_api.make_call(T=2, S=2, H=H, Hv=Hv)
    texts = ("cpu backend serves", "head_dim", "256", f"got {H} and {Hv}")
    for direction in ("forward", "backward"):
        refuses(direction, call, c_api.UNSUPPORTED, *texts)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_null_parameters_are_refused(direction):
    size = ctypes.c_size_t()
    query = c_api.entry(direction, "_workspace")
    assert query(None, ctypes.byref(size)) == c_api.INVALID_ARGUMENT
    assert c_api.entry(direction)(None, None, 0, None) == c_api.INVALID_ARGUMENT
    assert c_api.last_error() == "params must not be NULL"


def test_workspace_must_be_there_large_and_aligned():
    call = c_api.make_call()
    params = ctypes.byref(call.backward)
    status, size = c_api.workspace_bytes("backward", call.backward)
    assert status == c_api.OK
    assert size > 0
    backward = c_api.entry("backward")
    room = np.zeros(size + 128, np.uint8)
    start = room.ctypes.data + -room.ctypes.data % 64
    for address, offered, text in (
        (start, size - 1, f"workspace_bytes must be at least {size}, got {size - 1}"),
        (None, size, f"workspace must hold {size} bytes, got NULL"),
        (start + 8, size, "workspace must be aligned to 64 bytes"),
    ):
        arguments = (ctypes.c_void_p(address), ctypes.c_size_t(offered), None)
        assert backward(params, *arguments) == c_api.INVALID_ARGUMENT
        assert text in c_api.last_error()
    assert all(buffer.is_untouched() for buffer in call.gradients.values())


NUMBERS = st.sampled_from(
    [-(2**63), -(2**31), -7, -1, 0, 1, 3, 255, 2**16, 2**31, 2**40, 2**62, INT64_MAX]
)
MEMBERS = [field[0] for field in api.Params._fields_ if field[1] is ctypes.c_int64]
TENSORS = [field[0] for field in api.Params._fields_ if field[1] is api.Tensor]


@settings(max_examples=300, deadline=None)
@given(
    members=st.dictionaries(st.sampled_from(MEMBERS), NUMBERS, max_size=3),
    strides=st.dictionaries(
        st.tuples(st.sampled_from(TENSORS), st.integers(0, 2)), NUMBERS, max_size=3
    ),
    rank=st.integers(-2, 9),
    shape=st.lists(NUMBERS, min_size=6, max_size=6),
    dtype=st.integers(-1, 8),
)
def test_garbage_never_crashes_a_query(members, strides, rank, shape, dtype):
    call = c_api.make_call()
    for params in (call.params, call.backward.forward):
        params.batch_rank = rank
        params.batch_shape[:] = shape
        params.k.dtype = dtype
        for name, value in members.items():
            setattr(params, name, value)
        for (name, axis), value in strides.items():
            getattr(params, name).strides[axis] = value
    for direction, params in (("forward", call.params), ("backward", call.backward)):
        status, _ = c_api.workspace_bytes(direction, params)
        assert status in (c_api.OK, c_api.INVALID_ARGUMENT, c_api.UNSUPPORTED)
        if status != c_api.OK:
            assert c_api.run(direction, params) == status
            assert c_api.last_error()
    assert all(buffer.is_untouched() for buffer in call.outputs.values())
    assert all(buffer.is_untouched() for buffer in call.gradients.values())


def test_the_last_error_belongs_to_its_thread():
    call = c_api.make_call()
    call.params.q_len = -5
    assert c_api.run("forward", call.params) == c_api.INVALID_ARGUMENT
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(c_api.last_error).result() == ""
    assert "got -5" in c_api.last_error()


def test_every_status_has_a_name():
    names = [c_api.LIBRARY.jaxflash_status_name(i).decode() for i in range(6)]
    assert names == [
        "OK",
        "INVALID_ARGUMENT",
        "UNSUPPORTED",
        "UNAVAILABLE",
        "INTERNAL",
        "UNKNOWN_STATUS",
    ]


def test_cuda_entry_points_answer_on_every_machine():
    call = c_api.make_call(dtype="bfloat16", H=1)  # so that its stride is free
    size = ctypes.c_size_t()
    for direction, params in (("forward", call.params), ("backward", call.backward)):
        query = c_api.entry(direction, "_workspace", "cuda")
        status = query(ctypes.byref(params), ctypes.byref(size))
        if status == c_api.UNAVAILABLE:
            run = c_api.entry(direction, backend="cuda")
            assert run(ctypes.byref(params), None, 0, None) == c_api.UNAVAILABLE
            assert "built without CUDA" in c_api.last_error()
        else:
            assert status == c_api.OK, c_api.last_error()
            assert query(None, ctypes.byref(size)) == c_api.INVALID_ARGUMENT


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_an_executor_without_parallel_for_is_refused(direction):
    call = c_api.make_call()
    assert c_api.run("forward", call.params) == c_api.OK
    params = call.params if direction == "forward" else call.backward
    status = c_api.run(direction, params, c_api.Executor(None, 4))
    assert status == c_api.INVALID_ARGUMENT
    assert "parallel_for" in c_api.last_error()
