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
from jaxflash.spec import KERNELS

T, S = 6, 9
TOO_WIDE = KERNELS["cpu"].max_head_dim + 1
UNSERVED = {
    "query": make_call(T, S, H=TOO_WIDE),
    "value": make_call(T, S, Hv=TOO_WIDE),
}


@pytest.fixture(autouse=True)
def _as_in_a_new_process():
    """Warnings come once per process, while a call is lowered for the first time."""
    selection._warn_once.cache_clear()
    jax.clear_caches()


@pytest.mark.parametrize("name", UNSERVED)
def test_unserved_argument_is_named_in_one_warning(name):
    call = UNSERVED[name]
    with pytest.warns(UserWarning, match=rf"\b{name}\b.*reference") as caught:
        got = run(call, None)
    assert len(caught) == 1
    for result, want in zip(got, run(call, "reference"), strict=True):
        assert_equal(result, want)


def test_the_warning_comes_once():
    with pytest.warns(UserWarning, match="query"):
        run(UNSERVED["query"], None)
    other = make_call(T + 1, S, H=TOO_WIDE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(other, None)
    with pytest.warns(UserWarning, match="value"):
        run(UNSERVED["value"], None)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.grad])
def test_the_warning_points_at_the_line_that_called(transform):
    call = dict(UNSERVED["query"])

    def loss(query):
        return dot_product_attention(**(call | {"query": query})).sum()

    with pytest.warns(UserWarning, match="query") as caught:
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
    call = dict(UNSERVED["query"])

    def loss(query):
        return dot_product_attention(**(call | {"query": query})).sum()

    def reference(query):
        call["implementation"] = "reference"
        return dot_product_attention(**(call | {"query": query})).sum()

    with pytest.warns(UserWarning, match="query") as caught:
        got = jax.jit(jax.grad(loss))(call["query"])
    assert len(caught) == 1
    assert_equal(got, jax.jit(jax.grad(reference))(call["query"]))


def test_the_reference_by_name_is_silent():
    for name in UNSERVED:
        run(UNSERVED[name], "reference")


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
