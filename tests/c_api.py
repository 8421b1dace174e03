"""Calls of the C API on NumPy buffers that are surrounded by poison.

The structs come from the ctypes example: the library refuses a struct of another size.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import ctypes_numpy as api
import ml_dtypes
import numpy as np

DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
ORACLE_NAMES = {
    "q": "query",
    "k": "key",
    "v": "value",
    "q_seq_lengths": "query_seq_lengths",
    "kv_seq_lengths": "key_value_seq_lengths",
    "q_segment_ids": "query_segment_ids",
    "kv_segment_ids": "key_value_segment_ids",
}
CORE_RANK = {
    **{"bias": 3, "mask": 3, "q_segment_ids": 1, "kv_segment_ids": 1},
    **{"sinks": 1, "alibi_slopes": 1, "dropout_seed": 1},
}
# Gradients of one number per row and head, and what they are gradients of.
ROW_GRADIENTS = {"dsinks": "sinks", "dalibi": "alibi_slopes"}
POISON = 0xFF  # as every byte: nan in each float dtype, -1 in int32
MARGIN = 3

OK, INVALID_ARGUMENT, UNSUPPORTED, UNAVAILABLE, INTERNAL = range(5)

LIBRARY = api.load_library(api.find_library())

# Task and parallel_for of an executor.
TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)
PARALLEL_FOR = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_int64, TASK, ctypes.c_void_p
)


class Executor(ctypes.Structure):
    """jaxflash_executor."""

    _fields_ = (
        ("context", ctypes.c_void_p),
        ("num_threads", ctypes.c_int32),
        ("parallel_for", PARALLEL_FOR),
    )


class Buffer:
    """A view of some layout into memory that is poison everywhere else.

    Layouts: "dense"; "gaps", poison between any two elements and rows; "reversed", the
    core axes from right to left in memory; "shared", stride 0 along all batch axes.
    """

    def __init__(self, shape, dtype, layout: str, core_rank: int, values=None):
        batch, core = shape[: len(shape) - core_rank], shape[len(shape) - core_rank :]
        if layout == "shared":
            batch = (1,) * len(batch)
        stored = (*batch, *(core[::-1] if layout == "reversed" else core), 1)
        step = 2 if layout == "gaps" else 1
        # Margins around the core axes and around the whole.
        margins = (0,) * len(batch) + (MARGIN,) * (core_rank + 1)
        whole, inside = [], []
        for size, margin in zip(stored, margins, strict=True):
            whole.append(step * size + 2 * margin)
            inside.append(slice(margin, margin + step * size, step))
        self.memory = np.zeros(whole, dtype)
        self._bytes = self.memory.view(np.uint8)
        self._bytes[...] = POISON
        self._used = np.zeros(whole, bool)
        self._used[*inside] = True
        view = self.memory[*inside][..., 0]
        if layout == "reversed":
            axes = range(view.ndim)
            view = view.transpose(*axes[: len(batch)], *axes[len(batch) :][::-1])
        if values is not None:
            view[...] = values
        self.own = view
        self.array = np.broadcast_to(view, shape)
        self.core_rank = core_rank

    @property
    def tensor(self) -> Any:
        """The view as a jaxflash_tensor."""
        return api.view(self.array, self.core_rank)

    def padding_is_untouched(self) -> bool:
        """Whether every byte outside the view is still poison."""
        width = self.memory.itemsize
        unused = np.repeat(~self._used, width, axis=-1)
        return bool(np.all(self._bytes[unused] == POISON))

    def is_untouched(self) -> bool:
        """Whether nothing at all was written."""
        return bool(np.all(self._bytes == POISON))


class Shared(Buffer):
    """A buffer of the shape of `values` that is seen in a larger shape, by strides 0.

    An output is of that shape and dtype, and has no values yet.
    """

    def __init__(self, shape, values, layout: str, core_rank: int, *, is_output=False):
        given = None if is_output else values
        super().__init__(values.shape, values.dtype, layout, core_rank, given)
        self.array = np.broadcast_to(self.own, shape)


@dataclasses.dataclass
class Call:
    """One call's buffers by name, and its parameters for both passes."""

    inputs: dict[str, Buffer]
    outputs: dict[str, Buffer]
    gradients: dict[str, Buffer]
    params: Any
    backward: Any

    def batch_elements(self) -> Iterator[tuple[int, ...]]:
        """Indices of the batch elements."""
        return np.ndindex(*self.params.batch_shape[: self.params.batch_rank])

    def oracle_arguments(self, index: tuple[int, ...]) -> dict[str, Any]:
        """One batch element as the oracle takes it."""
        arguments = {
            ORACLE_NAMES.get(name, name): buffer.array[index]
            for name, buffer in self.inputs.items()
            if name not in ("d_out", "d_lse", "dropout_seed")
        }
        p = self.params
        sides = (p.window_left, p.window_right)
        return arguments | {
            "softcap": p.softcap or None,
            "is_causal": bool(p.is_causal),
            "local_window_size": tuple(None if side == -1 else side for side in sides),
        }


def make_call(
    batch=(2,),
    T=5,
    S=7,
    N=4,
    K=2,
    H=16,
    Hv: int | None = None,
    *,
    dtype="float32",
    layout="dense",
    inputs_layout: str | None = None,
    is_causal=False,
    scalars: dict[str, Any] | None = None,
    operands: dict[str, np.ndarray] | None = None,
    softcap: float = 0.0,
) -> Call:
    """Random inputs; `scalars` are per-batch operands (scale, lengths, offset).

    `operands` are the others, full or of size 1 along their axes [*batch, *core]; those
    of size 1 have stride 0.
    """
    rng = np.random.default_rng(T * S + H)
    inputs_layout = inputs_layout or layout
    Hv = Hv or H

    def random(*core):
        stored = core if inputs_layout == "shared" else (*batch, *core)
        values = rng.standard_normal(stored).astype(DTYPES[dtype])
        return Buffer((*batch, *core), DTYPES[dtype], inputs_layout, 3, values)

    inputs = {"q": random(T, N, H), "k": random(S, K, H), "v": random(S, K, Hv)}
    for name, values in (scalars or {}).items():
        values = np.asarray(values)
        inputs[name] = Buffer(batch, values.dtype, inputs_layout, 0, values)
    for name, values in (operands or {}).items():
        rank = CORE_RANK[name]
        shape = {3: (N, T, S), 1: values.shape[-1:]}[rank]
        inputs[name] = Shared((*batch, *shape), values, layout, rank)
    float32 = DTYPES["float32"]
    outputs = {
        "out": Buffer((*batch, T, N, Hv), DTYPES[dtype], layout, 3),
        "lse": Buffer((*batch, N, T), float32, layout, 2),
    }
    params = api.forward_params(
        *(inputs[name].array for name in "qkv"),
        *(buffer.array for buffer in outputs.values()),
        is_causal=is_causal,
    )
    if dtype != "float32":
        outputs["out_low"] = Buffer((*batch, T, N, Hv), np.dtype(np.int8), layout, 3)
        params.out_low = outputs["out_low"].tensor
    params.softcap = softcap
    for name in (*(scalars or ()), *(operands or ())):
        setattr(params, name, inputs[name].tensor)

    inputs["d_out"] = random(T, N, Hv)
    d_lse = rng.standard_normal((N, T) if inputs_layout == "shared" else (*batch, N, T))
    inputs["d_lse"] = Buffer((*batch, N, T), float32, inputs_layout, 2, d_lse)
    gradients = {
        "dq": Buffer((*batch, T, N, H), DTYPES[dtype], layout, 3),
        "dk": Buffer((*batch, S, K, H), DTYPES[dtype], layout, 3),
        "dv": Buffer((*batch, S, K, Hv), float32, layout, 3),
        "dscale": Buffer((*batch, N, T), float32, layout, 2),
    }
    for name, operand in ROW_GRADIENTS.items():
        if operand in inputs:
            gradients[name] = Buffer((*batch, N, T), float32, layout, 2)
    if "bias" in inputs:
        # In the shape and dtype of the bias, and summed over what shares it.
        bias = (operands or {})["bias"]
        gradients["dbias"] = Shared((*batch, N, T, S), bias, layout, 3, is_output=True)
    backward = api.BackwardParams(ctypes.sizeof(api.BackwardParams), params)
    for name in ("d_out", "d_lse"):
        setattr(backward, name, inputs[name].tensor)
    for name, buffer in gradients.items():
        setattr(backward, name, buffer.tensor)
    return Call(inputs, outputs, gradients, params, backward)


def entry(direction: str, kind: str = "", backend: str = "cpu") -> Callable[..., int]:
    """jaxflash_attention_<direction><_workspace>_<backend>."""
    return getattr(LIBRARY, f"jaxflash_attention_{direction}{kind}_{backend}")


def workspace_bytes(direction: str, params) -> tuple[int, int]:
    """Status of the query and its answer."""
    size = ctypes.c_size_t(12345)
    status = entry(direction, "_workspace")(ctypes.byref(params), ctypes.byref(size))
    return status, size.value


def run(direction: str, params, executor: Executor | None = None) -> int:
    """Runs a pass with a workspace of exactly the bytes asked for, poison around it."""
    status, size = workspace_bytes(direction, params)
    raw = np.full(size + 192, POISON, np.uint8)
    start = 64 + -raw.ctypes.data % 64
    status = entry(direction)(
        ctypes.byref(params),
        ctypes.c_void_p(raw.ctypes.data + start) if size else None,
        ctypes.c_size_t(size if status == OK else 0),
        None if executor is None else ctypes.byref(executor),
    )
    assert np.all(raw[:start] == POISON), "wrote below the workspace"
    assert np.all(raw[start + size :] == POISON), "wrote above the workspace"
    return status


def last_error() -> str:
    return LIBRARY.jaxflash_last_error().decode()
