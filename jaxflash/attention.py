"""The public function: arguments in, one Spec and its operands out."""

from typing import Any, Literal

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jaxflash import arguments, options, selection
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
    """Exact attention in O(T + S) memory: softmax(scale * query key^T) value.

    Shapes: T query length, S key/value length, N query heads, K key/value heads, H head
    dim of query and key, Hv head dim of value. K divides N, and query head n reads
    key/value head n // (N / K). `*batch` is any number of leading axes, none included,
    the same for query, key and value. Derivatives of any order, forward and reverse,
    exist in query, key, value, bias, scale, sinks and alibi_slopes.

    A call with the arguments of `jax.nn.dot_product_attention` means what it means
    there, but: a row that sees no key gives 0 (jax.nn: the mean of value, or NaN); the
    residual is float32 and differentiable (jax.nn: cast to key's dtype, no gradient);
    implementations have names of their own; and what has the wrong type or is out of
    its range is an error (docs/differences-from-jax-nn.md lists what jax.nn lets
    pass). NaN or inf in keys and values that no
    row may see has no effect on any result.

    Example:
        >>> import jax, jax.numpy as jnp, jaxflash
        >>> q = jax.random.normal(jax.random.key(0), (2, 128, 8, 64), jnp.bfloat16)
        >>> k, v = q[:, :, :2], q[:, :, 2:4]
        >>> jaxflash.dot_product_attention(q, k, v, is_causal=True).shape
        (2, 128, 8, 64)

    Args:
        query: [*batch, T, N, H], float32, bfloat16, float16; float64 on the reference.
        key: [*batch, S, K, H], in query's dtype.
        value: [*batch, S, K, Hv], in query's dtype.
        bias: broadcastable to [*batch, N, T, S], any float dtype; added to the scaled
            and capped scores. Its gradient has its own shape and dtype.
        mask: bool, broadcastable to [*batch, N, T, S]; True = may attend. All ways of
            hiding a key combine: it is seen where none hides it.
        scale: a Python number or a scalar array, which may be traced; None is
            1 / sqrt(H).
        is_causal: query i sees the keys j <= i + query_offset.
        query_seq_lengths: int32 [*batch], 0 to T; rows from there on give 0.
        key_value_seq_lengths: int32 [*batch], 0 to S; keys from there on are hidden.
        local_window_size: int w for (w, w), or (left, right): query i sees the keys
            from i + query_offset - left to i + query_offset + right. None on a side
            is unlimited.
        query_offset: position of query 0 counted from key 0: a Python int, an int32
            scalar, or int32 [*batch], which may be traced. 0 aligns at the top left
            like jax.nn, S - T at the bottom right like FlashAttention, and decoding
            step t passes t.
        query_segment_ids: int32 [*batch, T]; a query sees the keys of its own segment.
        key_value_segment_ids: int32 [*batch, S].
        softcap: scores become softcap * tanh(scores / softcap); greater than 0.
        sinks: [N], one logit per query head that takes part in the softmax and has no
            value; neither scaled nor capped.
        alibi_slopes: [N] or [*batch, N]; scores lose slope * |i + query_offset - j|.
        dropout_rate: probability from 0 to below 1, rounded to float32, with which an
            attention weight is dropped; the others are divided by 1 - dropout_rate.
        dropout_key: a JAX PRNG key; the same key drops the same weights on every
            backend.
        precision: as in jax.lax, for float32 inputs: None is float32-class accuracy,
            "high" and "default" may trade it for speed. Of a pair, both must be equal.
        deterministic: gradients are the same bits in every run.
        implementation: "cuda" or "cpu" for the compiled kernels, "reference" for plain
            JAX in blocks of keys, or None for the kernels of the platform that the
            call is compiled for. Where those do not serve the call, None takes the
            reference and warns once, naming the argument. Forward mode and second
            derivatives run on the reference in any case.
        return_residual: also return lse.

    Returns:
        The output [*batch, T, N, Hv] in query's dtype; with return_residual=True, a
        pair of it and lse [*batch, T, N]: the natural logarithm of each row's sum of
        exponentials, float32 (float64 for float64 inputs), -inf for a row that sees
        no key.

    Raises:
        ValueError: shapes do not fit together, dtypes are mixed, or a value is out of
            its range, where it is known while the call is traced.
        TypeError: an argument has the wrong type or kind of dtype.
        NotImplementedError: the named implementation does not serve the call, or not
            on this device or platform.

    Sources: FlashAttention (arXiv 2205.14135), FlashAttention-2 (arXiv 2307.08691),
    FlashAttention-3 (arXiv 2407.08608), online softmax (arXiv 1805.02867).
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
            operands[name] = arguments.broadcastable(name, x, full, wide)
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
    left, right = options.window(local_window_size)
    known = implementation is None or isinstance(implementation, str)
    if not known or implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(
            f"implementation must be None or one of {IMPLEMENTATIONS}, got "
            f"{implementation!r}"
        )
    with_lse = options.flag("return_residual", return_residual)
    present = {name: x for name, x in operands.items() if x is not None}
    arguments.one_device_set(present)
    spec = Spec(
        operands=tuple(present),
        is_causal=options.flag("is_causal", is_causal),
        window_left=left,
        window_right=right,
        softcap=options.softcap(softcap),
        dropout_rate=rate,
        precision=options.precision(precision),
        deterministic=options.flag("deterministic", deterministic),
        implementation=implementation,
    )
    selection.check_implementation(spec, tuple(present.values()))
    out, lse = attention_forward(*present.values(), spec=spec)
    return (out, jnp.swapaxes(lse, -1, -2)) if with_lse else out
