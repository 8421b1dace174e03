"""Calls of the explaining functions of the C API, which need no GPU."""

from __future__ import annotations

import ctypes
from typing import Any

import c_api
import ctypes_numpy as api
import numpy as np
import pytest

from jaxflash import selection

CUDA: Any = selection.load("cuda")
needs_cuda = pytest.mark.skipif(isinstance(CUDA, str), reason=str(CUDA))
needs_hopper = pytest.mark.skipif(
    isinstance(CUDA, str) or "90" not in CUDA.info()["architectures"],
    reason="the library was built without the kernels for sm_90a",
)


class Device(ctypes.Structure):
    """jaxflash_cuda_device."""

    _fields_ = tuple(
        (name, ctypes.c_int32)
        for name in (
            "compute_capability",
            "num_sms",
            "shared_memory_of_block",
            "shared_memory_of_sm",
        )
    )


class Kernel(ctypes.Structure):
    """jaxflash_kernel."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("block_q", ctypes.c_int32),
        ("block_kv", ctypes.c_int32),
        ("num_stages", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
        ("num_blocks", ctypes.c_int64),
        ("shared_memory_bytes", ctypes.c_int64),
    )


class Answer(ctypes.Structure):
    """jaxflash_explanation."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("family", ctypes.c_char_p),
        ("reason", ctypes.c_char_p),
        ("workspace_bytes", ctypes.c_size_t),
        ("is_reproducible", ctypes.c_int32),
        ("num_kernels", ctypes.c_int32),
        ("kernels", Kernel * 4),
    )

    def names(self) -> list[str]:
        return [kernel.name.decode() for kernel in self.kernels[: self.num_kernels]]


H200 = Device(90, 132, 232448, 233472)
A100 = Device(80, 108, 166912, 167936)
RTX4090 = Device(89, 128, 101376, 102400)


def aligned(shape, dtype, offset: int = 0) -> np.ndarray:
    """Zeros that start `offset` bytes behind a multiple of 64."""
    dtype = c_api.DTYPES.get(dtype, np.dtype(dtype))
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.zeros(size + 128, np.uint8)
    start = -raw.ctypes.data % 64 + offset
    return raw[start : start + size].view(dtype).reshape(shape)


def make_params(
    batch=(2,), T=300, S=500, N=4, K=2, H=64, *, dtype="bfloat16", k_offset=0
) -> Any:
    """Parameters of the backward pass, those of the forward pass inside."""
    q, out, d_out, dq = (aligned((*batch, T, N, H), dtype) for _ in range(4))
    k, dk, dv = (aligned((*batch, S, K, H), dtype, k_offset) for _ in range(3))
    v = aligned((*batch, S, K, H), dtype)
    lse = aligned((*batch, N, T), "float32")
    forward = api.forward_params(q, k, v, out, lse, is_causal=False)
    params = api.BackwardParams(ctypes.sizeof(api.BackwardParams), forward)
    for name, x in (("d_out", d_out), ("dq", dq), ("dk", dk), ("dv", dv)):
        setattr(params, name, api.view(x, 3))
    return params


def ask(direction: str, params, device: Device | None = H200, answer=None):
    """Status and answer of the C function."""
    answer = Answer(ctypes.sizeof(Answer)) if answer is None else answer
    function = c_api.entry(direction, backend="cuda").__name__.replace(
        "attention_", "attention_explain_"
    )
    params = params.forward if direction == "forward" else params
    status = getattr(c_api.LIBRARY, function)(
        ctypes.byref(params),
        None if device is None else ctypes.byref(device),
        ctypes.byref(answer),
    )
    return status, answer


def answer_of(direction: str, params, device: Device = H200) -> Answer:
    status, answer = ask(direction, params, device)
    assert status == c_api.OK, c_api.last_error()
    return answer
