"""How the tests judge numbers: one assertion, one tolerance table, one accuracy bar."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle

# Relative to the magnitudes of the terms that are summed into a number. In 16 bits that
# is two roundings of each term: P is rounded in the forward pass, in the backward pass
# dS and in some kernels the P that it is made from. All else is float32.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2.0**-7, "float16": 2.0**-10}
# Relative to the products in a score, which is an exponent: its error is relative in P
# and absolute in lse.
SCORE_TOLERANCE = 2.0**-21
LSE_TOLERANCE = 4e-6


def assert_close(got: Any, want: Any, atol: Any, name: str = "result") -> None:
    """Equal shapes, equal places of nan and inf, and |got - want| <= atol elsewhere."""
    got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
    assert got.shape == want.shape, f"{name}: shape {got.shape}, want {want.shape}"
    finite = np.isfinite(want) & np.isfinite(got)
    same = finite | (got == want) | (np.isnan(got) & np.isnan(want))
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.where(finite, np.abs(got - want), np.where(same, 0.0, np.inf))
        relative = np.where(error > 0, error / np.abs(want), 0.0)
    bad = (error > 0) & ~(error <= atol)  # a tolerance of nan allows nothing
    if not bad.any():
        return
    # The worst place is the one furthest over its own tolerance.
    where = np.unravel_index(np.argmax(error - np.where(bad, atol, np.inf)), want.shape)
    raise AssertionError(
        f"{name}{tuple(map(int, where))}: got {got[where]:.9g}, want {want[where]:.9g}"
        f"\n  max abs error {error.max():.3e}, max rel error {relative.max():.3e}"
        f", allowed {np.broadcast_to(atol, want.shape)[where]:.3e}"
        f"\n  {bad.mean():.2%} of {want.size} elements fail"
    )


def assert_equal(got: Any, want: Any, name: str = "result") -> None:
    """Bit for bit, except that any nan equals any nan."""
    assert got.dtype == want.dtype, f"{name}: dtype {got.dtype}, want {want.dtype}"
    assert_close(got, want, 0.0, name)


def _largest(x: np.ndarray) -> float:
    finite = np.abs(x[np.isfinite(x)])
    return float(finite.max()) if finite.size else 0.0


def _of_terms(call: dict[str, Any], products: np.ndarray) -> float:
    """What the terms of a sum may be off, relative to their magnitudes."""
    dtype = np.asarray(call["query"]).dtype.name
    tolerance = TOLERANCE[dtype] + SCORE_TOLERANCE * _largest(products)
    if call.get("alibi_slopes") is not None:
        # The term of ALiBi and its sum with the product are rounded once each.
        with np.errstate(all="ignore"):
            a = oracle.evaluate(**call)
        slopes = np.abs(np.asarray(call["alibi_slopes"], np.float64))[..., None, None]
        term = _largest(np.where(a.visible, slopes * a.distance, 0.0))
        tolerance += float(jnp.finfo("float32").eps) * term
    return tolerance


def _least(dtype: Any) -> float:
    """What small numbers may be off: steps of float16, or what float32 flushes."""
    step = float(jnp.finfo(dtype).smallest_subnormal)
    return max(step, float(jnp.finfo("float32").smallest_normal))


def _last_rounding(dtype: Any, want: np.ndarray) -> np.ndarray:
    """A unit in the last place of a result."""
    return float(jnp.finfo(dtype).eps) * np.abs(want) + _least(dtype)


def out_tolerance(
    call: dict[str, Any], terms: tuple[np.ndarray, np.ndarray] | None = None
) -> np.ndarray:
    """What each row of out may be off before it is rounded to its dtype.

    terms: oracle.forward_terms(call), where they are there already.
    """
    size, products = terms or oracle.forward_terms(call)
    return _of_terms(call, products) * size.max(-1, keepdims=True)


def _terms(call: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """The terms of out and lse, each weight with what float32 flushes of it."""
    rtol = TOLERANCE[np.asarray(call["query"]).dtype.name]
    least = float(jnp.finfo("float32").smallest_normal) / rtol
    return oracle.forward_terms(call, least=least)


def assert_forward(call: dict[str, Any], out: Any, lse: Any, where: str = "") -> None:
    """Compares out and lse [*batch, T, N] with the oracle, each row by its own size."""
    want_out, want_lse = oracle.forward(call)
    terms = _terms(call)
    dtype = np.asarray(call["query"]).dtype.name
    assert out.dtype == dtype, f"out: dtype {out.dtype}, want {dtype}"
    atol = out_tolerance(call, terms) + _last_rounding(dtype, want_out)
    assert_close(out, want_out, atol, f"out{where}")
    assert lse.dtype == np.float32, f"lse: dtype {lse.dtype}, want float32"
    finite = np.where(np.isfinite(want_lse), np.abs(want_lse), 0.0)
    atol = LSE_TOLERANCE * (1.0 + finite) + SCORE_TOLERANCE * terms[1]
    assert_close(lse, want_lse, atol, f"lse{where}")


def assert_gradients(
    call: dict[str, Any],
    grads: dict[str, Any],
    d_out: Any,
    d_lse: Any = 0.0,
    where: str = "",
) -> None:
    """Compares gradients, given by argument name, with the oracle.

    Every position and head is judged by the terms of its own sums: those of the first
    keys of a causal call are a hundred times those of the last.
    """
    dtype = np.asarray(call["query"]).dtype.name
    rtol = _of_terms(call, oracle.forward_terms(call)[1])
    want = oracle.backward(call, d_out, d_lse)
    least = _least(dtype) / rtol
    size = oracle.backward(call, d_out, d_lse, absolute=True, least=least)
    assert grads, "no gradients given"
    for name, got in grads.items():
        atol = size[name]
        if name in ("query", "key", "value"):
            atol = atol.max(-1, keepdims=True)
        # bias and its gradient may have a dtype of their own.
        unit = _last_rounding(got.dtype, want[name])
        assert_close(got, want[name], rtol * atol + unit, f"d{name}{where}")


def with_low_bits(out: Any, low: Any) -> np.ndarray:
    """What a 16-bit out was rounded from, as far as out_low tells."""
    shift = {"bfloat16": 8, "float16": 5}[np.asarray(out).dtype.name]
    high = np.asarray(out).astype(np.float32).view(np.int32)
    return (high + (np.asarray(low).astype(np.int32) << shift)).view(np.float32)


def jax_nn_attention(*args: Any, implementation: str = "xla", **arguments: Any) -> Any:
    """jax.nn's own function, which does not hold under strict promotion."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return jax.nn.dot_product_attention(
            *args, implementation=implementation, **arguments
        )


def xla_attention(call: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """The dense formula in the dtype of the inputs, as XLA runs it: the yardstick.

    Rows that see no key give 0. lse is [*batch, T, N] in float32.
    """
    missing = {"sinks", "alibi_slopes", "keep"} & call.keys()
    assert not missing, f"the yardstick does not know {missing}"
    q, k, v = call["query"], call["key"], call["value"]
    T, N, H = q.shape[-3:]
    shape = (*q.shape[:-3], N, T, k.shape[-3])
    group = N // k.shape[-2]
    k, v = (jnp.repeat(x, group, axis=-2) for x in (k, v))
    scale = call.get("scale", H**-0.5)
    highest = jax.lax.Precision.HIGHEST
    s = jnp.einsum(
        "...tnh,...snh->...nts",
        q,
        k,
        precision=highest,
        preferred_element_type=jnp.float32,
    )
    s = s * scale
    if call.get("softcap") is not None:
        s = call["softcap"] * jnp.tanh(s / call["softcap"])
    if call.get("bias") is not None:
        s = s + call["bias"].astype(jnp.float32)
    seen = oracle.visible(shape, **call)
    live = seen.any(-1, keepdims=True)
    s = jnp.where(seen | ~live, s, -jnp.inf)
    lse = jax.scipy.special.logsumexp(s, axis=-1, keepdims=True)
    p = jnp.where(live, jnp.exp(s - lse), 0.0).astype(q.dtype)
    out = jnp.einsum("...nts,...snh->...tnh", p, v, precision=highest)
    lse = jnp.where(live, lse, -jnp.inf)[..., 0]
    return out.astype(q.dtype), jnp.swapaxes(lse, -1, -2)


def xla_results(call: dict[str, Any], d_out: Any, d_lse: Any):
    """(out, lse) of the yardstick, and its gradients by name."""

    @jax.jit
    def results(inputs):
        outputs, pullback = jax.vjp(lambda x: xla_attention(call | x), inputs)
        return outputs, pullback((d_out, d_lse))[0]

    return results({name: call[name] for name in ("query", "key", "value")})


def assert_meets_bar(
    got: Any, xla: Any, want: Any, terms: Any, dtype: Any, name: str
) -> None:
    """The accuracy bar: max error <= 2x, mean error <= 1.5x that of XLA's attention.

    On top comes one rounding unit of the output: a unit in the last place of its
    largest element, and for the mean half a unit in that of its mean element. Where the
    `terms` that are summed into the output cancel, the output is no measure of what
    float32 sums can do (XLA's gradient of a one-hot row is exactly 0, since its terms
    are the same two numbers), so that a float32 rounding unit of the terms comes on top
    as well.
    """
    got, xla = (np.asarray(x).astype(np.float64) for x in (got, xla))
    unit, unit32 = (float(jnp.finfo(d).eps) / 2 for d in (dtype, "float32"))
    finite = np.isfinite(want)
    assert_close(got[~finite], want[~finite], 0.0, f"{name} where not finite")
    got, xla, want, terms = (x[finite] for x in (got, xla, want, terms))
    error, xla_error = np.abs(got - want), np.abs(xla - want)
    allowed = 2.0 * xla_error.max(initial=0.0)
    allowed += 2 * unit * 2.0 ** np.floor(np.log2(_largest(want) or 1.0))
    allowed += unit32 * _largest(terms)
    assert_close(got, want, allowed, f"{name} (flattened)")
    allowed = 1.5 * xla_error.mean()
    allowed += unit * np.abs(want).mean() + unit32 * terms.mean()
    assert error.mean() <= allowed, (
        f"{name}: mean error {error.mean():.3e} over {error.size} elements, allowed "
        f"{allowed:.3e}; XLA's mean error is {xla_error.mean():.3e}"
    )
