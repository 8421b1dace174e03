"""The public function: arguments in, one Spec and its operands out."""

from typing import Any, Literal

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jaxflash import arguments, ffi
from jaxflash.primitives.forward import attention_forward
from jaxflash.spec import IMPLEMENTATIONS, Spec, accumulator

Implementation = Literal["cuda", "cpu", "reference"]


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    query_offset: ArrayLike = 0,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    softcap: float | None = None,
    sinks: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    dropout_key: ArrayLike | None = None,
    precision: Any = None,
    deterministic: bool = False,
    implementation: Implementation | None = None,
    return_residual: bool = False,
) -> Any:
    """Exact attention with O(T + S) memory: softmax(scale * query key^T) value.

    Letters of shapes: T query length, S key/value length, N query heads, K key/value
    heads, H head dim of query and key, Hv head dim of value. K divides N, and query
    head n reads key/value head n // (N / K). `*batch` is any number of leading axes,
    none included, the same for query, key and value.
    """
    q, k, v = arguments.query_key_value(query, key, value)
    *batch, q_len, num_heads, head_dim = q.shape
    batch, kv_len = tuple(batch), k.shape[-3]
    wide = accumulator(q.dtype)
    operands: dict[str, Array | None] = {"query": q, "key": k, "value": v}
    operands["scale"] = arguments.scale(scale, head_dim, wide)
    operands["query_offset"] = arguments.query_offset(query_offset, batch)
    for name, lengths, most in (
        ("query_seq_lengths", query_seq_lengths, q_len),
        ("key_value_seq_lengths", key_value_seq_lengths, kv_len),
    ):
        if lengths is not None:
            operands[name] = arguments.integers(name, lengths, batch, "[*batch]", most)
    for name, x in (("bias", bias), ("mask", mask)):
        if x is not None:
            full = (*batch, num_heads, q_len, kv_len)
            operands[name] = arguments.broadcastable(name, x, full)
    if (query_segment_ids is None) != (key_value_segment_ids is None):
        name, other = "query_segment_ids", "key_value_segment_ids"
        if query_segment_ids is None:
            name, other = other, name
        raise ValueError(f"{other} must be given where {name} is, got None")
    for name, ids, axis, letters in (
        ("query_segment_ids", query_segment_ids, q_len, "[*batch, T]"),
        ("key_value_segment_ids", key_value_segment_ids, kv_len, "[*batch, S]"),
    ):
        if ids is not None:
            operands[name] = arguments.integers(name, ids, (*batch, axis), letters)
    for name, x in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        if x is not None:
            operands[name] = arguments.per_head(name, x, (*batch, num_heads), wide)
    rate, operands["dropout_seed"] = arguments.dropout(dropout_rate, dropout_key, batch)
    left, right = arguments.window(local_window_size)
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(
            f"implementation must be None or one of {IMPLEMENTATIONS}, got "
            f"{implementation!r}"
        )
    present = {name: x for name, x in operands.items() if x is not None}
    arguments.one_device_set(present)
    spec = Spec(
        operands=tuple(present),
        is_causal=arguments.flag("is_causal", is_causal),
        window_left=left,
        window_right=right,
        softcap=arguments.softcap(softcap),
        dropout_rate=rate,
        precision=arguments.precision(precision),
        deterministic=arguments.flag("deterministic", deterministic),
        implementation=implementation,
    )
    ffi.check_implementation(spec, tuple(present.values()))
    out, lse = attention_forward(*present.values(), spec=spec)
    return (out, jnp.swapaxes(lse, -1, -2)) if return_residual else out
