"""Bad input: which exception, and whether its text lets the user mend the call."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import make_call, serving

from jaxflash import dot_product_attention, explain, selection
from jaxflash.spec import KERNELS

B, T, S, N, K, H = 2, 5, 7, 4, 2, 8
WRONG = (TypeError, ValueError)


def zeros(*shape, dtype="float32"):
    return np.zeros(shape, dtype)


def ids(*shape):
    return np.zeros(shape, np.int32)


def lengths(*values):
    return np.array(values, np.int32)


# Each row: what is changed in a good call, the exception, and what its text must name:
# the argument, what was expected, what came.
OF_SHAPES_AND_DTYPES = [
    ({"query": zeros(T, H)}, ValueError, "query", "T, N, H", "(5, 8)"),
    ({"key": zeros(S, K, H)}, ValueError, "key", "(7, 2, 8)"),
    ({"value": zeros(S, H)}, ValueError, "value", "(7, 8)"),
    ({"key": zeros(B, S, K, 6)}, ValueError, "key", "8", "(2, 7, 2, 6)"),
    ({"value": zeros(B, 6, K, H)}, ValueError, "value", "7", "(2, 6, 2, 8)"),
    ({"value": zeros(B, S, 4, H)}, ValueError, "value", "2", "(2, 7, 4, 8)"),
    ({"key": zeros(3, S, K, H)}, ValueError, "key", "2", "(3, 7, 2, 8)"),
    ({"query": zeros(B, T, 3, H)}, ValueError, "query", "multiple", "3", "2"),
    ({"key": zeros(B, S, K, H, dtype="float16")}, ValueError, "key", "float32",
     "float16"),
    ({"value": zeros(B, S, K, H, dtype="float16")}, ValueError, "value", "float32",
     "float16"),
    ({"query": zeros(B, T, N, H, dtype="int32")}, WRONG, "query", "float", "int32"),
    ({"query": zeros(B, T, N, H, dtype="complex64")}, WRONG, "query", "float",
     "complex64"),
    ({"query": zeros(B, T, N, H, dtype=jnp.float8_e5m2)}, TypeError, "query",
     "bfloat16", "float8_e5m2"),
    ({"query": zeros(B, T, N, 0), "key": zeros(B, S, K, 0)}, ValueError, "query", "H",
     "0"),
    ({"mask": zeros(B, 1, T, S)}, WRONG, "mask", "bool", "float32"),
    ({"mask": zeros(B, 3, T, S, dtype=bool)}, ValueError, "mask", "(2, 3, 5, 7)"),
    ({"mask": zeros(B, 1, 1, T, S, dtype=bool)}, ValueError, "mask", "(2, 1, 1, 5, 7)"),
    ({"bias": ids(B, 1, T, S)}, WRONG, "bias", "float", "int32"),
    ({"bias": zeros(B, N, T, 6)}, ValueError, "bias", "7", "(2, 4, 5, 6)"),
    ({"scale": zeros(2)}, ValueError, "scale", "scalar", "(2,)"),
    ({"scale": np.ones((), np.int32)}, WRONG, "scale", "float", "int32"),
    ({"query_seq_lengths": zeros(B)}, WRONG, "query_seq_lengths", "int32", "float32"),
    ({"query_seq_lengths": ids(3)}, ValueError, "query_seq_lengths", "2", "(3,)"),
    ({"key_value_seq_lengths": zeros(B)}, WRONG, "key_value_seq_lengths", "int32",
     "float32"),
    ({"key_value_seq_lengths": ids(B, 1)}, ValueError, "key_value_seq_lengths", "2",
     "(2, 1)"),
    ({"query_offset": zeros()}, WRONG, "query_offset", "int32", "float32"),
    ({"query_offset": ids(3)}, ValueError, "query_offset", "2", "(3,)"),
    ({"query_segment_ids": ids(B, T)}, ValueError, "key_value_segment_ids", "None"),
    ({"key_value_segment_ids": ids(B, S)}, ValueError, "query_segment_ids", "None"),
    ({"query_segment_ids": ids(B, S), "key_value_segment_ids": ids(B, S)}, ValueError,
     "query_segment_ids", "5", "(2, 7)"),
    ({"query_segment_ids": zeros(B, T), "key_value_segment_ids": ids(B, S)}, WRONG,
     "query_segment_ids", "int32", "float32"),
    ({"sinks": zeros(3)}, ValueError, "sinks", "4", "(3,)"),
    ({"sinks": ids(N)}, WRONG, "sinks", "float", "int32"),
    ({"alibi_slopes": zeros(3)}, ValueError, "alibi_slopes", "4", "(3,)"),
    ({"alibi_slopes": ids(N)}, WRONG, "alibi_slopes", "float", "int32"),
]  # fmt: skip

OF_VALUES = [
    ({"scale": float("nan")}, ValueError, "scale", "finite", "nan"),
    ({"scale": float("-inf")}, ValueError, "scale", "finite", "-inf"),
    ({"scale": "0.5"}, WRONG, "scale", "0.5"),
    ({"scale": 1e39}, ValueError, "scale", "finite", "1e+39"),
    ({"scale": 10**400}, ValueError, "scale", "finite", "1000"),
    ({"query_seq_lengths": lengths(6, 1)}, ValueError, "query_seq_lengths", "5", "6"),
    ({"query_seq_lengths": lengths(2, -1)}, ValueError, "query_seq_lengths", "-1"),
    ({"key_value_seq_lengths": lengths(7, 8)}, ValueError, "key_value_seq_lengths",
     "7", "8"),
    ({"key_value_seq_lengths": lengths(-3, 8)}, ValueError, "key_value_seq_lengths",
     "-3"),
    ({"local_window_size": -1}, ValueError, "local_window_size", "-1"),
    ({"local_window_size": (3, -2)}, ValueError, "local_window_size", "-2"),
    ({"local_window_size": (1, 2, 3)}, WRONG, "local_window_size", "(1, 2, 3)"),
    ({"local_window_size": 2.5}, WRONG, "local_window_size", "int", "2.5"),
    ({"query_offset": 1.5}, WRONG, "query_offset", "int", "1.5"),
    ({"softcap": 0.0}, ValueError, "softcap", "0", "0.0"),
    ({"softcap": -2.0}, ValueError, "softcap", "-2.0"),
    ({"softcap": float("nan")}, ValueError, "softcap", "nan"),
    ({"softcap": float("inf")}, ValueError, "softcap", "inf"),
    ({"softcap": 1e39}, ValueError, "softcap", "finite", "1e+39"),
    ({"softcap": 1e-50}, ValueError, "softcap", "greater than 0", "1e-50"),
    ({"query_seq_lengths": [2**40, 1]}, WRONG, "query_seq_lengths", "1099511627776"),
    ({"query_segment_ids": np.full((B, T), 2**40), "key_value_segment_ids": ids(B, S)},
     ValueError, "query_segment_ids", "2147483647", "1099511627776"),
    ({"dropout_rate": 0.5}, ValueError, "dropout_key", "None"),
    ({"dropout_rate": -0.1}, ValueError, "dropout_rate", "-0.1"),
    ({"dropout_rate": 1.0}, ValueError, "dropout_rate", "1.0"),
    ({"dropout_rate": 0.5, "dropout_key": ids(3)}, WRONG, "dropout_key", "key"),
    ({"dropout_rate": 0.5, "dropout_key": zeros(3, dtype="uint32")}, ValueError,
     "dropout_key", "(2,)", "(3,)"),
    ({"precision": "exact"}, WRONG, "precision", "exact"),
    ({"implementation": "tpu"}, ValueError, "implementation", "cuda", "cpu",
     "reference", "tpu"),
    ({"implementation": np.zeros(2)}, ValueError, "implementation", "None"),
    ({"return_residual": 1}, WRONG, "return_residual", "bool", "1"),
]  # fmt: skip


def good_call():
    return make_call(T, S, batch=(B,), N=N, K=K, H=H)


def name_of(row) -> str:
    return "-".join(row[0]) + "-" + "-".join(map(str, row[2:]))


def check(function, error, needles):
    with pytest.raises(error) as raised:
        function()
    text = str(raised.value)
    for needle in needles:
        boundary = (
            r"(?<![\w.])" + re.escape(needle)
            if needle[0].isalnum()
            else (re.escape(needle))
        )
        assert re.search(boundary, text), f"{needle!r} is not named in: {text}"


@pytest.mark.parametrize("row", OF_SHAPES_AND_DTYPES + OF_VALUES, ids=name_of)
def test_bad_input_is_named(row):
    changes, error, *needles = row
    call = good_call() | changes
    check(lambda: dot_product_attention(**call), error, needles)
    # The same while a function that closes over the arrays is traced.
    check(lambda: jax.eval_shape(lambda: dot_product_attention(**call)), error, needles)


@pytest.mark.parametrize("row", OF_SHAPES_AND_DTYPES, ids=name_of)
def test_bad_shapes_and_dtypes_are_named_at_trace_time(row):
    changes, error, *needles = row
    call = good_call() | changes
    arrays = {name: x for name, x in call.items() if isinstance(x, np.ndarray)}
    rest = {name: x for name, x in call.items() if name not in arrays}

    def attention(arrays):
        return dot_product_attention(**arrays, **rest)

    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
    check(lambda: jax.eval_shape(attention, abstract), error, needles)
    check(lambda: jax.jit(attention).lower(abstract), error, needles)
    check(lambda: jax.eval_shape(jax.vmap(attention), jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), arrays)), error,
        needles[:1])  # fmt: skip


@pytest.mark.parametrize("name", ["is_causal", "local_window_size", "softcap"])
def test_traced_values_of_static_arguments_are_named(name):
    call = good_call()

    def attention(x):
        return dot_product_attention(**call, **{name: x})

    with pytest.raises(TypeError, match=name):
        jax.jit(attention)(jnp.ones((), jnp.int32))


def wide(size, value_size):
    return {
        "query": zeros(B, T, N, size, dtype="float16"),
        "key": zeros(B, S, K, size, dtype="float16"),
        "value": zeros(B, S, K, value_size, dtype="float16"),
    }


# By what a backend's table entry must have to serve the call.
UNSERVED = {
    "mask": {"mask": np.ones((B, 1, T, S), bool)},
    "bias": {"bias": zeros(B, 1, T, S)},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": zeros(N)},
    "alibi_slopes": {"alibi_slopes": zeros(N)},
    "query_segment_ids": {
        "query_segment_ids": ids(B, T),
        "key_value_segment_ids": ids(B, S),
    },
    "window": {"local_window_size": 2},
    "value_head_dim": {"value": zeros(B, S, K, 6, dtype="float16")},
    "dropout_seed": {"dropout_rate": 0.1},
    "H": wide(264, 8),
    "Hv": wide(8, 264),
}
ARGUMENTS = {
    "window": "local_window_size",
    "value_head_dim": "value",
    "dropout_seed": "dropout_rate",
}
UNSERVED_BY = [
    (backend, feature)
    for backend in KERNELS
    for feature in UNSERVED
    if backend not in serving(feature)
]


@pytest.mark.parametrize(("backend", "feature"), UNSERVED_BY)
def test_explicit_implementation_refuses_what_it_does_not_serve(backend, feature):
    call = make_call(T, S, batch=(B,), N=N, K=K, H=H, dtype="float16")
    call |= UNSERVED[feature] | {"implementation": backend}
    if feature == "dropout_seed":
        call["dropout_key"] = jax.random.key(0)
    name = ARGUMENTS.get(feature, feature)
    largest = str(KERNELS[backend].max_head_dim)
    needles = (name, backend, largest if feature in ("H", "Hv") else "reference")
    check(lambda: dot_product_attention(**call), NotImplementedError, needles)
    check(lambda: jax.eval_shape(lambda: dot_product_attention(**call)),
          NotImplementedError, needles)  # fmt: skip


def test_cuda_refuses_float32_by_name():
    call = good_call() | {"implementation": "cuda"}
    needles = ("float32", "cuda", "bfloat16", "float16")
    check(lambda: dot_product_attention(**call), NotImplementedError, needles)


def test_float64_is_the_reference_or_a_clear_refusal():
    with jax.enable_x64(True), jax.debug_infs(True):
        call = make_call(T, S, N=N, K=K, dtype="float64", is_causal=True)
        out = dot_product_attention(**call, implementation="reference")
        assert out.dtype == np.float64
        assert np.all(np.isfinite(np.asarray(out)))
        needles = ("float64", "cpu", "reference")
        check(lambda: dot_product_attention(**call, implementation="cpu"),
              NotImplementedError, needles)  # fmt: skip


@pytest.mark.parametrize("backend", ["cuda"])
def test_a_backend_of_another_platform_is_refused_by_name(backend):
    call = make_call(T, S, dtype="float16") | {"implementation": backend}
    with jax.default_device(jax.devices("cpu")[0]):
        attention = lambda: dot_product_attention(**call)  # noqa: E731
        needles = ("implementation", backend, "reference")
        check(jax.jit(attention), NotImplementedError, needles)
        check(attention, NotImplementedError, needles)


@pytest.mark.parametrize("name", ["key", "value", "query_seq_lengths", "scale"])
def test_inputs_on_two_devices_are_named(name):
    one, other = jax.devices("cpu")[:2]
    call = good_call() | {"query_seq_lengths": lengths(T, 3)}
    call["scale"] = np.ones((), np.float32)
    call = {n: jax.device_put(x, other if n == name else one) for n, x in call.items()}
    needles = (name, "query", str(one), str(other), "jax.device_put")
    check(lambda: dot_product_attention(**call), ValueError, needles)
    # Arrays that nobody placed go where the others are.
    call[name] = jnp.asarray(np.asarray(call[name]))
    assert dot_product_attention(**call).devices() == {one}


def fake_gpus(monkeypatch, *capabilities):
    """A build with CUDA kernels on a machine with these GPUs."""
    gpus = [
        types.SimpleNamespace(device_kind=f"GPU {text}", compute_capability=text)
        for text in capabilities
    ]
    cpu = selection.load("cpu")
    monkeypatch.setattr(selection, "load", lambda backend: cpu)
    monkeypatch.setattr(jax, "local_devices", lambda backend: gpus)


@pytest.fixture
def _device_is_looked_up():
    """Not remembered from, nor for, other tests."""
    selection._device_refusal.cache_clear()
    yield
    selection._device_refusal.cache_clear()


@pytest.mark.usefixtures("_device_is_looked_up")
def test_a_gpu_that_is_too_old_is_named(monkeypatch):
    fake_gpus(monkeypatch, "9.0", "7.5")
    arrays = make_call(T, S, dtype="float16")
    needles = ("cuda", "GPU 7.5", "sm_75", "sm_80", "implementation")
    check(lambda: dot_product_attention(**arrays, implementation="cuda"),
          NotImplementedError, needles)  # fmt: skip
    choice = explain(**arrays, platform="cuda").forward
    assert choice.implementation == "reference"
    assert "GPU 7.5 (sm_75)" in choice.reason


@pytest.mark.usefixtures("_device_is_looked_up")
@pytest.mark.parametrize("capabilities", [(), ("8.0", "9.0"), ("12.0",)])
def test_other_gpus_are_not_refused(monkeypatch, capabilities):
    fake_gpus(monkeypatch, *capabilities)
    assert selection.unavailable("cuda") is None
