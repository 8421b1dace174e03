"""Bias and its gradient, on the implementations that serve it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import KINDS, QKV, cotangents, make_call, run, run_gradients, serving
from checks import check, check_bar, check_no_effect, check_reaches_only
from compare import assert_close, assert_equal, assert_gradients

from jaxflash import dot_product_attention, ffi
from jaxflash.spec import CORE_AXES

SERVING = serving("bias")
pytestmark = pytest.mark.implementations("reference", *SERVING)

B, N, T, S = 2, 4, 19, 23
SHAPES = [
    *((B, N, T, S), (1, N, T, S), (B, 1, T, S), (1, 1, T, S), (B, N, 1, S)),
    *((B, 1, 1, S), (1, N, T, 1), (B, N, 1, 1), (1, N, 1, S), (T, S), (T, 1)),
    (1, 1),
]


def random_bias(*shape, dtype="float32", seed=5):
    x = np.random.default_rng(seed).standard_normal(shape)
    return x.astype(jnp.dtype(dtype))


def make(T=T, S=S, dtype="float32", bias=None, **arguments):
    bias = random_bias(1, 1, T, S) if bias is None else bias
    return make_call(T, S, N=N, K=2, dtype=dtype, bias=bias, **arguments)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape(implementation, shape):
    check(make(bias=random_bias(*shape)), implementation)


@pytest.mark.parametrize("bias_dtype", ["float32", "bfloat16", "float16"])
def test_dtype_of_its_own(implementation, dtype, bias_dtype):
    call = make(40, 50, dtype, random_bias(1, N, 40, 50, dtype=bias_dtype))
    cts = cotangents(call)
    grad = run_gradients(call, implementation, *cts, ["bias"])["bias"]
    assert grad.dtype == bias_dtype
    check(call, implementation)


# Several tiles of dbias, and of what is summed into one.
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (B, 1, 0, 1), (1, 1, 1, 0), (0, 0)])
def test_many_blocks(implementation, dtype, shape):
    T, S = 301, 199
    full = (B, N, T, S)[-len(shape) :]
    shape = tuple(own or size for own, size in zip(shape, full, strict=True))
    call = make(T, S, dtype, random_bias(*shape), is_causal=True)
    check(call | {"query_offset": 20}, implementation)


def test_more_heads_than_rows_of_a_tile(implementation, working_dtype):
    call = make_call(3, 5, N=700, K=1, H=4, dtype=working_dtype)
    check(call | {"bias": random_bias(700, 1, 5)}, implementation)


def test_with_everything_that_hides(implementation, dtype):
    call = make(150, 140, dtype, random_bias(B, 1, 150, 140))
    call["mask"] = np.random.default_rng(1).random((1, N, 1, 140)) < 0.7
    call["local_window_size"] = (60, 20)
    call["query_offset"] = np.array([3, -40], np.int32)
    call["query_seq_lengths"] = np.array([150, 77], np.int32)
    call["key_value_seq_lengths"] = np.array([100, 140], np.int32)
    check(call, implementation)


def test_infinite_bias_is_a_mask(implementation, dtype):
    mask = np.random.default_rng(1).random((B, 1, 90, 130)) < 0.4
    mask[0, :, 30:50] = mask[1, :, :, :64] = False
    call = make(90, 130, dtype)
    hiding = np.where(mask, call["bias"], np.float32(-np.inf))
    results = []
    for arguments in ({"bias": hiding}, {"mask": mask}):
        cts = cotangents(call)
        grads = run_gradients(call | arguments, implementation, *cts)
        results.append((*run(call | arguments, implementation), *grads.values()))
    for got, want in zip(*results, strict=True):
        assert_equal(got, want)
    check(call | {"bias": hiding}, implementation)


@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_garbage_behind_infinite_bias_has_no_effect(implementation, dtype, garbage):
    bias = random_bias(1, 1, 70, 200)
    bias[..., ::3] = bias[..., 5, :] = -np.inf
    call = make(70, 200, dtype, bias)
    dirty = {name: call[name].copy() for name in QKV}
    dirty["query"][:, 5] = garbage
    for name in ("key", "value"):
        dirty[name][:, ::3] = garbage
    check_no_effect(call, dirty, implementation)


def test_nan_reaches_only_the_rows_that_see_it(implementation, dtype):
    bias = random_bias(B, 1, 140, 140)
    bias[1, 0, 10:100, 24] = -np.inf
    call = make(140, 140, dtype, bias)
    dirty = {name: call[name].copy() for name in ("key", "value")}
    for x in dirty.values():
        x[1, 24, 0, 3] = np.nan
    touched = np.zeros((B, 140, N), bool)
    touched[1, np.r_[:10, 100:140], :2] = True
    check_reaches_only(call, dirty, touched, implementation)


# Of lse, a float32, such a bias leaves no bits for the number of keys, and of scores
# none for the products, but for the smallest of these: there they are 0.
@pytest.mark.parametrize("low", [np.finfo(np.float32).min, -1e9, -1e5])
def test_a_low_finite_bias_is_no_mask(implementation, dtype, low):
    call = make(70, 150, dtype, np.zeros((B, 1, 70, 150), np.float32))
    call["bias"][:, :, 20:40] = low
    call["bias"][:, :, 40:, :64] = low
    call["scale"] = np.array(0.0 if low > -1e30 else 0.2, np.float32)
    out, _ = run(call, implementation)
    mean = call["value"].astype(np.float64).mean(1, keepdims=True).repeat(2, axis=2)
    want = np.broadcast_to(mean, (B, 20, *mean.shape[2:]))
    assert_close(np.asarray(out)[:, 20:40], want, 2.0**-8)
    check(call, implementation)


def test_nothing_is_as_large_as_the_scores(implementation):
    names = ("query", "key", "value", "bias", "out", "lse", "d_out")
    sizes = {"T": T, "S": S, "N": N, "K": 2, "H": 8, "V": 8}
    for shape, summed, want in [
        ((1, N, T, S), (-1,), (1, N, T, S)),
        ((N, T, S), (-1,), (1, N, T, S)),
        ((B, 1, 1, S), (), (B, 1, 1, S)),
        ((1, 1), (-1,), (1, 1, 1, 1)),
    ]:
        avals = [
            jax.ShapeDtypeStruct((B, *(sizes[x] for x in CORE_AXES[name])), "bfloat16")
            for name in names
        ]
        shape = (1,) * (3 - len(shape)) + shape
        avals[3] = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        ((name, aval),) = ffi.kernel_gradients(names, avals, ["bias"], [summed])
        assert (name, aval.shape, aval.dtype) == ("dbias", want, jnp.float32)


def test_vmap_over_what_shares_a_bias(implementation):
    call = make(bias=random_bias(N, T, S))
    d_out, _ = cotangents(call)
    queries = np.stack([call["query"], 2 * call["query"]])

    def grads(query):
        def attention(bias):
            arguments = call | {"query": query, "bias": bias}
            return dot_product_attention(**arguments, implementation=implementation)

        return jax.vjp(attention, call["bias"])[1](d_out)[0]

    got = jax.jit(jax.vmap(grads))(queries)
    for one, query in zip(got, queries, strict=True):
        assert_gradients(call | {"query": query}, {"bias": one}, d_out)


@pytest.mark.implementations(*SERVING)
def test_more_alternating_batch_axes_than_the_kernels_walk(implementation):
    call = make_call(3, 4, batch=(2,) * 7, N=2, H=4)
    call["bias"] = random_bias(1, 2, 1, 2, 1, 2, 1, 2, 3, 4)
    check(call, implementation)


@pytest.mark.implementations(*SERVING)
@pytest.mark.parametrize("kind", KINDS)
def test_a_bias_meets_the_accuracy_bar(implementation, dtype, kind):
    call = make_call(208, K=2, H=64, dtype=dtype, kind=kind, seed=3)
    bias = random_bias(1, 4, 208, 208)
    bias[..., 30:60] = -np.inf
    check_bar(call | {"bias": bias}, implementation, dtype)


# The kernels get it in float32; the gradient has the dtype that came.
def test_dtypes_of_no_query(implementation, working_dtype):
    call = make_call(T, S, N=N, K=2, dtype=working_dtype)
    call["bias"] = jnp.asarray(random_bias(N, 1, S), jnp.float8_e4m3fn)
    wide = call | {"bias": call["bias"].astype(jnp.float32)}
    cts = cotangents(call)
    got, want = (
        run_gradients(c, implementation, *cts, ("bias",)) for c in (call, wide)
    )
    assert got["bias"].dtype == jnp.float8_e4m3fn
    assert_equal(got["bias"], want["bias"].astype(jnp.float8_e4m3fn), "dbias")
    for a, b in zip(run(call, implementation), run(wide, implementation), strict=True):
        assert_equal(a, b)


# Rows and keys there are, but nothing that shares the bias.
@pytest.mark.parametrize("batch", [(3, 0), (0, 3)])
def test_gradient_over_an_empty_batch_axis(implementation, working_dtype, batch):
    call = make_call(5, 6, batch=batch, N=2, H=8, dtype=working_dtype)
    shared = tuple(max(size, 1) for size in batch)
    call["bias"] = np.ones((*shared, 2, 5, 6), np.float32)
    grads = run_gradients(call, implementation, *cotangents(call), ("bias",))
    assert grads["bias"].shape == call["bias"].shape
    assert not np.asarray(grads["bias"]).any()
