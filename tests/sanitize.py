"""Small CUDA calls through the C API, for compute-sanitizer (`make sanitize`).

Neither JAX nor a framework's memory pool runs here: every buffer is an allocation of
its own and of its exact size, so that the sanitizer sees each stray access and each
read of memory that nobody wrote. Results are compared with the float64 oracle too.
"""

from __future__ import annotations

import ctypes
import dataclasses
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

_TESTS = pathlib.Path(__file__).parent
sys.path[:0] = [str(_TESTS), str(_TESTS.parent / "examples")]

import ctypes_numpy as api  # noqa: E402
import oracle  # noqa: E402
from compare import (  # noqa: E402
    FORWARD_TOLERANCE,
    GRADIENT_TOLERANCE,
    assert_close,
    with_low_bits,
)

LIBRARY = api.load_library(api.find_library())
CUDA = ctypes.CDLL("libcuda.so.1")


def driver(name: str, *arguments: Any) -> None:
    """Calls the CUDA driver."""
    status = getattr(CUDA, name)(*arguments)
    if status != 0:
        raise RuntimeError(f"{name} failed with CUresult {status}")


class DeviceArray:
    """A NumPy array and its copy on the GPU; without values the copy is unwritten."""

    def __init__(self, shape, dtype, values=None):
        self.host = np.zeros(shape, dtype)
        self.pointer = ctypes.c_uint64()
        size = ctypes.c_size_t(max(1, self.host.nbytes))
        driver("cuMemAlloc_v2", ctypes.byref(self.pointer), size)
        if values is not None:
            self.host[...] = values
            source = ctypes.c_void_p(self.host.ctypes.data)
            bytes_ = ctypes.c_size_t(self.host.nbytes)
            driver("cuMemcpyHtoD_v2", self.pointer, source, bytes_)

    def tensor(self, core_rank: int) -> Any:
        tensor = api.view(self.host, core_rank)
        tensor.data = self.pointer.value
        return tensor

    def fetch(self) -> np.ndarray:
        target = ctypes.c_void_p(self.host.ctypes.data)
        bytes_ = ctypes.c_size_t(self.host.nbytes)
        driver("cuMemcpyDtoH_v2", target, self.pointer, bytes_)
        return self.host

    def __del__(self):
        CUDA.cuMemFree_v2(self.pointer)


# Takes what enqueues a pass on a stream, and has it done.
Launch = Callable[[Callable[[ctypes.c_void_p | None], None]], None]


def call_once(enqueue: Callable[[ctypes.c_void_p | None], None]) -> None:
    """Enqueues a pass on the default stream."""
    enqueue(None)


@dataclasses.dataclass
class Case:
    """One call; lengths and offset are per batch element."""

    T: int
    S: int
    N: int = 2
    K: int = 1
    H: int = 64
    dtype: str = "bfloat16"
    is_causal: bool = False
    scale: float | None = None
    lengths: tuple[tuple[int, int], tuple[int, int]] | None = None
    offset: tuple[int, int] | None = None
    gradients: str | None = None
    deterministic: bool = False
    hidden_nan: bool = False
    out_low: bool = False


CASES = [
    # Every tile configuration, full and causal, with ragged ends.
    *(
        Case(T=130, S=131, H=H, is_causal=is_causal, out_low=True)
        for H in (32, 64, 96, 128, 192, 256)
        for is_causal in (False, True)
    ),
    # More rows than what the tiles for few rows serve.
    Case(T=1030, S=131, N=1, is_causal=True, out_low=True),
    Case(T=1030, S=85, N=1, H=256),
    # Several tiles of Q for each block of the Hopper forward kernel, some empty.
    *(
        Case(T=3, S=70, N=140, K=70, H=H, is_causal=True, lengths=((3, 0), (70, 65)))
        for H in (64, 128, 192, 256)
    ),
    # Two tiles of keys in each block of the Hopper backward kernel: as many pairs as
    # an H100 or H200 has SMs.
    *(
        Case(T=3, S=150, N=132, K=66, H=H, is_causal=True, offset=(147, 147))
        for H in (64, 96, 128)
    ),
    # Rows that do not start on 16 bytes; columns past H.
    *(Case(T=37, S=70, H=H, dtype="float16") for H in (1, 5, 40, 63, 72, 129, 250)),
    Case(T=1, S=300, N=6, K=2, H=128),
    Case(T=300, S=1, N=6, K=3, H=128, is_causal=True),
    Case(T=5, S=0),
    Case(T=200, S=150, lengths=((70, 0), (150, 149)), is_causal=True),
    Case(T=150, S=200, H=128, is_causal=True, offset=(50, -100)),
    Case(T=70, S=70, is_causal=True, scale=-0.5, dtype="float16"),
    Case(T=150, S=260, H=128, gradients="float32", is_causal=True),
    Case(T=300, S=300, H=128, K=2, is_causal=True, deterministic=True),
    Case(T=140, S=140, H=128, is_causal=True, hidden_nan=True),
]


def run(direction: str, params: Any, launch: Launch = call_once) -> None:
    """Runs a pass with a workspace of exactly the bytes it asks for."""
    size = ctypes.c_size_t()
    query = getattr(LIBRARY, f"jaxflash_attention_{direction}_workspace_cuda")
    call = getattr(LIBRARY, f"jaxflash_attention_{direction}_cuda")
    status = query(ctypes.byref(params), ctypes.byref(size))
    workspace = DeviceArray((size.value,), np.uint8)
    pointer = ctypes.c_void_p(workspace.pointer.value)

    def enqueue(stream: ctypes.c_void_p | None) -> None:
        if status != 0 or call(ctypes.byref(params), pointer, size, stream) != 0:
            raise RuntimeError(LIBRARY.jaxflash_last_error().decode())

    launch(enqueue)
    driver("cuCtxSynchronize")


def check(case: Case, launch: Launch = call_once) -> None:
    """Runs a case forward and backward and compares it with the oracle."""
    rng = np.random.default_rng(case.T + case.S + case.H)
    dtype = np.dtype(getattr(ml_dtypes, case.dtype, case.dtype))
    B, T, S, N, K, H = 2, case.T, case.S, case.N, case.K, case.H

    def random(*shape):
        values = rng.standard_normal(shape).astype(dtype)
        return DeviceArray(shape, dtype, values)

    q, k, v = random(B, T, N, H), random(B, S, K, H), random(B, S, K, H)
    d_out = random(B, T, N, H)
    if case.hidden_nan:
        v.host[:, 100] = np.nan
        v = DeviceArray(v.host.shape, dtype, v.host)
    out = DeviceArray((B, T, N, H), dtype)
    lse = DeviceArray((B, N, T), np.float32)
    params = api.forward_params(
        q.host, k.host, v.host, out.host, lse.host, is_causal=case.is_causal
    )
    params.deterministic = case.deterministic
    arrays = {"q": q, "k": k, "v": v, "out": out}
    call: dict[str, Any] = {"query": q.host, "key": k.host, "value": v.host}
    call["is_causal"] = case.is_causal
    scalars: dict[str, Any] = {}
    if case.scale is not None:
        scalars["scale"] = np.full(B, case.scale, np.float32)
        call["scale"] = case.scale
    if case.lengths is not None:
        lengths = np.asarray(case.lengths, np.int32)
        scalars["q_seq_lengths"], scalars["kv_seq_lengths"] = lengths
        call["query_seq_lengths"] = scalars["q_seq_lengths"]
        call["key_value_seq_lengths"] = scalars["kv_seq_lengths"]
    if case.offset is not None:
        scalars["query_offset"] = np.asarray(case.offset, np.int32)
        call["query_offset"] = scalars["query_offset"]
    scalars = {n: DeviceArray(x.shape, x.dtype, x) for n, x in scalars.items()}
    for name, array in arrays.items():
        setattr(params, name, array.tensor(3))
    for name, array in scalars.items():
        setattr(params, name, array.tensor(0))
    params.lse = lse.tensor(2)
    run("forward", params, launch)
    want, want_lse = oracle.forward(call)
    tolerance = 4 * FORWARD_TOLERANCE[case.dtype]
    assert_close(out.fetch(), want, tolerance, "out")
    assert_close(lse.fetch(), np.swapaxes(want_lse, 1, 2), 1e-4, "lse")
    if case.out_low:
        # The differentiated forward pass: the backward one reads what it leaves.
        out = DeviceArray(out.host.shape, dtype)
        out_low = DeviceArray(out.host.shape, np.int8)
        params.out, params.out_low = out.tensor(3), out_low.tensor(3)
        run("forward", params, launch)
        whole = with_low_bits(out.fetch(), out_low.fetch())
        assert_close(whole, want, tolerance, "out with out_low")
        assert out_low.host.any()

    grad_dtype = np.dtype(case.gradients or dtype)
    grads = {
        "query": DeviceArray(q.host.shape, grad_dtype),
        "key": DeviceArray(k.host.shape, grad_dtype),
        "value": DeviceArray(v.host.shape, grad_dtype),
    }
    dscale = DeviceArray((B, N, T), np.float32)
    backward = api.BackwardParams(ctypes.sizeof(api.BackwardParams), params)
    backward.d_out = d_out.tensor(3)
    for field, array in zip(("dq", "dk", "dv"), grads.values(), strict=True):
        setattr(backward, field, array.tensor(3))
    backward.dscale = dscale.tensor(2)
    run("backward", backward, launch)
    dscale.fetch()
    fetched = {name: array.fetch() for name, array in grads.items()}
    if case.hidden_nan:
        return
    no_d_lse = np.zeros((B, T, N))
    want_grads = oracle.backward(call, d_out.host, no_d_lse)
    sizes = oracle.backward(call, d_out.host, no_d_lse, absolute=True)
    for name, got in fetched.items():
        atol = GRADIENT_TOLERANCE[case.dtype] * np.max(sizes[name], initial=0.0)
        assert_close(got, want_grads[name], atol, f"d{name}")


def use_first_device() -> None:
    """Makes the primary context of the first device current."""
    context, device = ctypes.c_void_p(), ctypes.c_int()
    driver("cuInit", 0)
    driver("cuDeviceGet", ctypes.byref(device), 0)
    driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    driver("cuCtxSetCurrent", context)


def main() -> None:
    use_first_device()
    for case in CASES:
        check(case)
        print("passed", case, flush=True)


if __name__ == "__main__":
    main()
