"""Attention in float64 NumPy, written from the formulas alone.

`forward`, `backward` and `tangent` take the arguments of
`jaxflash.dot_product_attention` as a mapping, so that one `call` feeds both sides of a
test. Everything is dense and [*batch, N, T, S] large: small inputs only.

Dropout needs one argument more, `keep`: bool [*batch, N, T, S], which probabilities
were kept. Arguments that do not change the result (implementation, precision, ...) are
ignored.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

OFFSET_LIMIT = 2**30
DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks", "alibi_slopes", "scale")


class Attention(NamedTuple):
    """One evaluated call; every array is float64 with heads before lengths."""

    q: np.ndarray  # [*batch, N, T, H]
    k: np.ndarray  # [*batch, N, S, H], repeated over the group
    v: np.ndarray  # [*batch, N, S, Hv], likewise
    scale: float
    dots: np.ndarray  # [*batch, N, T, S] q k^T
    cap_slope: np.ndarray  # derivative of the capped by the uncapped score
    distance: np.ndarray  # [*batch, 1, T, S] |i + query_offset - j|
    visible: np.ndarray  # [*batch, N, T, S] bool
    p: np.ndarray  # [*batch, N, T, S] exp(s - lse), 0 where hidden
    p_sink: np.ndarray  # [*batch, N, T] exp(sink - lse), 0 without sinks
    dropout: np.ndarray  # keep / (1 - rate), or 1
    lse: np.ndarray  # [*batch, N, T]

    @property
    def out(self) -> np.ndarray:
        """[*batch, N, T, Hv]."""
        return _weighted_sum(self.p * self.dropout, self.visible, self.v)


def forward(call: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Returns out [*batch, T, N, Hv] and lse [*batch, T, N]."""
    with np.errstate(all="ignore"):
        a = evaluate(**call)
        return _swap(a.out), np.swapaxes(a.lse, -1, -2)


def forward_terms(
    call: dict[str, Any], *, least: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Like forward, but with the magnitudes of what is summed into each number.

    For lse these are the products in the largest score of each row.

    Args:
      call: arguments of the attention.
      least: added to each weight that is not 0, as in `backward`.
    """
    with np.errstate(all="ignore"):
        a = evaluate(**call)
        p = np.where(a.p == 0, 0.0, a.p + least)
        out = _weighted_sum(p * a.dropout, a.visible, np.abs(a.v))
        s = np.where(a.visible, abs(a.scale) * (np.abs(a.q) @ _t(np.abs(a.k))), 0.0)
        return _swap(out), np.swapaxes(np.max(s, -1, initial=0.0), -1, -2)


def backward(
    call: dict[str, Any],
    d_out: Any,
    d_lse: Any = 0.0,
    *,
    absolute: bool = False,
    least: float = 0.0,
) -> dict[str, np.ndarray]:
    """Gradients by name, each in the shape of its argument (scale: a scalar).

    "scale_rows" [*batch, N, T] is what each row adds to that of scale.

    Args:
      call: arguments of the attention.
      d_out: [*batch, T, N, Hv].
      d_lse: [*batch, T, N] or 0.
      absolute: replace every term of every sum by its magnitude. What rounding can do
        to a gradient is a small multiple of this, also where the terms cancel.
      least: with `absolute`, added to each magnitude of P and dS that is not 0, for the
        sake of small numbers, which are rounded to steps that do not shrink with them.
    """
    with np.errstate(all="ignore"):
        a = evaluate(**call)
        q, k, v, dots, out = a.q, a.k, a.v, a.dots, a.out
        d_out = _swap(_f64(d_out))
        d_lse = np.swapaxes(np.broadcast_to(_f64(d_lse), _swap(out).shape[:-1]), -1, -2)
        distance, scale, minus, p = -a.distance, a.scale, -1.0, a.p
        cap_slope = a.cap_slope
        if absolute:
            q, k, v, d_out, d_lse = map(np.abs, (q, k, v, d_out, d_lse))
            dots, out = q @ _t(k), _weighted_sum(p * a.dropout, a.visible, v)
            distance, scale, minus = a.distance, abs(a.scale), 1.0
            p = np.where(p == 0, 0.0, p + least)
            # 1 - tanh^2 is made in float32, whose rounding is finer than that of terms.
            cap_slope = cap_slope + (1.0 - cap_slope) / 8
        delta = np.sum(d_out * out, -1)
        dp = np.where(a.visible, (d_out @ _t(v)) * a.dropout, 0.0)
        ds = p * (dp + (d_lse + minus * delta)[..., None])
        ds = np.where(p == 0, 0.0, ds + least if absolute else ds)
        draw = ds * cap_slope
        dsink_rows = np.where(a.p_sink == 0, 0.0, a.p_sink * (d_lse + minus * delta))
        grads = {
            "query": _swap(scale * _weighted_sum(draw, a.visible, k)),
            "key": scale * _weighted_sum(_t(draw), _t(a.visible), q),
            "value": _weighted_sum(_t(p * a.dropout), _t(a.visible), d_out),
            "scale_rows": np.sum(np.where(draw == 0, 0.0, draw * dots), -1),
        }
        grads["scale"] = np.sum(grads["scale_rows"])
        for name in ("key", "value"):
            grads[name] = _swap(_sum_group(grads[name], call[name].shape[-2]))
        for name, full in (
            ("bias", ds),
            ("alibi_slopes", np.sum(ds * distance, (-1, -2))),
            ("sinks", np.sum(dsink_rows, -1)),
        ):
            if call.get(name) is not None:
                grads[name] = _unbroadcast(full, np.shape(call[name]))
        return grads


def tangent(
    call: dict[str, Any], tangents: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tangents of out and lse, given those of some arguments by name."""
    with np.errstate(all="ignore"):
        a = evaluate(**call)
        group = _group(a.q.shape[-3], call["key"].shape[-2])
        t = {name: _f64(value) for name, value in tangents.items()}
        t_q = _swap(t["query"]) if "query" in t else np.zeros_like(a.q)
        t_k, t_v = (
            np.repeat(_swap(t[name]), group, axis=-3) if name in t else np.zeros_like(x)
            for name, x in (("key", a.k), ("value", a.v))
        )
        t_s = t.get("scale", 0.0) * a.dots + a.scale * (t_q @ _t(a.k) + a.q @ _t(t_k))
        t_s = t_s * a.cap_slope + t.get("bias", 0.0)
        t_s = t_s - t.get("alibi_slopes", np.zeros(1))[..., None, None] * a.distance
        t_s = np.where(a.p == 0, 0.0, t_s)
        t_lse = np.sum(a.p * t_s, -1)
        t_lse = t_lse + a.p_sink * t.get("sinks", np.zeros(1))[..., None]
        t_p = a.p * (t_s - t_lse[..., None])
        t_out = _weighted_sum(t_p * a.dropout, a.visible, a.v)
        t_out = t_out + (a.p * a.dropout) @ t_v
        return _swap(t_out), np.swapaxes(t_lse, -1, -2)


def visible(
    shape: tuple[int, ...],
    *,
    mask: Any = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: Any = None,
    query_offset: Any = 0,
    query_segment_ids: Any = None,
    key_value_segment_ids: Any = None,
    **_: Any,
) -> np.ndarray:
    """Which (i, j) of shape [*batch, N, T, S] may attend."""
    i, j = np.arange(shape[-2])[:, None], np.arange(shape[-1])
    position = i + _offset(query_offset)
    seen = np.broadcast_to(True if mask is None else np.asarray(mask), shape)
    if key_value_seq_lengths is not None:
        seen = seen & (j < _per_batch(key_value_seq_lengths))
    if query_seq_lengths is not None:
        seen = seen & (i < _per_batch(query_seq_lengths))
    window = local_window_size
    left, right = window if isinstance(window, tuple) else (window, window)
    if is_causal:
        right = 0 if right is None else min(right, 0)
    if left is not None:
        seen = seen & (j >= position - left)
    if right is not None:
        seen = seen & (j <= position + right)
    if query_segment_ids is not None:
        q_ids = np.asarray(query_segment_ids)[..., None, :, None]
        seen = seen & (q_ids == np.asarray(key_value_segment_ids)[..., None, None, :])
    return seen


def evaluate(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: Any = None,
    softcap: float | None = None,
    sinks: Any = None,
    alibi_slopes: Any = None,
    query_offset: Any = 0,
    query_seq_lengths: Any = None,
    dropout_rate: float = 0.0,
    keep: Any = None,
    **hiding: Any,
) -> Attention:
    """The formula of `jaxflash.dot_product_attention`, step by step."""
    q, k, v = _swap(_f64(query)), _swap(_f64(key)), _swap(_f64(value))
    group = _group(q.shape[-3], k.shape[-3])
    k, v = np.repeat(k, group, axis=-3), np.repeat(v, group, axis=-3)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    dots = q @ _t(k)
    shape = dots.shape
    s = scale * dots
    cap_slope = np.ones(shape)
    if softcap is not None:
        s = softcap * np.tanh(s / softcap)
        cap_slope = 1.0 - (s / softcap) ** 2
    if bias is not None:
        s = s + _f64(bias)
    i, j = np.arange(shape[-2])[:, None], np.arange(shape[-1])
    distance = np.abs(i + _offset(query_offset) - j).astype(np.float64)
    if alibi_slopes is not None:
        s = s - _f64(alibi_slopes)[..., None, None] * distance
    seen = visible(
        shape,
        mask=mask,
        query_offset=query_offset,
        query_seq_lengths=query_seq_lengths,
        **hiding,
    )
    s = np.where(seen, s, -np.inf)

    sink = np.full(shape[:-1], -np.inf)
    if sinks is not None:
        sink = np.broadcast_to(_f64(sinks)[:, None], shape[:-1])
    if query_seq_lengths is not None:
        padded = np.arange(shape[-2]) >= _per_batch(query_seq_lengths)[..., 0, :]
        sink = np.where(padded, -np.inf, sink)
    top = np.maximum(np.max(s, axis=-1, initial=-np.inf), sink)
    shift = np.where(np.isfinite(top), top, 0.0)
    total = np.sum(np.exp(s - shift[..., None]), axis=-1) + np.exp(sink - shift)
    lse = np.log(total) + shift
    # Not exp(s - lse): beside a bias of -1e38, lse has no room for the logarithm.
    e = np.exp(s - shift[..., None]) / total[..., None]
    p = np.where(seen & (lse > -np.inf)[..., None], e, 0.0)
    p = np.where(seen & np.isnan(lse)[..., None], np.nan, p)
    p_sink = np.where(np.isinf(sink), 0.0, np.exp(sink - shift) / total)
    dropout = np.ones(1) if keep is None else np.asarray(keep) / (1.0 - dropout_rate)
    return Attention(
        q, k, v, scale, dots, cap_slope, distance, seen, p, p_sink, dropout, lse
    )


def _f64(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def _t(x: np.ndarray) -> np.ndarray:
    return np.swapaxes(x, -1, -2)


def _swap(x: np.ndarray) -> np.ndarray:
    """[*batch, length, heads, dim] <-> [*batch, heads, length, dim]."""
    return np.swapaxes(x, -2, -3)


def _per_batch(x: Any) -> np.ndarray:
    return np.asarray(x, np.int64)[..., None, None, None]


def _offset(x: Any) -> np.ndarray:
    return np.clip(_per_batch(x), -OFFSET_LIMIT, OFFSET_LIMIT)


def _weighted_sum(weights: np.ndarray, seen: np.ndarray, rows: np.ndarray):
    """weights @ rows, where an unseen row counts nothing, not even as 0 * nan."""
    finite = np.isfinite(rows)
    total = weights @ np.where(finite, rows, 0.0)
    if finite.all():
        return total
    touched = seen.astype(np.float64) @ (~finite).astype(np.float64) > 0
    return np.where(touched, np.nan, total)


def _group(num_heads: int, num_kv_heads: int) -> int:
    return num_heads // num_kv_heads if num_kv_heads else 1


def _sum_group(x: np.ndarray, num_kv_heads: int) -> np.ndarray:
    """[*batch, N, S, dim] -> [*batch, K, S, dim]."""
    group = _group(x.shape[-3], num_kv_heads)
    shape = (*x.shape[:-3], num_kv_heads, group, *x.shape[-2:])
    return x.reshape(shape).sum(-3)


def _unbroadcast(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sums x over the axes that an array of this shape was broadcast along."""
    x = x.sum(tuple(range(x.ndim - len(shape))))
    axes = tuple(n for n, size in enumerate(shape) if size == 1 and x.shape[n] != 1)
    return x.sum(axes, keepdims=True)
