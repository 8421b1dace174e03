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

import numpy as np

_TESTS = pathlib.Path(__file__).parent
sys.path[:0] = [str(_TESTS), str(_TESTS.parent / "examples")]

import ctypes_numpy as api  # noqa: E402
import oracle  # noqa: E402
from c_api import DTYPES, LIBRARY, ORACLE_NAMES  # noqa: E402
from compare import (  # noqa: E402
    assert_close,
    assert_forward,
    assert_gradients,
    out_tolerance,
    with_low_bits,
)

CUDA = ctypes.CDLL("libcuda.so.1")


def driver(name: str, *arguments: Any) -> None:
    """Calls the CUDA driver."""
    status = getattr(CUDA, name)(*arguments)
    if status != 0:
        raise RuntimeError(f"{name} failed with CUresult {status}")


POISON = 0xFF  # as every byte: nan in each float dtype
GAP = 8  # elements: rows of 16 bits still start on 16 bytes


def memory_shape(shape, layout: str, core_rank: int) -> tuple[int, ...]:
    """Of the memory that `view_of` finds an array of a shape in."""
    *lead, columns = shape
    if layout == "row_gaps":
        return (*lead, columns + GAP)
    if layout == "unaligned":
        return (*lead, columns + 1)
    if layout == "heads_first":
        return np.swapaxes(np.empty(shape), -core_rank, 1 - core_rank).shape
    return (1, *shape[1:]) if layout == "shared" else tuple(shape)


def view_of(memory: np.ndarray, layout: str, core_rank: int) -> np.ndarray:
    """The elements of an array in its memory.

    Layouts: "dense"; "row_gaps", rows with a gap behind them; "heads_first", the first
    two core axes in the other order, as [B, N, T, H] and [B, T, N]; "unaligned", rows
    that do not start on 16 bytes; "shared", one batch element for all.
    """
    if layout == "row_gaps":
        return memory[..., :-GAP]
    if layout == "unaligned":
        return memory[..., 1:]
    if layout == "heads_first":
        return memory.swapaxes(-core_rank, 1 - core_rank)
    return memory


class DeviceArray:
    """A NumPy array and its copy on the GPU.

    Without values the copy is unwritten; what a layout leaves out is poison.
    """

    def __init__(self, shape, dtype, values=None, layout="dense", core_rank=3):
        self.memory = np.zeros(memory_shape(shape, layout, core_rank), dtype)
        self._outside = np.ones(self.memory.shape, bool)
        view_of(self._outside, layout, core_rank)[...] = False
        has_gaps = bool(self._outside.any())
        if has_gaps:
            self.memory.view(np.uint8)[...] = POISON
        view = view_of(self.memory, layout, core_rank)
        if values is not None:
            view[...] = values
        self.host = np.broadcast_to(view, shape) if layout == "shared" else view
        self.core_rank = core_rank
        self.pointer = ctypes.c_uint64()
        size = ctypes.c_size_t(max(1, self.memory.nbytes))
        driver("cuMemAlloc_v2", ctypes.byref(self.pointer), size)
        if values is not None or has_gaps:
            source = ctypes.c_void_p(self.memory.ctypes.data)
            bytes_ = ctypes.c_size_t(self.memory.nbytes)
            driver("cuMemcpyHtoD_v2", self.pointer, source, bytes_)

    @property
    def tensor(self) -> Any:
        tensor = api.view(self.host, self.core_rank)
        start = self.host.ctypes.data - self.memory.ctypes.data
        tensor.data = self.pointer.value + start
        return tensor

    def fetch(self) -> np.ndarray:
        target = ctypes.c_void_p(self.memory.ctypes.data)
        bytes_ = ctypes.c_size_t(self.memory.nbytes)
        driver("cuMemcpyDtoH_v2", target, self.pointer, bytes_)
        width = self.memory.itemsize
        outside = np.repeat(self._outside, width, axis=-1)
        assert np.all(self.memory.view(np.uint8)[outside] == POISON), "wrote in a gap"
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
    d_lse: bool = False
    layout: str = "dense"  # see view_of; outputs are never shared


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
    # More heads than a section of the Hopper backward kernel has, two blocks each.
    *(
        Case(T=70, S=150, N=140, K=70, H=H, is_causal=True, offset=(80, 80))
        for H in (64, 96, 128, 256)
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
    # Strided arrays. Rows that are not aligned are served by the portable kernels.
    *(
        Case(T=T, S=150, H=H, layout=layout, is_causal=True, out_low=True, d_lse=True)
        for layout in ("row_gaps", "heads_first", "shared", "unaligned")
        for T, H in ((140, 64), (70, 128), (140, 192), (70, 256))
    ),
    Case(T=70, S=70, H=128, layout="row_gaps", gradients="float32"),
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


class Arrays:
    """Makes the arrays of a case."""

    def __init__(self, case: Case):
        self.rng = np.random.default_rng(case.T + case.S + case.H)
        self.layout = case.layout
        self.output_layout = "dense" if case.layout == "shared" else case.layout

    def random(self, shape, dtype, core_rank=3, nan_row=None) -> DeviceArray:
        stored = (1, *shape[1:]) if self.layout == "shared" else shape
        values = self.rng.standard_normal(stored).astype(dtype)
        if nan_row is not None:
            values[:, nan_row] = np.nan
        return DeviceArray(shape, dtype, values, self.layout, core_rank)

    def unwritten(self, shape, dtype, core_rank=3) -> DeviceArray:
        return DeviceArray(shape, dtype, None, self.output_layout, core_rank)


def scalar_operands(case: Case) -> dict[str, np.ndarray]:
    """The operands of a case with one number per batch element, as the C API names."""
    scalars: dict[str, np.ndarray] = {}
    if case.scale is not None:
        scalars["scale"] = np.full(2, case.scale, np.float32)
    if case.lengths is not None:
        lengths = np.asarray(case.lengths, np.int32)
        scalars["q_seq_lengths"], scalars["kv_seq_lengths"] = lengths
    if case.offset is not None:
        scalars["query_offset"] = np.asarray(case.offset, np.int32)
    return scalars


def check(case: Case, launch: Launch = call_once) -> None:
    """Runs a case forward and backward and compares it with the oracle."""
    dtype = DTYPES[case.dtype]
    B, T, S, N, K, H = 2, case.T, case.S, case.N, case.K, case.H
    arrays = Arrays(case)
    q, k = arrays.random((B, T, N, H), dtype), arrays.random((B, S, K, H), dtype)
    nan_row = 100 if case.hidden_nan else None
    v = arrays.random((B, S, K, H), dtype, nan_row=nan_row)
    out = arrays.unwritten((B, T, N, H), dtype)
    lse = arrays.unwritten((B, N, T), np.float32, 2)
    params = api.forward_params(
        q.host, k.host, v.host, out.host, lse.host, is_causal=case.is_causal
    )
    params.deterministic = case.deterministic
    for name, array in {"q": q, "k": k, "v": v, "out": out, "lse": lse}.items():
        setattr(params, name, array.tensor)
    call: dict[str, Any] = {"query": q.host, "key": k.host, "value": v.host}
    call["is_causal"] = case.is_causal
    scalars = []  # on the GPU for as long as the call runs
    for name, values in scalar_operands(case).items():
        scalars.append(DeviceArray(values.shape, values.dtype, values, core_rank=0))
        setattr(params, name, scalars[-1].tensor)
        call[ORACLE_NAMES.get(name, name)] = case.scale if name == "scale" else values

    run("forward", params, launch)
    assert_forward(call, out.fetch(), np.swapaxes(lse.fetch(), 1, 2))
    if case.out_low:
        # The differentiated forward pass: the backward one reads what it leaves.
        out = arrays.unwritten((B, T, N, H), dtype)
        out_low = arrays.unwritten((B, T, N, H), np.int8)
        params.out, params.out_low = out.tensor, out_low.tensor
        run("forward", params, launch)
        whole = with_low_bits(out.fetch(), out_low.fetch())
        want, _ = oracle.forward(call)
        last_bit = 2.0**-15 * np.abs(want) + 1e-7
        assert_close(whole, want, out_tolerance(call) + last_bit, "out with out_low")
        assert out_low.host.any()

    gradient_dtype = DTYPES[case.gradients or case.dtype]
    gradients = {
        name: arrays.unwritten(array.host.shape, gradient_dtype)
        for name, array in {"query": q, "key": k, "value": v}.items()
    }
    dscale = arrays.unwritten((B, N, T), np.float32, 2)
    d_out = arrays.random((B, T, N, H), dtype)
    d_lse = arrays.random((B, N, T), np.float32, 2)
    backward = api.BackwardParams(ctypes.sizeof(api.BackwardParams), params)
    backward.d_out = d_out.tensor
    if case.d_lse:
        backward.d_lse = d_lse.tensor
    for field, array in zip(("dq", "dk", "dv"), gradients.values(), strict=True):
        setattr(backward, field, array.tensor)
    backward.dscale = dscale.tensor
    run("backward", backward, launch)
    got = {name: array.fetch() for name, array in gradients.items()}
    got["scale_rows"] = dscale.fetch()
    cotangent = np.swapaxes(d_lse.host, 1, 2) if case.d_lse else 0.0
    assert_gradients(call, got, d_out.host, cotangent)


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
