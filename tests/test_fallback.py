"""What implementation=None does with a call that no kernel serves."""

import sys
import warnings
from typing import Any

import jax
import numpy as np
import pytest
from calls import make_call, run
from compare import assert_equal

from jaxflash import dot_product_attention, selection

T, S = 6, 9
UNSERVED = {
    "mask": {"mask": np.ones((1, 1, T, S), bool)},
    "bias": {"bias": np.zeros((1, 1, T, S), np.float32)},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": np.zeros(4, np.float32)},
    "alibi_slopes": {"alibi_slopes": np.zeros(4, np.float32)},
    "query_segment_ids": {
        "query_segment_ids": np.zeros((2, T), np.int32),
        "key_value_segment_ids": np.zeros((2, S), np.int32),
    },
    "dropout_rate": {"dropout_rate": 0.5},
    "value": {"value": np.ones((2, S, 4, 3), np.float32)},
}


@pytest.fixture(autouse=True)
def _as_in_a_new_process():
    """Warnings come once per process, while a call is lowered for the first time."""
    selection._warn_once.cache_clear()
    jax.clear_caches()


def call_of(name):
    call = make_call(T, S) | UNSERVED[name]
    if name == "dropout_rate":
        call["dropout_key"] = jax.random.key(0)
    return call


@pytest.mark.parametrize("name", UNSERVED)
def test_unserved_argument_is_named_in_one_warning(name):
    call = call_of(name)
    with pytest.warns(UserWarning, match=rf"\b{name}\b.*reference") as caught:
        got = run(call, None)
    assert len(caught) == 1
    for result, want in zip(got, run(call, "reference"), strict=True):
        assert_equal(result, want)


def test_the_warning_comes_once():
    with pytest.warns(UserWarning, match="softcap"):
        run(call_of("softcap"), None)
    other = make_call(T + 1, S) | {"softcap": 4.0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(other, None)
    with pytest.warns(UserWarning, match="mask"):
        run(call_of("mask"), None)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.grad])
def test_the_warning_points_at_the_line_that_called(transform):
    call = call_of("softcap")

    def loss(query):
        return dot_product_attention(**(call | {"query": query})).sum()

    with pytest.warns(UserWarning, match="softcap") as caught:
        transform(loss)(jax.numpy.asarray(call["query"]))
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_a_source_tree_that_hides_the_installed_package_is_named(
    backend, tmp_path, monkeypatch
):
    load: Any = selection.load.__wrapped__
    monkeypatch.setitem(sys.modules, f"jaxflash._{backend}", None)
    monkeypatch.setattr(
        selection, "__file__", str(tmp_path / "jaxflash" / "selection.py")
    )
    assert "not part of this installation" in load(backend)
    (tmp_path / "csrc").mkdir()
    if backend == "cuda":  # missing beside compiled cpu kernels: a CPU-only build
        assert "not part of this installation" in load(backend)
    monkeypatch.setitem(sys.modules, "jaxflash._cpu", None)
    text = load(backend)
    assert f"not compiled in the source tree {tmp_path / 'jaxflash'}" in text
    assert "another folder" in text
    assert "python -P" in text


def test_gradients_fall_back_with_the_forward():
    call = call_of("softcap")

    def loss(query):
        return dot_product_attention(**(call | {"query": query})).sum()

    def reference(query):
        call["implementation"] = "reference"
        return dot_product_attention(**(call | {"query": query})).sum()

    with pytest.warns(UserWarning, match="softcap") as caught:
        got = jax.jit(jax.grad(loss))(call["query"])
    assert len(caught) == 1
    assert_equal(got, jax.jit(jax.grad(reference))(call["query"]))


def test_the_reference_by_name_is_silent():
    for name in UNSERVED:
        run(call_of(name), "reference")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_served_calls_take_the_kernel_in_silence(dtype):
    call = make_call(T, S, K=2, dtype=dtype, is_causal=True, query_offset=3)
    call["key_value_seq_lengths"] = np.array([4, 9], np.int32)
    attention = jax.jit(lambda: dot_product_attention(**call))
    text = attention.lower().as_text()
    assert text.count("@jaxflash_attention_forward") == 1
    assert_equal(attention(), run(call, "cpu")[0])


def test_gradients_take_the_kernel():
    call = make_call(T, S, K=2, is_causal=True)

    def loss(query):
        return dot_product_attention(**(call | {"query": query})).sum()

    text = jax.jit(jax.grad(loss)).lower(call["query"]).as_text()
    assert text.count("@jaxflash_attention_forward") == 1
    assert text.count("@jaxflash_attention_backward") == 1
