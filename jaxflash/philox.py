"""Dropout's random bits: Philox4x32-10, so that every backend drops the same weights.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011). The
key is the batch element's seed, the counter is (j // 4, i, n, 0) and weight (n, i, j)
reads word j % 4.
"""

import jax.numpy as jnp
from jax import Array, lax

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def _multiply(a: int, b: Array) -> tuple[Array, Array]:
    """High and low word of a 32 x 32 bit product, without 64-bit integers."""
    half, low_half = jnp.uint32(16), jnp.uint32(0xFFFF)
    a_high, a_low = jnp.uint32(a >> 16), jnp.uint32(a & 0xFFFF)
    b_high, b_low = b >> half, b & low_half
    cross = a_high * b_low + (a_low * b_low >> half)
    middle = a_low * b_high + (cross & low_half)
    return a_high * b_high + (cross >> half) + (middle >> half), jnp.uint32(a) * b


def philox(key: tuple[Array, Array], counter: tuple[Array, ...]) -> tuple[Array, ...]:
    """Four words of random bits; key and counter are uint32 and broadcast."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k + jnp.uint32(s) for k, s in zip((k0, k1), _KEY_STEPS, strict=True))
    return c0, c1, c2, c3


def keep_mask(rate: float, seed: Array, n: Array, i: Array, j: Array) -> Array:
    """True where the attention weight (n, i, j) survives dropout.

    Args:
        rate: probability of dropping a weight, as float32 holds it.
        seed: uint32 [..., 2].
        n: query heads, uint32, broadcastable to [..., T, S] like i.
        i: query positions, uint32.
        j: consecutive key positions, int32 [S].
    """
    size = j.shape[0]
    if size == 0:
        return jnp.ones((1,) * n.ndim, bool)
    quads = (j[0] // 4 + jnp.arange(size // 4 + 2, dtype=jnp.int32)).astype(jnp.uint32)
    quads = quads.reshape((1,) * (n.ndim - 1) + quads.shape)
    words = philox((seed[..., 0], seed[..., 1]), (quads, i, n, jnp.zeros_like(n)))
    words = jnp.stack(jnp.broadcast_arrays(*words), axis=-1)
    words = words.reshape(*words.shape[:-2], 4 * words.shape[-2])
    words = lax.dynamic_slice_in_dim(words, j[0] % 4, size, axis=-1)
    return words >= jnp.uint32(dropout_threshold(rate))


def dropout_threshold(rate: float) -> int:
    """A weight is kept if its word is no less; csrc/formula/dropout.h rounds so too."""
    return min(int(rate * 2**32 + 0.5), 2**32 - 1)
