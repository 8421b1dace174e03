"""Dropout: its statistics, and one mask for forward, tangent and backward."""

import fractions
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from calls import QKV, make_call, run, serving, with_keep
from checks import check
from compare import assert_close, assert_equal

from jaxflash import dot_product_attention
from jaxflash.philox import dropout_threshold, philox
from jaxflash.spec import Spec

SERVING = serving("dropout_seed", "value_head_dim")
pytestmark = pytest.mark.implementations("reference", *SERVING)

RATE = 0.3


def make(T=20, S=24, seed=0, **arguments):
    call = make_call(T, S, N=4, K=2, H=8, **arguments)
    return call | {"dropout_rate": RATE, "dropout_key": jax.random.key(seed)}


def kept(call, implementation):
    """Which probabilities were kept [*batch, N, T, S], seen through a unit value."""
    S = call["key"].shape[-3]
    unit = np.broadcast_to(np.eye(S)[:, None], (*call["key"].shape[:-1], S))
    plain = {"query", "key", "dropout_rate", "dropout_key"}
    probe = {name: x for name, x in call.items() if name in plain}
    probe = probe | {"value": unit.astype(call["key"].dtype), "scale": 0.0}
    out, _ = run(probe, implementation)
    return np.swapaxes(np.asarray(out) != 0, -2, -3)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([2**32 - 1] * 4, [2**32 - 1] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_published_words(counter, key, words):
    # Known answers of the Random123 distribution.
    counter, key = (tuple(map(jnp.uint32, x)) for x in (counter, key))
    assert " ".join(f"{int(word):08x}" for word in philox(key, counter)) == words


def test_dropout_keeps_the_promised_share(implementation):
    keep = kept(make(T=100, S=120), implementation)
    n = keep.size
    deviation = np.sqrt(RATE * (1 - RATE) / n)
    assert abs(keep.mean() - (1 - RATE)) < 4 * deviation
    # Every batch element, head, row and column draws its own bits.
    for axis in range(4):
        others = tuple(a for a in range(4) if a != axis)
        share = keep.mean(others)
        bound = 5 * deviation * np.sqrt(keep.shape[axis])
        assert np.all(np.abs(share - (1 - RATE)) < bound), axis
        moved = np.moveaxis(keep, axis, 0)
        agree = np.mean(moved[1:] == moved[:-1])
        assert abs(agree - (RATE**2 + (1 - RATE) ** 2)) < 6 * deviation, axis


def test_dropout_matches_the_oracle(implementation, dtype):
    check(make(dtype=dtype, is_causal=True, query_offset=4), implementation)


def test_dropout_of_many_blocks(implementation, dtype):
    call = make(150, 310, dtype=dtype, scale=np.array(0.2, np.float32))
    call["query_seq_lengths"] = np.array([150, 99], np.int32)
    check(call | {"local_window_size": (200, 90), "query_offset": 100}, implementation)


# Rates whose thresholds are rounded, and the ends of what float32 can say.
RATES = [0.1, 1 / 3, 0.5, 0.9, 2.0**-11 + 2.0**-33, 2.0**-33, 1e-30, 1 - 2.0**-24]


@pytest.mark.parametrize("rate", [1 / 3, 2.0**-11 + 2.0**-33, 0.999999999])
def test_the_same_weights_are_dropped_everywhere(implementation, rate):
    call = make(130, 250) | {"dropout_rate": rate}
    got = kept(call, implementation)
    np.testing.assert_array_equal(got, with_keep(call)["keep"])


@pytest.mark.parametrize("rate", [*RATES, 0.999999999])
def test_the_threshold_is_that_of_float32(rate):
    rate = np.float32(min(rate, 1 - 2.0**-24))
    exact = fractions.Fraction(float(rate)) * 2**32
    rounded = math.floor(exact + fractions.Fraction(1, 2))
    spec = Spec(operands=("query",), dropout_rate=float(rate))
    assert dropout_threshold(spec.dropout_rate) == min(rounded, 2**32 - 1)


def test_lse_ignores_dropout(implementation):
    call = make()
    _, lse = run(call, implementation)
    _, want = run({name: call[name] for name in QKV}, implementation)
    assert_equal(lse, want)


def test_dropout_tangent_uses_the_same_mask(implementation):
    call = make()
    rng = np.random.default_rng(4)
    tangents = {
        name: rng.standard_normal(call[name].shape).astype(np.float32) for name in QKV
    }

    def attention(inputs):
        return dot_product_attention(
            **(call | inputs), implementation=implementation, return_residual=True
        )

    inputs = {name: call[name] for name in QKV}
    got = jax.jit(lambda x, t: jax.jvp(attention, (x,), (t,)))(inputs, tangents)[1]
    want = oracle.tangent(with_keep(call), tangents)
    for name, t, w in zip(("t_out", "t_lse"), got, want, strict=True):
        assert_close(t, w, 2e-5 * np.abs(w).max(), name)


def test_dropout_rate_zero_needs_no_key(implementation):
    call = make_call()
    got = run(call | {"dropout_rate": 0.0}, implementation)
    for a, b in zip(got, run(call, implementation), strict=True):
        assert_equal(a, b)


def test_keys_decide_the_mask(implementation):
    first, again, other = (kept(make(seed=seed), implementation) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert 0.3 < np.mean(first != other) < 0.6


def test_raw_and_typed_keys_agree(implementation):
    call = make()
    raw = call | {"dropout_key": jax.random.key_data(call["dropout_key"])}
    for a, b in zip(run(call, implementation), run(raw, implementation), strict=True):
        assert_equal(a, b)


def test_vmap_over_keys_equals_a_loop(implementation):
    call = make()
    keys = jax.random.split(jax.random.key(3), 3)

    def attention(key):
        arguments = call | {"dropout_key": key, "implementation": implementation}
        return dot_product_attention(**arguments)

    got = jax.jit(jax.vmap(attention))(keys)
    assert_close(got, np.stack([attention(key) for key in keys]), 1e-6)
    assert not np.array_equal(got[0], got[1])


def test_vmap_of_examples_under_one_key_equals_a_loop(implementation):
    call = make()
    queries = np.stack([call["query"], 2 * call["query"]])

    def attention(query):
        arguments = call | {"query": query, "implementation": implementation}
        return dot_product_attention(**arguments)

    got = jax.jit(jax.vmap(attention))(queries)
    assert_close(got, np.stack([attention(q) for q in queries]), 1e-6)
