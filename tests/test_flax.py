"""The adapter inside Flax's own layers, nnx and linen, against Flax's attention."""

from __future__ import annotations

import functools
import inspect
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

from flax import linen, nnx

from jaxflash.flax import attention_fn, causal_attention_fn

B, T, N, WIDTH = 2, 12, 4, 32
TOLERANCE = {"float32": 2e-5, "float16": 4e-3}


@pytest.fixture(autouse=True)
def _promotion_as_flax_needs_it():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def reference(**bound: Any) -> Any:
    """The adapter on the backend that takes every argument, so without warnings."""
    return functools.partial(attention_fn, implementation="reference", **bound)


def inputs(seed=0, length=T):
    return jax.random.normal(jax.random.key(seed), (B, length, WIDTH))


def nnx_layer(fn, **options: Any) -> Any:
    options = {"decode": False, "rngs": nnx.Rngs(0), **options}
    return nnx.MultiHeadAttention(N, WIDTH, attention_fn=fn, **options)


def linen_layer(fn, x, **options: Any) -> Any:
    """The layer as a function; parameters are the same for every `fn`."""
    layer = linen.MultiHeadDotProductAttention(N, attention_fn=fn, **options)
    plain = linen.MultiHeadDotProductAttention(N)
    variables = plain.init(jax.random.key(0), x)
    return functools.partial(layer.apply, variables)


def padding_mask():
    """[B, 1, 1, T] float, as Flax's helpers make it: 7 and 12 visible keys."""
    visible = jnp.arange(T) < jnp.array([[7], [12]])
    return linen.make_attention_mask(jnp.ones((B, T), bool), visible)


MASKS = {
    "none": lambda: None,
    "float_causal": lambda: linen.make_causal_mask(jnp.ones((B, T))),
    "float_padding": padding_mask,
    "bool_per_head": lambda: (
        jax.random.bernoulli(jax.random.key(3), 0.5, (B, N, T, T))
        | jnp.eye(T, dtype=bool)
    ),
}


@pytest.mark.parametrize("mask", MASKS)
def test_nnx_layer_equals_flax(mask):
    x, mask = inputs(), MASKS[mask]()
    ours, theirs = nnx_layer(reference()), nnx_layer(nnx.dot_product_attention)

    def loss(layer, x):
        return jnp.sum(jnp.sin(layer(x, mask=mask)))

    np.testing.assert_allclose(ours(x, mask=mask), theirs(x, mask=mask), atol=2e-5)
    gradients = [nnx.grad(loss)(layer, x) for layer in (ours, theirs)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), *gradients)


@pytest.mark.parametrize("mask", MASKS)
def test_linen_layer_equals_flax(mask):
    x, mask = inputs(), MASKS[mask]()
    ours = linen_layer(reference(), x)
    theirs = linen_layer(linen.dot_product_attention, x)
    np.testing.assert_allclose(ours(x, mask=mask), theirs(x, mask=mask), atol=2e-5)


@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_mask_matters(api):
    x = inputs()
    layer = nnx_layer(reference()) if api == "nnx" else linen_layer(reference(), x)
    free, masked = layer(x), layer(x, mask=padding_mask())
    assert jnp.abs(free - masked)[0].max() > 1e-2
    np.testing.assert_allclose(free[1], masked[1], atol=1e-6)
    # What the first sequence hides, it does not see.
    changed = layer(x.at[0, 7:].set(5.0), mask=padding_mask())
    np.testing.assert_allclose(changed[0, :7], masked[0, :7], atol=1e-6)


def test_is_causal_of_nnx_reaches_the_kernels(implementation, working_dtype):
    """A kernel refuses a mask array, so none may arise on the way."""
    x = inputs().astype(working_dtype)
    fn = functools.partial(attention_fn, implementation=implementation)
    ours = nnx_layer(fn, dtype=working_dtype)
    theirs = nnx_layer(nnx.dot_product_attention, dtype=working_dtype)
    np.testing.assert_allclose(
        ours(x, is_causal=True),
        theirs(x, is_causal=True),
        atol=TOLERANCE[working_dtype],
    )


@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_causal_attention_fn_needs_no_mask(api):
    x = inputs()
    if api == "nnx":
        layer = nnx_layer(causal_attention_fn)
        expected = nnx_layer(nnx.dot_product_attention)(x, is_causal=True)
    else:
        layer = linen_layer(causal_attention_fn, x)
        mask = linen.make_causal_mask(jnp.ones((B, T)))
        expected = linen_layer(linen.dot_product_attention, x)(x, mask=mask)
    np.testing.assert_allclose(layer(x), expected, atol=2e-5)


def test_bound_is_causal_works_in_linen():
    x = inputs()
    layer = linen_layer(functools.partial(attention_fn, is_causal=True), x)
    np.testing.assert_allclose(
        layer(x), linen_layer(causal_attention_fn, x)(x), atol=1e-6
    )


def test_nnx_decoding_equals_the_whole_sequence():
    x = inputs()
    fn = reference(always_causal=True)
    expected = nnx_layer(fn)(x)
    layer = nnx_layer(fn, decode=True)
    layer.init_cache(x.shape)
    steps = [layer(x[:, t : t + 1]) for t in range(T)]
    np.testing.assert_allclose(jnp.concatenate(steps, 1), expected, atol=2e-5)


def test_grouped_heads():
    x = inputs()
    ours = nnx_layer(reference(), num_kv_heads=2)
    theirs = nnx_layer(nnx.dot_product_attention, num_kv_heads=2)
    np.testing.assert_allclose(ours(x), theirs(x), atol=2e-5)


def test_always_causal_refuses_lengths_that_say_nothing():
    layer = nnx_layer(causal_attention_fn)
    with pytest.raises(ValueError, match=r"always_causal .* T = 5 and S = 12"):
        layer(inputs(length=5), inputs())
    with pytest.raises(ValueError, match=r"always_causal .* mask None"):
        layer(inputs(length=1), inputs())


def test_dropout_is_drawn_from_the_key_and_off_when_deterministic():
    x = inputs()
    options = {"dropout_rate": 0.5, "broadcast_dropout": False}
    layer = nnx_layer(reference(), **options, deterministic=False)
    a, b, c = (layer(x, rngs=nnx.Rngs(dropout=seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(a, b)
    assert jnp.abs(a - c).max() > 1e-2
    quiet = layer(x, deterministic=True)
    np.testing.assert_allclose(quiet, nnx_layer(reference())(x), atol=1e-6)
    drawn = linen_layer(reference(), x, **options, deterministic=False)
    a, b = (drawn(x, rngs={"dropout": jax.random.key(seed)}) for seed in (1, 2))
    assert jnp.abs(a - b).max() > 1e-2


def test_dropout_keeps_the_mean():
    query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 8, 2, 16))
    run = jax.vmap(
        lambda rng: attention_fn(
            query, key, value, dropout_rng=rng, dropout_rate=0.25,
            broadcast_dropout=False, implementation="reference",
        )
    )  # fmt: skip
    mean = run(jax.random.split(jax.random.key(1), 2000)).mean(0)
    expected = attention_fn(query, key, value, implementation="reference")
    np.testing.assert_allclose(mean, expected, atol=0.08)


@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_attention_weights_are_refused(api):
    x = inputs()
    layer = nnx_layer(reference()) if api == "nnx" else linen_layer(reference(), x)
    with pytest.raises(NotImplementedError, match=r"module must be None.*sow_weights"):
        layer(x, sow_weights=True)


@pytest.mark.parametrize(
    "name",
    ["input_positions", "qk_attn_weights_einsum", "attn_weights_value_einsum"],
)
def test_arguments_without_a_meaning_here_are_refused(name):
    x = jnp.ones((1, 4, 2, 8))
    argument: Any = {name: jnp.arange(4)}
    with pytest.raises(NotImplementedError, match=f"{name} must be None"):
        attention_fn(x, x, x, **argument)


def test_dropout_errors_name_the_remedy():
    x = jnp.ones((1, 4, 2, 8))
    key = jax.random.key(0)
    with pytest.raises(NotImplementedError, match="broadcast_dropout=False"):
        attention_fn(x, x, x, dropout_rng=key, dropout_rate=0.1)
    with pytest.raises(ValueError, match="dropout_rng must be a PRNG key"):
        attention_fn(x, x, x, dropout_rate=0.1, broadcast_dropout=False)


def test_dtypes_are_promoted_as_in_flax():
    x = jax.random.normal(jax.random.key(0), (1, 4, 2, 8))
    low = x.astype(jnp.bfloat16)
    fn = reference()
    assert fn(low, x, low).dtype == jnp.float32
    assert fn(x, x, x, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="floating point, got int32"):
        fn(*(x.astype(jnp.int32),) * 3)


@pytest.mark.parametrize(
    ("theirs", "meaningless"),
    [
        (nnx.dot_product_attention, {"promote_dtype"}),
        # The softmax is float32 here, and the products are the kernel's.
        (
            linen.dot_product_attention,
            {"force_fp32_for_softmax", "einsum_dot_general"},
        ),
    ],
    ids=["nnx", "linen"],
)
def test_every_parameter_of_flax_is_named(theirs, meaningless):
    """linen drops the keywords that the signature does not name, without a word."""
    named = set(inspect.signature(causal_attention_fn).parameters)
    assert set(inspect.signature(theirs).parameters) - meaningless <= named


def test_jaxflash_does_not_import_flax():
    code = "import sys, jaxflash, jaxflash.flax; sys.exit('flax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
