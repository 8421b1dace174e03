"""Everyone computes the same before anyone is timed.

Two comparisons, of every output and gradient of the case:
1. the last head group of the last batch element against dense float32 attention on the
   same rounded inputs, at the highest matmul precision;
2. whole arrays against the first implementation that passed 1, in the same dtype.
An implementation that fails either is reported and not timed.
"""

import functools

import jax
import jax.numpy as jnp

from jaxflash.benchmark.cases import Case
from jaxflash.benchmark.programs import NAMES

# (rms error / rms, max error / max) that counts as the same result. Gaussian inputs of
# long sequences average out, so that the rms is the sharper of the two: a kernel that
# forgets one key in a thousand misses it by three percent.
TOLERANCE = {
    "float32": (2e-4, 2e-3),
    "float16": (4e-3, 2e-2),
    "bfloat16": (2e-2, 6e-2),
}


class DenseSlice:
    """The last key/value head of the last batch element, dense and in float32."""

    def __init__(self, case: Case):
        """Compiles; takes the inputs of the case in `__call__`."""
        self.case = case
        group = case.num_heads // case.num_kv_heads
        query, key = (
            jax.ShapeDtypeStruct((1, length, heads, case.head_dim), jnp.float32)
            for length, heads in ((case.q_len, group), (case.kv_len, 1))
        )
        attention = functools.partial(
            jax.nn.dot_product_attention, is_causal=case.is_causal, implementation="xla"
        )

        def run(query, key, value, d_out):
            if case.direction == "forward":
                return (attention(query, key, value),)
            out, vjp = jax.vjp(attention, query, key, value)
            return (out, *vjp(d_out)) if case.direction == "both" else vjp(d_out)

        with jax.default_matmul_precision("highest"):
            self._compiled = jax.jit(run).lower(query, key, key, query).compile()

    def __call__(self, inputs) -> dict[str, jax.Array]:
        """Results by name."""
        args = [
            _last_head(name, inputs[name], self.case).astype(jnp.float32)
            for name in ("query", "key", "value", "d_out")
        ]
        names = NAMES[self.case.direction]
        return dict(zip(names, self._compiled(*args), strict=True))


def _last_head(name: str, x: jax.Array, case: Case) -> jax.Array:
    of_keys = name in ("key", "value", "dk", "dv")
    heads = 1 if of_keys else case.num_heads // case.num_kv_heads
    return x[-1:, :, -heads:]


@jax.jit
def _deviation(got, want):
    """(rms error / rms, max error / max); NaN where anything is NaN."""
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    error = got - want
    rms = jnp.sqrt(jnp.mean(error**2) / jnp.mean(want**2))
    return rms, jnp.max(jnp.abs(error)) / jnp.max(jnp.abs(want))


def deviations(got, want) -> dict[str, tuple[float, float]]:
    """Deviation of each array by name."""
    return {
        name: tuple(float(x) for x in _deviation(got[name], want[name]))
        for name in want
    }  # pyright: ignore[reportReturnType]


def disagreement(case: Case, found: dict[str, tuple[float, float]]) -> str | None:
    """The first array that is out of tolerance, in words; None if all agree."""
    rms_limit, max_limit = TOLERANCE[case.dtype]
    for name, (rms, largest) in found.items():
        # Negated, so that NaN fails.
        if not (rms <= rms_limit and largest <= max_limit):
            return (
                f"{name} is off by {rms:.1e} rms, {largest:.1e} max (relative); "
                f"allowed {rms_limit:.0e} and {max_limit:.0e}"
            )
    return None


def check(case: Case, arrays, truth, anchor) -> tuple[dict, str | None]:
    """Both comparisons of one implementation.

    Args:
      case: what was computed.
      arrays: its results by name.
      truth: what `DenseSlice` of the case gives.
      anchor: results of an implementation that passed, or None.

    Returns:
      The largest deviations by array name, and the disagreement in words or None.
    """
    found = deviations(
        {name: _last_head(name, arrays[name], case) for name in truth}, truth
    )
    problem = disagreement(case, found)
    if problem:
        return found, f"against dense float32 attention, {problem}"
    if anchor is not None:
        against = deviations(arrays, anchor)
        found = {n: tuple(map(max, found[n], against[n])) for n in found}
        problem = disagreement(case, against)
        if problem:
            return found, f"against the other implementations, {problem}"
    return found, None
