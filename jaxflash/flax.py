"""Flax adapters: jaxflash as the `attention_fn` of linen's and nnx's attention.

    from flax import nnx
    from jaxflash.flax import attention_fn

    layer = nnx.MultiHeadAttention(..., attention_fn=attention_fn)
    y = layer(x, is_causal=True)  # no mask array: the kernels serve it

nnx's layer takes is_causal from Flax 0.12.8 on; with an older one, give it
`causal_attention_fn`.

Both Flax APIs call `attention_fn(query, key, value, ...)`. linen passes only the
keyword arguments that it finds by name in the signature, and nnx passes all of its
own, so every parameter below is named and none is taken by `**kwargs`.

Nothing here imports Flax.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxflash.attention import Implementation, dot_product_attention


def attention_fn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    is_causal: bool = False,
    input_positions: jax.Array | None = None,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    *,
    always_causal: bool = False,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Attention with the calling convention of Flax.

    The arguments mean what they mean for Flax's own `dot_product_attention`. Bind
    the last two with `functools.partial`; Flax never passes them.

    Args:
      query: [*batch, T, N, H].
      key: [*batch, S, K, H].
      value: [*batch, S, K, Hv].
      bias: broadcastable to [*batch, N, T, S], added to the logits.
      mask: broadcastable to [*batch, N, T, S], of any dtype: Flax makes float masks.
        Where it is zero the query does not see the key. A row that sees no key gives
        0, where Flax gives the mean of `value`.
      broadcast_dropout: must be False if dropout is on. Flax's default drops the same
        (i, j) in every batch element and head; jaxflash draws each of them anew.
      dropout_rng: key of the dropout.
      dropout_rate: probability that an attention weight is dropped.
      deterministic: True turns dropout off.
      dtype: dtype of query, key and value in the computation; None promotes them to a
        common one. The softmax is float32 in any case.
      precision: as in `jax.lax`; matters for float32.
      module: must be None. Flax sets it to store the attention weights
        (`sow_weights=True`), and a flash kernel never has them in memory.
      is_causal: query i sees the keys j <= i, with no mask array. nnx, from Flax
        0.12.8 on, passes on what its layer was called with:
        `layer(x, is_causal=True)`.
      input_positions: must be None: rotary embeddings are applied by the caller.
      qk_attn_weights_einsum: must be None, like the next: the products are the
        kernel's own.
      attn_weights_value_einsum: must be None.
      always_causal: causal self-attention whatever the caller says. nnx passes an
        `is_causal` of its own in each call, so a value bound by `functools.partial`
        would be lost there: bind this instead, or use `causal_attention_fn`.
      implementation: as in `jaxflash.dot_product_attention`.

    Returns:
      [*batch, T, N, Hv].
    """
    refused = {
        "module": (module, "sow_weights=True asks for the attention weights"),
        "input_positions": (input_positions, "rotate query and key before the call"),
        "qk_attn_weights_einsum": (qk_attn_weights_einsum, "remove the einsum class"),
        "attn_weights_value_einsum": (
            attn_weights_value_einsum,
            "remove the einsum class",
        ),
    }
    for name, (argument, why) in refused.items():
        if argument is not None:
            raise NotImplementedError(
                f"{name} must be None for jaxflash.flax.attention_fn, got "
                f"{type(argument).__name__}: {why}. Use Flax's own attention_fn where "
                "you need it."
            )

    if deterministic:
        dropout_rate = 0.0
    if dropout_rate > 0.0:
        if dropout_rng is None:
            raise ValueError(
                f"dropout_rng must be a PRNG key with dropout_rate={dropout_rate}, got "
                "None: pass rngs, or deterministic=True."
            )
        if broadcast_dropout:
            raise NotImplementedError(
                f"broadcast_dropout must be False with dropout_rate={dropout_rate}, "
                "got True: jaxflash drops attention weights independently in every "
                "batch element and head. Build the layer with broadcast_dropout=False."
            )

    if always_causal:
        is_causal = is_causal or _needs_causality(query, key, mask)

    query, key, value = _promote(query, key, value, dtype)
    return dot_product_attention(
        query,
        key,
        value,
        bias=bias,
        mask=None if mask is None else mask.astype(bool),
        is_causal=is_causal,
        dropout_rate=dropout_rate,
        dropout_key=dropout_rng if dropout_rate > 0.0 else None,
        precision=precision,
        implementation=implementation,
    )


causal_attention_fn = functools.partial(attention_fn, always_causal=True)


def _needs_causality(query, key, mask) -> bool:
    """Whether `always_causal` adds to the mask of this call."""
    q_len, kv_len = query.shape[-3], key.shape[-3]
    if q_len == kv_len:
        return True
    if q_len == 1 and mask is not None:
        # A decoding step: Flax's mask ends at the position of the one query.
        return False
    raise ValueError(
        "always_causal needs self-attention, query and key of one length [*batch, T, "
        f"heads, H], or a decoding step with a mask; got T = {q_len} and S = {kv_len}, "
        f"mask {'None' if mask is None else mask.shape}. Say which keys a query sees "
        "with mask, or with is_causal."
    )


def _promote(query, key, value, dtype):
    """Casts to `dtype`, or to the dtype that the three promote to."""
    if dtype is None:
        dtype = jnp.result_type(query, key, value)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"query, key and value must be floating point, got {jnp.dtype(dtype)}: "
            "pass dtype, or cast them."
        )
    return tuple(x.astype(dtype) for x in (query, key, value))
