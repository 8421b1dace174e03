"""Attention over sequences packed one after the other, as FlashAttention takes them."""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jaxflash import arguments, options
from jaxflash.attention import Implementation, dot_product_attention
from jaxflash.spec import UNLIMITED

# What belongs to no sequence: rows and keys of the tail, which do not see each other.
_NO_QUERIES, _NO_KEYS = -1, -2
_ALL_KEYS = (UNLIMITED, UNLIMITED)


def flash_attention_varlen(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cu_seqlens_q: ArrayLike,
    cu_seqlens_k: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int | None, int | None] | None = None,
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
    """Attention within each of many sequences that lie packed in one array.

    Sequence b has the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of query and the same
    range by cu_seqlens_k of key and value. What follows the last sequence is padding:
    its rows give 0, and nobody sees its keys, whatever they hold. The boundaries may be
    traced; there is no padding per sequence and no array of [total_q, total_k].

    It is `dot_product_attention` with segment ids, and has its derivatives.

    Example:
        >>> import jax, jax.numpy as jnp, jaxflash
        >>> q = jax.random.normal(jax.random.key(0), (12, 4, 16))
        >>> ends = jnp.array([0, 5, 5, 11])  # of 5, 0 and 6 tokens, and one of padding
        >>> jaxflash.flash_attention_varlen(q, q, q, ends, is_causal=True).shape
        (12, 4, 16)

    Args:
        query: [total_q, N, H], float32, bfloat16, float16; float64 on the reference.
        key: [total_k, K, H], in query's dtype; K divides N.
        value: [total_k, K, Hv], in query's dtype.
        cu_seqlens_q: int32 [sequences + 1], from 0, not falling, at most total_q.
        cu_seqlens_k: the same for key and value; None is cu_seqlens_q. With is_causal,
            local_window_size or alibi_slopes it must be None: these compare positions,
            which must count alike on both sides.
        scale: a Python number or a scalar array, which may be traced; None is
            1 / sqrt(H).
        is_causal: a query sees no later keys of its sequence.
        local_window_size: int w for (w, w), or (left, right), within the sequence.
        softcap: scores become softcap * tanh(scores / softcap); greater than 0.
        sinks: [N], one logit per query head that has no value.
        alibi_slopes: [N]; scores lose slope * |i - j|.
        dropout_rate: probability with which an attention weight is dropped.
        dropout_key: a JAX PRNG key.
        precision: as in `dot_product_attention`.
        deterministic: gradients are the same bits in every run.
        implementation: as in `dot_product_attention`.
        return_residual: also return lse.

    Returns:
        The output [total_q, N, Hv] in query's dtype; with return_residual=True, a pair
        of it and lse [total_q, N], float32, -inf in the rows of the tail.

    Raises:
        ValueError: shapes do not fit together, or boundaries that are known while the
            call is traced are not as above.
        TypeError: an argument has the wrong type or kind of dtype.
        NotImplementedError: cu_seqlens_k together with what compares positions, or what
            the named implementation does not serve.

    Source: FlashAttention-2's `flash_attn_varlen_func` (arXiv 2307.08691).
    """
    q, k, v = arguments.query_key_value(query, key, value)
    if q.ndim != 3:
        raise ValueError(f"query must have shape [total_q, N, H], got {q.shape}")
    compares = {
        "is_causal": options.flag("is_causal", is_causal),
        "local_window_size": options.window(local_window_size) != _ALL_KEYS,
        "alibi_slopes": alibi_slopes is not None,
    }
    if cu_seqlens_k is not None and any(compares.values()):
        names = ", ".join(name for name, given in compares.items() if given)
        raise NotImplementedError(
            f"cu_seqlens_k must be None, which is cu_seqlens_q, together with {names}: "
            "positions must count alike on both sides; got an array. Sequences of a "
            "batch may differ: dot_product_attention with query_offset and lengths"
        )
    ends_q = arguments.boundaries("cu_seqlens_q", cu_seqlens_q, q.shape[0])
    ends_k = ends_q
    if cu_seqlens_k is not None:
        ends_k = arguments.boundaries("cu_seqlens_k", cu_seqlens_k, k.shape[0])
        if ends_k.shape != ends_q.shape:
            raise ValueError(
                "cu_seqlens_k must have the shape of cu_seqlens_q, [sequences + 1] = "
                f"{ends_q.shape}, got {ends_k.shape}"
            )
    elif k.shape[0] != q.shape[0]:
        raise ValueError(
            f"key must have total_k = total_q = {q.shape[0]} without cu_seqlens_k, got "
            f"shape {k.shape}"
        )
    return dot_product_attention(
        q,
        k,
        v,
        query_segment_ids=_segment_ids(ends_q, q.shape[0], _NO_QUERIES),
        key_value_segment_ids=_segment_ids(ends_k, k.shape[0], _NO_KEYS),
        query_seq_lengths=ends_q[-1],
        key_value_seq_lengths=ends_k[-1],
        scale=scale,
        is_causal=is_causal,
        local_window_size=local_window_size,
        softcap=softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        precision=precision,
        deterministic=deterministic,
        implementation=implementation,
        return_residual=return_residual,
    )


def _segment_ids(ends: Array, total: int, tail: int) -> Array:
    """The number of the sequence that each position is in; `tail` behind the last."""
    positions = jnp.arange(total, dtype=jnp.int32)
    ids = jnp.searchsorted(ends[1:], positions, side="right").astype(jnp.int32)
    return jnp.where(positions < ends[-1], ids, jnp.int32(tail))
