"""Sequences packed in one array, against a loop over the sequences."""

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import make_call, serving
from compare import assert_close, assert_equal

import jaxflash
from jaxflash import dot_product_attention, flash_attention_varlen

SERVING = serving("query_segment_ids")
pytestmark = pytest.mark.implementations("reference", *SERVING)

ENDS = np.array([0, 40, 40, 41, 130], np.int32)
TOTAL = 140  # ten rows of padding


def packed(dtype="float32", total=TOTAL, **arguments):
    call = make_call(total, batch=(), N=4, K=2, dtype=dtype, **arguments)
    return [call[name] for name in ("query", "key", "value")]


def loop(q, k, v, ends_q, ends_k, **arguments):
    """out and lse, sequence by sequence, zeros and -inf behind the last."""
    outs, lses = [], []
    for b in range(len(ends_q) - 1):
        rows, keys = slice(*ends_q[b : b + 2]), slice(*ends_k[b : b + 2])
        out, lse = dot_product_attention(
            q[rows], k[keys], v[keys], return_residual=True, **arguments
        )
        outs.append(out)
        lses.append(lse)
    tail = q.shape[0] - int(ends_q[-1])
    outs.append(jnp.zeros((tail, q.shape[1], v.shape[2]), q.dtype))
    lses.append(jnp.full((tail, q.shape[1]), -jnp.inf, jnp.float32))
    return jnp.concatenate(outs), jnp.concatenate(lses)


def assert_alike(got, want):
    for name, a, b in zip(("out", "lse"), got, want, strict=True):
        atol = 2.0**-9 if a.dtype == jnp.float16 else 2e-5
        assert_close(a, b, atol * (1 + np.abs(np.nan_to_num(np.asarray(b)))), name)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"is_causal": True},
        {"is_causal": True, "local_window_size": (7, 0)},
        {"is_causal": True, "alibi_slopes": np.array([0.5, 0.1, 0.02, 0], np.float32)},
        {"softcap": 2.0, "scale": 0.7},
    ],
    ids=["full", "causal", "window", "alibi", "softcap"],
)
def test_sequences_do_not_see_each_other(implementation, working_dtype, arguments):
    q, k, v = packed(working_dtype)
    arguments = arguments | {"implementation": implementation}
    got = flash_attention_varlen(q, k, v, ENDS, return_residual=True, **arguments)
    assert_alike(got, loop(q, k, v, ENDS, ENDS, **arguments))


def test_key_sequences_of_other_lengths(implementation, working_dtype):
    q, _, _ = packed(working_dtype)
    _, k, v = packed(working_dtype, total=90, seed=1)
    ends_k = np.array([0, 10, 50, 50, 88], np.int32)
    got = flash_attention_varlen(
        q, k, v, ENDS, ends_k, implementation=implementation, return_residual=True
    )
    assert_alike(got, loop(q, k, v, ENDS, ends_k, implementation=implementation))


# What compares no positions after all may come with boundaries for the keys.
def test_off_is_off(implementation, working_dtype):
    q, k, v = packed(working_dtype)
    off = {"is_causal": np.False_, "local_window_size": (None, None)}
    arguments = {"implementation": implementation, "return_residual": True}
    got = flash_attention_varlen(q, k, v, ENDS, ENDS, **off, **arguments)
    want = flash_attention_varlen(q, k, v, ENDS, **arguments)
    for name, a, b in zip(("out", "lse"), got, want, strict=True):
        assert_equal(a, b, name)


def test_traced_boundaries_and_gradients(implementation, working_dtype):
    q, k, v = packed(working_dtype)

    def loss(attention):
        def of(q, k, v):
            out, lse = attention(q, k, v)
            finite = jnp.where(jnp.isfinite(lse), lse, 0.0)
            return (out.astype(jnp.float32) ** 2).sum() + jnp.sin(finite).sum()

        return jax.jit(jax.grad(of, (0, 1, 2)))

    arguments = {"is_causal": True, "implementation": implementation}
    got = jax.jit(
        lambda q, k, v, ends: loss(
            lambda *x: flash_attention_varlen(
                *x, ends, return_residual=True, **arguments
            )
        )(q, k, v)
    )(q, k, v, ENDS)
    want = loss(lambda *x: loop(*x, ENDS, ENDS, **arguments))(q, k, v)
    atol = 2e-2 if working_dtype == "float16" else 5e-5
    for name, a, b in zip(("dq", "dk", "dv"), got, want, strict=True):
        assert_close(a, b, atol, name)


def test_padding_may_hold_anything(implementation, working_dtype):
    q, k, v = packed(working_dtype)
    sinks = np.ones(4, np.float32)
    run = lambda *x: flash_attention_varlen(  # noqa: E731
        *x, ENDS, sinks=sinks, implementation=implementation, return_residual=True
    )
    clean = run(q, k, v)
    for x in (q, k, v):
        x[ENDS[-1] :] = np.nan
    for name, a, b in zip(("out", "lse"), clean, run(q, k, v), strict=True):
        assert_equal(a, b, name)
        assert (np.asarray(a)[ENDS[-1] :] == (0 if name == "out" else -np.inf)).all()


def test_no_array_of_all_pairs(implementation, working_dtype):
    total = 4096
    x = jax.ShapeDtypeStruct((total, 1, 16), working_dtype)
    ends = jax.ShapeDtypeStruct((5,), jnp.int32)
    program = jax.jit(
        lambda q, ends: flash_attention_varlen(
            q, q, q, ends, is_causal=True, implementation=implementation
        )
    )
    memory = program.lower(x, ends).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 4 * total * total  # of float32 scores


@pytest.mark.implementations("reference")
@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"query": np.zeros((2, 8, 4, 16), np.float32)}, ValueError, "query must"),
        ({"cu_seqlens_q": np.array([0.0, 8])}, TypeError, "cu_seqlens_q must have"),
        ({"cu_seqlens_q": np.array([[0, 8]])}, ValueError, "cu_seqlens_q must have"),
        ({"cu_seqlens_q": np.array([], np.int32)}, ValueError, "cu_seqlens_q must"),
        ({"cu_seqlens_q": np.array([1, 8])}, ValueError, "cu_seqlens_q must start"),
        ({"cu_seqlens_q": np.array([0, 5, 4])}, ValueError, r"got \[0, 5, 4\]"),
        ({"cu_seqlens_q": np.array([0, 9])}, ValueError, "end at 8 or before"),
        ({"cu_seqlens_k": np.array([0, 3, 8])}, ValueError, "cu_seqlens_k must have"),
        (
            {"cu_seqlens_k": np.array([0, 8]), "is_causal": True},
            NotImplementedError,
            "cu_seqlens_k must be None, .* together with is_causal",
        ),
        ({"key": np.zeros((9, 4, 16), np.float32)}, ValueError, "total_k = total_q"),
    ],
)
def test_bad_arguments(implementation, change, error, text):
    x = np.zeros((8, 4, 16), np.float32)
    call = {"query": x, "key": x, "value": x, "cu_seqlens_q": np.array([0, 8])}
    if "key" in change:
        change = change | {"value": change["key"]}
    if "query" in change:
        change = change | {"key": change["query"], "value": change["query"]}
    with pytest.raises(error, match=text):
        flash_attention_varlen(**call | change, implementation=implementation)


@pytest.mark.implementations("reference")
def test_its_example_runs(implementation):
    assert "flash_attention_varlen" in jaxflash.__all__
    (example,) = doctest.DocTestFinder(recurse=False).find(
        flash_attention_varlen, "flash_attention_varlen"
    )
    assert doctest.DocTestRunner().run(example).failed == 0
