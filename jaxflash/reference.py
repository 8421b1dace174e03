"""Attention in plain JAX: the specification that every kernel is held to.

    s   = scale * q k^T                                   float32
    s   = softcap * tanh(s / softcap)
    s  += bias - slope * |i + query_offset - j|
    s   = -inf where (i, j) is hidden
    lse = log(sum_j exp(s) + exp(sink))
    p   = exp(s - lse), dropped and rescaled
    out = p v                                             p rounded to the input dtype

`attention` is this formula on whole arrays, differentiable by JAX to any order.
`forward`, `tangent` and `backward` evaluate it, its derivative and the transpose of
that over blocks of keys with O(T) memory:

    t_s   = d(score)                                      t_lse = sum_j p t_s
    t_out = (p t_s) v - t_lse out + p t_v
    d_s   = p (d_out v^T - delta),  delta = rowsum(d_out out) - d_lse,  d_v = p^T d_out

and the transpose of t_s takes d_s to all other gradients. jax.jvp of tangent and
backward gives exact second derivatives, and so on.

Arrays are in the layout of jaxflash.layout, where all of them broadcast against scores
[*batch, K, G, T, S].
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax

from jaxflash import compat
from jaxflash.layout import Arrays, Call, add_block, fold_keys, sum_to
from jaxflash.philox import keep_mask
from jaxflash.spec import UNLIMITED, Spec, residuals

# Products: scores from rows and keys, rows from scores and keys, keys from scores and
# rows; query keeps its own order of axes.
_QUERY_KEY = "...tkgh,...skh->...kgts"
_ROWS_KEY = "...kgth,...skh->...kgts"
_TO_QUERY = "...kgts,...skh->...tkgh"
_TO_ROWS = "...kgts,...skh->...kgth"
_QUERY_TO_KEY = "...kgts,...tkgh->...skh"
_ROWS_TO_KEY = "...kgts,...kgth->...skh"


def _scores(call: Call, x: Arrays, j: Array) -> tuple[Array, Array, Array | float]:
    """Scores of every query with the keys j, nothing hidden yet.

    Returns:
        The scores, q k^T, and d(scores) / d(scale * q k^T).
    """
    softcap = call.spec.softcap
    product = call.einsum(_QUERY_KEY, x["query"], x["key"])
    s, slope = x["scale"] * product, 1.0
    if softcap:
        capped = jnp.tanh(s / softcap)
        s, slope = softcap * capped, 1 - capped**2
    if "bias" in x:
        s = s + x["bias"]
    if "alibi_slopes" in x:
        s = s - x["alibi_slopes"] * call.distance(x, j)
    return s, product, slope


def _tangent_scores(
    call: Call, x: Arrays, j: Array, product: Array, slope: Array | float
) -> Array:
    """Derivative of the scores in the direction of the t_ arrays."""
    t = jnp.zeros_like(product)
    if "t_query" in x:
        t = t + call.einsum(_QUERY_KEY, x["t_query"], x["key"])
    if "t_key" in x:
        t = t + call.einsum(_QUERY_KEY, x["query"], x["t_key"])
    t = x["scale"] * t
    if "t_scale" in x:
        t = t + x["t_scale"] * product
    t = slope * t
    if "t_bias" in x:
        t = t + x["t_bias"]
    if "t_alibi_slopes" in x:
        t = t - x["t_alibi_slopes"] * call.distance(x, j)
    return t


def _score_gradients(
    call: Call, x: Arrays, j: Array, product: Array, slope: Array | float, d_s: Array
) -> Arrays:
    """The transpose of _tangent_scores, not yet summed over what is shared."""
    grads = {"bias": d_s}
    if "alibi_slopes" in x:
        grads["alibi_slopes"] = -d_s * call.distance(x, j)
    d_s = slope * d_s
    grads["scale"] = d_s * product
    d_s = x["scale"] * d_s
    grads["query"] = call.einsum(_TO_QUERY, d_s, x["key"])
    grads["key"] = call.einsum(_QUERY_TO_KEY, d_s, x["query"])
    return grads


def _hide(call: Call, x: Arrays, j: Array, s: Array) -> Array:
    """s with -inf where (i, j) is hidden and NaN where it is seen and not finite."""
    spec = call.spec
    i, j, distance = call.positions(x, j)
    seen = j >= x.get("first", 0)  # the last block of keys may reach into the previous
    if "mask" in x:
        seen = seen & x["mask"]
    if "key_value_seq_lengths" in x:
        seen = seen & (j < x["key_value_seq_lengths"])
    if "query_seq_lengths" in x:
        seen = seen & (i < x["query_seq_lengths"])
    if spec.is_causal:
        seen = seen & (distance <= 0)
    if spec.window_left != UNLIMITED:
        seen = seen & (distance >= -spec.window_left)
    if spec.window_right != UNLIMITED:
        seen = seen & (distance <= spec.window_right)
    if "query_segment_ids" in x:
        seen = seen & (x["query_segment_ids"] == x["key_value_segment_ids"])
    seen = seen & ~jnp.isneginf(s)  # a bias of -inf hides, too
    return jnp.where(seen, s + x["query_taint"] + x["key_taint"], -jnp.inf)


def _keep(call: Call, x: Arrays, j: Array) -> Array | float:
    """Dropout's factor of each attention weight: 0 or 1 / (1 - rate)."""
    rate = call.spec.dropout_rate
    if not rate:
        return 1.0
    n = jnp.arange(call.num_heads, dtype=jnp.uint32)
    n = n.reshape(*(1,) * len(call.batch), *call.heads, 1, 1)
    i, _, _ = call.positions(x, j)
    keep = keep_mask(rate, x["dropout_seed"], n, i.astype(jnp.uint32), j)
    return jnp.where(keep, 1 / (1 - rate), 0).astype(call.wide)


def _non_finite_values(call: Call, x: Arrays) -> Array:
    """What inf and NaN in value add to out: only to the rows that see them."""

    def step(carry, block, j):
        s = jnp.zeros((*call.rows, j.shape[0]), call.wide) + block.get("bias", 0)
        s = _hide(call, block, j, s)
        seen = jnp.where(jnp.isneginf(s), 0, jnp.ones_like(s))
        v = block["raw_value"]
        return tuple(
            total + call.einsum(_TO_ROWS, seen, bad.astype(call.wide))
            for total, bad in zip(carry, (~(v < jnp.inf), ~(v > -jnp.inf)), strict=True)
        )

    none = jnp.zeros((*call.rows, call.value_dim), call.wide)
    x = {name: lax.stop_gradient(array) for name, array in x.items()}
    none = compat.vary_like(none, x.values())

    def count(x):
        up, down = fold_keys(call, x, step, (none, none))
        return jnp.where(up > 0, jnp.inf, 0) - jnp.where(down > 0, jnp.inf, 0)

    finite = jnp.isfinite(x["raw_value"]).all()
    return lax.cond(finite, lambda x: none, lambda x: count(x).astype(call.wide), x)


def attention(spec: Spec, *operands: Array) -> tuple[Array, Array]:
    """(out, lse [*batch, N, T]): the formula line by line, for plain JAX to derive."""
    call = Call(spec, spec.operands, operands)
    x = call.enter()
    j = jnp.arange(call.kv_len, dtype=jnp.int32)
    s = _hide(call, x, j, _scores(call, x, j)[0])
    sinks = jnp.broadcast_to(x.get("sinks", -jnp.inf), (*call.rows, 1))
    swamped = jnp.isposinf(sinks)
    sinks = jnp.where(swamped, 0, sinks)
    peak = jnp.maximum(s.max(-1, keepdims=True, initial=-jnp.inf), sinks)
    peak = lax.stop_gradient(jnp.where(jnp.isneginf(peak), 0, peak))
    e = jnp.exp(s - peak)
    total = e.sum(-1, keepdims=True) + jnp.exp(sinks - peak)
    empty = total == 0
    total = jnp.where(empty, 1, total)
    out = call.einsum(_TO_ROWS, call.round(e / total * _keep(call, x, j)), x["value"])
    out = jnp.where(swamped, 0, out) + _non_finite_values(call, x)
    lse = jnp.where(swamped, jnp.inf, peak + jnp.log(total))
    lse = jnp.where(empty | call.padded(x), -jnp.inf, lse)
    return call.leave(out, lse)


def forward(spec: Spec, *operands: Array) -> tuple[Array, Array]:
    """(out, lse [*batch, N, T]) by the online softmax over blocks of keys."""
    call = Call(spec, spec.operands, operands)
    x = call.enter()

    def step(carry, block, j):
        row_max, row_sum, acc = carry
        s = _hide(call, block, j, _scores(call, block, j)[0])
        new_max = jnp.maximum(row_max, s.max(-1, keepdims=True, initial=-jnp.inf))
        decay = jnp.exp(jnp.where(row_max == new_max, 0, row_max - new_max))
        p = jnp.exp(s - jnp.where(jnp.isneginf(new_max), 0, new_max))
        row_sum = decay * row_sum + p.sum(-1, keepdims=True)
        acc = decay * acc + call.einsum(
            _TO_ROWS, call.round(p * _keep(call, block, j)), block["value"]
        )
        return new_max, row_sum, acc

    # A sink is one more key that was seen first and has no value.
    row_max = jnp.broadcast_to(x.get("sinks", -jnp.inf), (*call.rows, 1))
    row_max = row_max.astype(call.wide)
    row_sum = jnp.where(jnp.isneginf(row_max), 0, jnp.ones_like(row_max))
    acc = jnp.zeros((*call.rows, call.value_dim), call.wide)
    row_max, row_sum, acc = fold_keys(call, x, step, (row_max, row_sum, acc))
    empty = row_sum == 0
    total = jnp.where(empty, 1, row_sum)
    out = acc / total + _non_finite_values(call, x)
    lse = jnp.where(empty | call.padded(x), -jnp.inf, row_max + jnp.log(total))
    return call.leave(out, lse)


def _weights(s: Array, lse: Array) -> Array:
    """exp(s - lse); 0 where a row sees nothing, or only an infinite sink.

    Rounding of lse is common to a row, so whoever sums these divides by their total,
    and lse is no more than a shift that derivatives need not know of.
    """
    return jnp.exp(s - lax.stop_gradient(jnp.where(jnp.isinf(lse), jnp.inf, lse)))


def _sink_weights(x: Arrays) -> Array:
    sinks = jnp.where(jnp.isinf(x["lse"]), -jnp.inf, x.get("sinks", -jnp.inf))
    return _weights(sinks, x["lse"])


def _total(weights: Array, x: Arrays) -> Array:
    """The sum of a row's weights and its sink's, 1 where there is none."""
    total = weights + _sink_weights(x)
    return jnp.where(total == 0, 1, total)


def tangent(spec: Spec, names: Sequence[str], *arrays: Array) -> tuple[Array, Array]:
    """(t_out, t_lse): the derivative of forward, linear in the tangents.

    Args:
        spec: the call.
        names: the operands that have tangents.
        *arrays: the operands, the residuals, and one tangent per name.
    """
    query = arrays[spec.operands.index("query")]
    t_names = ["t_" + name for name in names]
    names = (*spec.operands, *residuals(query.dtype), *t_names)
    call = Call(spec, names, arrays)
    x = call.enter()

    def step(carry, block, j):
        total, t_lse, out, t_out = carry
        s, product, slope = _scores(call, block, j)
        s = _hide(call, block, j, s)
        t_s = _tangent_scores(call, block, j, product, slope)
        t_s = jnp.where(jnp.isneginf(s), 0, t_s)
        p = _weights(s, block["lse"])
        total = total + p.sum(-1, keepdims=True)
        t_lse = t_lse + (p * t_s).sum(-1, keepdims=True)
        p = p * _keep(call, block, j)
        out = out + call.einsum(_TO_ROWS, p, block["value"])
        t_out = t_out + call.einsum(_TO_ROWS, p * t_s, block["value"])
        if "t_value" in block:
            t_out = t_out + call.einsum(_TO_ROWS, call.round(p), block["t_value"])
        return total, t_lse, out, t_out

    row = jnp.zeros((*call.rows, 1), call.wide)
    rows = jnp.zeros((*call.rows, call.value_dim), call.wide)
    total, t_lse, out, t_out = fold_keys(call, x, step, (row, row, rows, rows))
    total = _total(total, x)
    if "t_sinks" in x:
        t_lse = t_lse + _sink_weights(x) * x["t_sinks"]
    t_lse = t_lse / total
    # out is summed again because the given one is rounded, and the difference cancels.
    t_out = (t_out - t_lse * out) / total
    return call.leave(jnp.where(jnp.isfinite(x["out"]), t_out, jnp.nan), t_lse)


def backward(
    spec: Spec,
    names: Sequence[str],
    wanted: Sequence[str],
    summed: Sequence[Sequence[int]],
    *arrays: Array,
) -> tuple[Array, ...]:
    """The gradients of the wanted operands, the transpose of tangent.

    Args:
        spec: the call.
        names: the operands, the residuals, d_out and perhaps d_lse.
        wanted: the operands whose gradients are returned.
        summed: for each, the batch axes (negative) over which its gradient is summed
            because it is shared; they stay with size 1.
        *arrays: one per name.
    """
    call = Call(spec, names, arrays)
    x = call.enter()
    rank = len(call.batch)
    batches = {
        name: tuple(
            1 if axis - rank in axes else size for axis, size in enumerate(call.batch)
        )
        for name, axes in zip(wanted, summed, strict=True)
    }
    dead = jnp.isinf(x["lse"])
    d_out = jnp.where(dead, 0, x["d_out"])

    def weigh(block, j):
        s, product, slope = _scores(call, block, j)
        s = _hide(call, block, j, s)
        return s, product, slope, _weights(s, block["lse"]), _keep(call, block, j)

    def sum_rows(carry, block, j):
        total, delta, blind = carry
        s, _, _, p, keep = weigh(block, j)
        hidden = jnp.isneginf(s)
        d_p = call.einsum(_ROWS_KEY, d_out, block["value"])
        d_p = jnp.where(hidden, 0, d_p)  # d_out of a blind row may be NaN
        p_sum, p_d_p = (a.sum(-1, keepdims=True) for a in (p, p * keep * d_p))
        blind &= hidden.all(-1, keepdims=True)
        return total + p_sum, delta + p_d_p, blind

    # delta = rowsum(d_out out), but summed from the terms that it must cancel: the
    # given out is rounded. What is not finite in it was left out of the products.
    row = jnp.zeros((*call.rows, 1), call.wide)
    blind = jnp.ones_like(row, bool)
    total, delta, blind = fold_keys(call, x, sum_rows, (row, row, blind))
    d_out = jnp.where(blind, 0, d_out)
    total = _total(total, x)
    finite = jnp.isfinite(x["out"]).all(-1, keepdims=True)
    delta = jnp.where(finite, delta / total, jnp.nan)
    if "d_lse" in x:
        delta = delta - jnp.where(dead, 0, x["d_lse"])

    def step(grads, block, j):
        s, product, slope, p, keep = weigh(block, j)
        # Whatever lse and delta are, hidden keys get nothing of the row.
        hidden = jnp.isneginf(s)
        p = jnp.where(hidden, 0, p / total)
        d_p = call.einsum(_ROWS_KEY, d_out, block["value"])
        d_s = jnp.where(hidden, 0, p * (keep * d_p - delta))
        parts = _score_gradients(call, block, j, product, slope, d_s)
        p = call.round(keep * p)
        parts["value"] = call.einsum(_ROWS_TO_KEY, p, d_out)
        return {
            name: add_block(
                grads[name],
                sum_to(parts[name], batches[name] + block[name].shape[rank:]),
                name,
                j,
            )
            for name in grads
        }

    grads = {
        name: jnp.zeros(batches[name] + x[name].shape[rank:], call.wide)
        for name in wanted
        if name != "sinks"
    }
    grads = fold_keys(call, x, step, grads)
    if "sinks" in wanted:
        shape = batches["sinks"] + x["sinks"].shape[rank:]
        grads["sinks"] = sum_to(-_sink_weights(x) / total * delta, shape)
    return tuple(call.leave_gradient(name, grads[name]) for name in wanted)
