"""Making inputs of attention, and running them on one implementation."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxflash
from jaxflash.arguments import dropout
from jaxflash.philox import keep_mask
from jaxflash.spec import KERNELS, Spec

QKV = ("query", "key", "value")
# What a backend's table entry has that serves every argument.
EVERYTHING = (
    *("bias", "mask", "query_segment_ids", "sinks", "alibi_slopes", "dropout_seed"),
    *("window", "softcap", "value_head_dim"),
)
KINDS = ("gaussian", "offset_mean", "outlier_channels", "rank_deficient", "one_hot")


def serving(*features: str) -> list[str]:
    """The kernels that serve these: operands, or flags of their table entries."""
    return [
        name
        for name, kernels in KERNELS.items()
        if all(x in kernels.operands or getattr(kernels, x, False) for x in features)
    ]


def make_call(
    T: int = 24,
    S: int | None = None,
    *,
    batch: tuple[int, ...] = (2,),
    N: int = 4,
    K: int | None = None,
    H: int = 16,
    Hv: int | None = None,
    dtype: Any = "float32",
    kind: str = "gaussian",
    seed: int = 0,
    **arguments: Any,
) -> dict[str, Any]:
    """Arguments of attention as a mapping; the arrays are NumPy's."""
    S, K, Hv = (x if x is not None else y for x, y in ((S, T), (K, N), (Hv, H)))
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((*batch, T, N, H))
    k = rng.standard_normal((*batch, S, K, H))
    v = rng.standard_normal((*batch, S, K, Hv))
    if kind == "offset_mean":
        q, k, v = q + 0.5, k - 2.0, v + 3.0
    elif kind == "outlier_channels":
        q[..., :1], k[..., :1], v[..., -1:] = 8 * q[..., :1], 8 * k[..., :1], 50.0
    elif kind == "rank_deficient":
        k = k[..., :1] * rng.standard_normal(H)
    elif kind == "one_hot":
        # Query i is parallel to one key, whose logit leaves all others far behind.
        target = rng.integers(0, S, T)
        q = 6.0 * np.repeat(k[..., target, :, :], N // K, axis=-2)
    arrays = {"query": q, "key": k, "value": v}
    return {name: x.astype(jnp.dtype(dtype)) for name, x in arrays.items()} | arguments


def cotangents(
    call: dict[str, Any], seed: int = 1, *, lse: bool = True
) -> tuple[np.ndarray, Any]:
    """Random (d_out, d_lse) for a call; with lse=False, d_lse is 0."""
    rng = np.random.default_rng(seed)
    shape = (*call["query"].shape[:-1], call["value"].shape[-1])
    d_out = rng.standard_normal(shape).astype(call["query"].dtype)
    d_lse = rng.standard_normal(shape[:-1]).astype(np.float32)
    return d_out, d_lse if lse else np.zeros_like(d_lse)


def with_keep(call: dict[str, Any], seed: Any = None) -> dict[str, Any]:
    """The call and, for the oracle, which weights its dropout keeps.

    seed: that of each batch element; None: those of dropout_key.
    """
    q, S = call["query"], call["key"].shape[-3]
    *batch, T, N, _ = q.shape
    rate = call["dropout_rate"]
    if seed is None:
        rate, seed = dropout(rate, call["dropout_key"], tuple(batch))
    n = jnp.arange(N, dtype=jnp.uint32)[:, None, None]
    i = jnp.arange(T, dtype=jnp.uint32)[:, None]
    n, i = (x.reshape((1,) * (len(batch) + 3 - x.ndim) + x.shape) for x in (n, i))
    rate = Spec(operands=(), dropout_rate=rate).dropout_rate
    keep = keep_mask(
        rate, jnp.asarray(seed)[..., None, None, None, :], n, i, jnp.arange(S)
    )
    return call | {"keep": np.broadcast_to(keep, (*batch, N, T, S))}


def run(call: dict[str, Any], implementation: str | None, **more: Any) -> Any:
    """out and lse [*batch, T, N] of the call, compiled; "keep" is the oracle's."""
    arrays, constants = _split({**call, **more, "implementation": implementation})
    return _forward(arrays, constants)


def run_gradients(
    call: dict[str, Any],
    implementation: str | None,
    d_out: Any,
    d_lse: Any = None,
    wrt: Iterable[str] = QKV,
    **more: Any,
) -> dict[str, jax.Array]:
    """Gradients by name, compiled; without d_lse, lse is not an output at all."""
    arrays, constants = _split({**call, **more, "implementation": implementation})
    inputs = {name: jnp.asarray(arrays.pop(name)) for name in wrt}
    return _gradients(inputs, arrays, d_out, d_lse, constants)


def _split(call: dict[str, Any]) -> tuple[dict[str, Any], tuple]:
    arrays = {
        name: x
        for name, x in call.items()
        if isinstance(x, (np.ndarray, jax.Array)) and name != "keep"
    }
    constants = {name: x for name, x in call.items() if name not in {*arrays, "keep"}}
    return arrays, tuple(sorted(constants.items()))


@functools.partial(jax.jit, static_argnames="constants")
def _forward(arrays, constants):
    return jaxflash.dot_product_attention(
        **arrays, **dict(constants), return_residual=True
    )


@functools.partial(jax.jit, static_argnames="constants")
def _gradients(inputs, arrays, d_out, d_lse, constants):
    def attention(inputs):
        return jaxflash.dot_product_attention(
            **inputs, **arrays, **dict(constants), return_residual=d_lse is not None
        )

    _, pullback = jax.vjp(attention, inputs)
    return pullback(d_out if d_lse is None else (d_out, d_lse))[0]
