"""Checks of the public functions' arrays, and their conversion to operands.

Everything that can be wrong with a call is found here, while it is traced. Every error
names the argument, what was expected and what came.
"""

import math
import numbers
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from jaxflash import options
from jaxflash.spec import MAX_OFFSET

_KERNEL_DTYPES = ("float32", "bfloat16", "float16")
_DTYPES = (*_KERNEL_DTYPES, "float64")

_INT32 = np.iinfo(np.int32)


def is_traced(x: Any) -> bool:
    """Whether the value of x is unknown while this Python code runs."""
    return isinstance(x, Tracer)


def _value(x: Any) -> np.ndarray | None:
    """The numbers in x, or None where they are traced or on another host."""
    if not is_traced(x) and hasattr(x, "__jax_array__"):
        x = x.__jax_array__()  # a parameter of a neural network library
    if is_traced(x) or not getattr(x, "is_fully_addressable", True):
        return None
    try:
        value = np.asarray(x)
    except jax.errors.TracerArrayConversionError:
        return None  # a list of traced values
    return value if jnp.issubdtype(value.dtype, jnp.number) else None


def _array(name: str, x: Any) -> Array:
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError, OverflowError) as error:
        text = f"{name} must be an array, got {reprlib.repr(x)}: {error}"
        raise TypeError(text) from error


def _dtype(name: str, x: Array, kind: Any, text: str) -> None:
    if not jnp.issubdtype(x.dtype, kind):
        raise TypeError(f"{name} must have dtype {text}, got {x.dtype}")


def _shape(name: str, x: Array, want: Sequence[int | None], letters: str) -> None:
    """Checks a shape whose unchecked axes are None."""
    fits = x.ndim == len(want) and all(
        w is None or w == size for w, size in zip(want, x.shape, strict=True)
    )
    if not fits:
        text = ", ".join("*" if w is None else str(w) for w in want)
        raise ValueError(f"{name} must have shape {letters} = [{text}], got {x.shape}")


def query_key_value(query: Any, key: Any, value: Any) -> tuple[Array, Array, Array]:
    """The three arrays of every call."""
    q, k, v = (
        _array(name, x)
        for name, x in (("query", query), ("key", key), ("value", value))
    )
    if q.dtype.name not in _DTYPES:
        raise TypeError(
            f"query must have dtype {', '.join(_DTYPES[:-1])} or {_DTYPES[-1]}, got "
            f"{q.dtype}"
        )
    for name, x in (("key", k), ("value", v)):
        if x.dtype != q.dtype:
            raise ValueError(
                f"{name} must have the dtype of query, {q.dtype}, got {x.dtype}; cast "
                "one of them"
            )
    if q.ndim < 3:
        raise ValueError(
            "query must have shape [*batch, T, N, H] with at least 3 axes, got "
            f"{q.shape}"
        )
    *batch, _, num_heads, head_dim = q.shape
    if head_dim == 0:
        raise ValueError(
            f"query must have a head dim H of at least 1, got 0: {q.shape}"
        )
    _shape("key", k, (*batch, None, None, head_dim), "[*batch, S, K, H]")
    kv_len, num_kv_heads = k.shape[-3:-1]
    _shape("value", v, (*batch, kv_len, num_kv_heads, None), "[*batch, S, K, Hv]")
    if v.shape[-1] == 0:
        raise ValueError(f"value must have a head dim Hv of at least 1, got {v.shape}")
    if num_heads % num_kv_heads if num_kv_heads else num_heads:
        raise ValueError(
            "query must have a number of heads N that is a multiple of key's K, got "
            f"N = {num_heads} and K = {num_kv_heads}"
        )
    return q, k, v


def broadcastable(name: str, x: Any, full: tuple[int, ...], wide: Any) -> Array:
    """bias or mask: broadcastable to [*batch, N, T, S].

    A bias in a dtype that no query has in the kernels comes back in dtype `wide`.
    """
    x = _array(name, x)
    if name == "mask":
        _dtype(name, x, jnp.bool_, "bool; an additive mask is a bias")
    else:
        _dtype(name, x, jnp.floating, "float")
        if x.dtype.name not in _KERNEL_DTYPES:
            x = x.astype(wide)
    shape = x.shape
    if len(full) == 3 and x.ndim == 4 and shape[0] == 1:
        shape = shape[1:]  # jax.nn takes four axes also where query has three
    fits = len(shape) <= len(full) and all(
        size in (1, want) for size, want in zip(shape[::-1], full[::-1], strict=False)
    )
    if not fits:
        raise ValueError(
            f"{name} must be broadcastable to [*batch, N, T, S] = {list(full)}, got "
            f"{x.shape}"
        )
    return x.reshape((1,) * (3 - len(shape)) + shape)


def integers(
    name: str, x: Any, shape: tuple[int, ...], letters: str, most: int | None = None
) -> Array:
    """An int32 array of one shape.

    Its values are checked where they are known: against [0, most], and without a most
    only those of wider integers, which the cast to int32 could change.
    """
    # Inside jit, jnp.asarray would turn a known value into a traced one.
    given, x = x, _array(name, x)
    _dtype(name, x, jnp.int32, "int32")
    if letters == "[*batch]" and shape == () and x.shape == (1,):
        x = x.reshape(())  # jax.nn takes lengths [1] where query has three axes
    _shape(name, x, shape, letters)
    least, most = (_INT32.min, _INT32.max) if most is None else (0, most)
    value = _value(given) if least == 0 or isinstance(given, np.ndarray) else None
    if value is not None and value.size:
        low, high = int(value.min()), int(value.max())
        if low < least or high > most:
            raise ValueError(
                f"{name} must be from {least} to {most}, got "
                f"{low if low < least else high}"
            )
    return x


def boundaries(name: str, x: Any, total: int) -> Array:
    """Where packed sequences start and end: int32 [sequences + 1]."""
    given, x = x, _array(name, x)
    _dtype(name, x, jnp.int32, "int32")
    if x.ndim != 1 or not x.size:
        raise ValueError(f"{name} must have shape [sequences + 1], got {x.shape}")
    value = _value(given)
    if value is None:
        return x
    if value[0] != 0 or (np.diff(value) < 0).any() or value[-1] > total:
        raise ValueError(
            f"{name} must start with 0, not fall and end at {total} or before, got "
            f"{value.tolist()}"
        )
    return x


def per_head(name: str, x: Any, want: tuple[int, ...], dtype: Any) -> Array:
    """sinks [N] or alibi_slopes [N] or [*batch, N], in the dtype of scores."""
    x = _array(name, x)
    _dtype(name, x, jnp.floating, "float")
    letters = "[N]"
    if name == "alibi_slopes" and x.ndim > 1:
        letters = "[*batch, N]"
        want = tuple(
            1 if i < len(x.shape) - 1 and x.shape[i] == 1 else size
            for i, size in enumerate(want)
        )
    else:
        want = want[-1:]
    _shape(name, x, want, letters)
    return x.astype(dtype)


def scale(x: Any, head_dim: int, dtype: Any) -> Array:
    """None, a Python number or a floating scalar array."""
    if x is None:
        return jnp.asarray(1 / math.sqrt(head_dim), dtype)
    if isinstance(x, str | bool):
        raise TypeError(f"scale must be a number or a scalar array, got {x!r}")
    if isinstance(x, numbers.Real):
        x = options.number("scale", x)
        _finite_scale(x, dtype)  # before JAX, which may warn that it overflows
    given, x = x, _array("scale", x)
    _dtype("scale", x, jnp.floating, "float")
    if x.shape != ():
        raise ValueError(f"scale must be a scalar, of shape (), got {x.shape}")
    value = _value(given)
    if value is not None:
        _finite_scale(value, dtype)
    return x.astype(dtype)


def _finite_scale(value: Any, dtype: Any) -> None:
    if not abs(value) <= float(jnp.finfo(dtype).max):
        raise ValueError(f"scale must be finite in {dtype}, got {value}")


def query_offset(x: Any, batch: tuple[int, ...]) -> Array | None:
    """A Python int, an int32 scalar or int32 [*batch], clamped to +-2^30."""
    if isinstance(x, numbers.Integral) and not isinstance(x, bool):
        x = max(-MAX_OFFSET, min(int(x), MAX_OFFSET))
        return jnp.asarray(x, jnp.int32) if x else None
    if isinstance(x, numbers.Number | str) or x is None:
        raise TypeError(f"query_offset must be an int or an int32 array, got {x!r}")
    if isinstance(x, np.ndarray) and x.dtype == np.int64:
        x = np.clip(x, -MAX_OFFSET, MAX_OFFSET)  # before JAX cuts it to 32 bits
    x = _array("query_offset", x)
    _dtype("query_offset", x, jnp.int32, "int32")
    if x.shape != ():
        _shape("query_offset", x, batch, "[] or [*batch]")
    return jnp.clip(x, -MAX_OFFSET, MAX_OFFSET)


def _raw_key_shape() -> tuple[int, ...]:
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).shape


def dropout(rate: Any, key: Any, batch: tuple[int, ...]) -> tuple[float, Array | None]:
    """The rate, and the Philox key [*batch, 2] of every batch element."""
    value = options.number("dropout_rate", rate)
    if not 0 <= value < 1:
        raise ValueError(f"dropout_rate must be in [0, 1), got {value}")
    if value == 0:
        return value, None
    if key is None:
        raise ValueError(
            f"dropout_key must be a PRNG key where dropout_rate = {value} > 0, got None"
        )
    typed = isinstance(key, jax.Array) and jnp.issubdtype(
        key.dtype, jax.dtypes.prng_key
    )
    if not typed:
        key = _array("dropout_key", key)
        if key.dtype == jnp.uint32 and key.shape != _raw_key_shape():
            raise ValueError(
                "dropout_key must be one PRNG key, as jax.random.key makes it; the raw "
                f"uint32 data of one has shape {_raw_key_shape()}, got {key.shape}"
            )
    if key.ndim != (0 if typed else 1) or not (typed or key.dtype == jnp.uint32):
        raise TypeError(
            "dropout_key must be one PRNG key, as jax.random.key makes it, got dtype "
            f"{key.dtype} and shape {key.shape}"
        )
    return value, jax.random.bits(key, (*batch, 2), jnp.uint32)


def one_device_set(operands: Mapping[str, Any]) -> None:
    """Refuses arrays that were put on different devices."""
    first = None
    for name, x in operands.items():
        if is_traced(x) or not getattr(x, "committed", False):
            continue
        devices = x.devices()
        if first is None:
            first = name, devices
        elif devices != first[1]:
            raise ValueError(
                f"{name} must be on the devices of {first[0]}, "
                f"{sorted(map(str, first[1]))}, got {sorted(map(str, devices))}; move "
                "one of them with jax.device_put"
            )
