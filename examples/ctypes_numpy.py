"""Attention on NumPy arrays through the C API alone: no JAX, no compiler.

Runs the CPU kernels forward and backward with ctypes and compares them with NumPy.

    python examples/ctypes_numpy.py [path of libjaxflash.so]
"""

import ctypes
import importlib.metadata
import sys

import numpy as np

MAX_BATCH_RANK = 6
DTYPES = {
    "float32": 1,
    "bfloat16": 2,
    "float16": 3,
    "int32": 4,
    "uint32": 5,
    "bool": 6,
    "int8": 7,
}


class Tensor(ctypes.Structure):
    """jaxflash_tensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("batch_strides", ctypes.c_int64 * MAX_BATCH_RANK),
        ("strides", ctypes.c_int64 * 3),
    )


class Params(ctypes.Structure):
    """jaxflash_attention_params."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("batch_rank", ctypes.c_int32),
        ("is_causal", ctypes.c_int32),
        ("batch_shape", ctypes.c_int64 * MAX_BATCH_RANK),
        ("q_len", ctypes.c_int64),
        ("kv_len", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("value_head_dim", ctypes.c_int64),
        ("window_left", ctypes.c_int64),
        ("window_right", ctypes.c_int64),
        ("softcap", ctypes.c_float),
        ("dropout_rate", ctypes.c_float),
        ("deterministic", ctypes.c_int32),
        ("precision", ctypes.c_int32),
        ("q", Tensor),
        ("k", Tensor),
        ("v", Tensor),
        ("scale", Tensor),
        ("query_offset", Tensor),
        ("q_seq_lengths", Tensor),
        ("kv_seq_lengths", Tensor),
        ("bias", Tensor),
        ("mask", Tensor),
        ("q_segment_ids", Tensor),
        ("kv_segment_ids", Tensor),
        ("sinks", Tensor),
        ("alibi_slopes", Tensor),
        ("dropout_seed", Tensor),
        ("out", Tensor),
        ("lse", Tensor),
        ("out_low", Tensor),
    )


class BackwardParams(ctypes.Structure):
    """jaxflash_attention_backward_params."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("forward", Params),
        ("d_out", Tensor),
        ("d_lse", Tensor),
        ("dq", Tensor),
        ("dk", Tensor),
        ("dv", Tensor),
        ("dscale", Tensor),
        ("dbias", Tensor),
        ("dsinks", Tensor),
        ("dalibi", Tensor),
    )


def find_library() -> str:
    """The libjaxflash that the installed package jaxflash brings."""
    for path in importlib.metadata.files("jaxflash") or ():
        if path.name == "libjaxflash.so":
            return str(path.locate())
    raise FileNotFoundError("the installed package jaxflash has no libjaxflash.so")


def load_library(path: str) -> ctypes.CDLL:
    """Loads the library and declares what ctypes has to know about it."""
    library = ctypes.CDLL(path)
    library.jaxflash_last_error.restype = ctypes.c_char_p
    library.jaxflash_status_name.restype = ctypes.c_char_p
    library.jaxflash_version.restype = ctypes.c_char_p
    return library


def view(array: np.ndarray, core_rank: int) -> Tensor:
    """Describes a NumPy array; its leading axes are batch axes, of any strides."""
    strides = [stride // array.itemsize for stride in array.strides]
    batch_rank = array.ndim - core_rank
    tensor = Tensor(data=array.ctypes.data, dtype=DTYPES[array.dtype.name])
    tensor.batch_strides[:batch_rank] = strides[:batch_rank]
    tensor.strides[:core_rank] = strides[batch_rank:]
    return tensor


def forward_params(q, k, v, out, lse, *, is_causal: bool) -> Params:
    """q [*batch, T, N, H], k [*batch, S, K, H], v [*batch, S, K, Hv]."""
    params = Params(struct_size=ctypes.sizeof(Params))
    params.batch_rank = q.ndim - 3
    params.batch_shape[: q.ndim - 3] = q.shape[:-3]
    params.q_len, params.num_heads, params.head_dim = q.shape[-3:]
    params.kv_len, params.num_kv_heads, params.value_head_dim = v.shape[-3:]
    params.window_left = params.window_right = -1
    params.is_causal = is_causal
    params.q, params.k, params.v = view(q, 3), view(k, 3), view(v, 3)
    params.out, params.lse = view(out, 3), view(lse, 2)
    return params


def run(library: ctypes.CDLL, direction: str, params: ctypes.Structure) -> None:
    """Asks for the workspace, then runs the pass on the calling thread."""
    size = ctypes.c_size_t()
    query = getattr(library, f"jaxflash_attention_{direction}_workspace_cpu")
    call = getattr(library, f"jaxflash_attention_{direction}_cpu")
    status = query(ctypes.byref(params), ctypes.byref(size))
    if status == 0:
        raw = np.empty(size.value + 64, np.uint8)
        start = -raw.ctypes.data % 64
        workspace = ctypes.c_void_p(raw.ctypes.data + start)
        status = call(ctypes.byref(params), workspace, size, None)
    if status != 0:
        name = library.jaxflash_status_name(status).decode()
        raise RuntimeError(f"{name}: {library.jaxflash_last_error().decode()}")


def numpy_attention(q, k, v, d_out, *, is_causal: bool):
    """The formula in float64: out, lse, dq, dk, dv."""
    group = q.shape[-2] // k.shape[-2]
    q, d_out = (np.swapaxes(x.astype(np.float64), -2, -3) for x in (q, d_out))
    k, v = (
        np.repeat(np.swapaxes(x.astype(np.float64), -2, -3), group, -3) for x in (k, v)
    )
    scale = q.shape[-1] ** -0.5
    s = scale * q @ np.swapaxes(k, -1, -2)
    if is_causal:
        s[..., np.triu(np.ones(s.shape[-2:], bool), 1)] = -np.inf
    lse = np.log(np.sum(np.exp(s), -1))
    p = np.exp(s - lse[..., None])
    out = p @ v
    dp = d_out @ np.swapaxes(v, -1, -2)
    ds = p * (dp - np.sum(d_out * out, -1)[..., None])

    def sum_group(x):
        x = x.reshape(*x.shape[:-3], -1, group, *x.shape[-2:]).sum(-3)
        return np.swapaxes(x, -2, -3)

    dq = np.swapaxes(scale * ds @ k, -2, -3)
    dk = sum_group(scale * np.swapaxes(ds, -1, -2) @ q)
    dv = sum_group(np.swapaxes(p, -1, -2) @ d_out)
    return np.swapaxes(out, -2, -3), lse, dq, dk, dv


def main() -> int:
    library = load_library(sys.argv[1] if len(sys.argv) > 1 else find_library())
    print("libjaxflash", library.jaxflash_version().decode())

    B, T, S, N, K, H = 2, 300, 333, 6, 2, 64
    rng = np.random.default_rng(0)
    q, d_out = rng.standard_normal((2, B, T, N, H), np.float32)
    k, v = rng.standard_normal((2, B, S, K, H), np.float32)
    out, dq = np.empty_like(q), np.empty_like(q)
    dk, dv = np.empty_like(k), np.empty_like(v)
    lse = np.empty((B, N, T), np.float32)

    params = forward_params(q, k, v, out, lse, is_causal=True)
    run(library, "forward", params)
    backward = BackwardParams(ctypes.sizeof(BackwardParams), params, view(d_out, 3))
    backward.dq, backward.dk, backward.dv = view(dq, 3), view(dk, 3), view(dv, 3)
    run(library, "backward", backward)

    passed = True
    expected = numpy_attention(q, k, v, d_out, is_causal=True)
    for name, got, want in zip(
        ("out", "lse", "dq", "dk", "dv"), (out, lse, dq, dk, dv), expected, strict=True
    ):
        error = np.max(np.abs(got - want)) / np.max(np.abs(want))
        passed = passed and bool(error < 1e-5)
        print(f"{name:4} {got.shape!s:18} error {error:.1e} of the largest element")
    print("equal to NumPy" if passed else "NOT equal to NumPy")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
