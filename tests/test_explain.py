"""jaxflash.explain says what a call would run, and why."""

from __future__ import annotations

import doctest
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from c_explain import CUDA, Kernel, answer_of, make_params, needs_cuda, needs_hopper
from calls import make_call

from jaxflash import dot_product_attention, explain, selection
from jaxflash.explain import CudaDevice


@pytest.fixture(autouse=True)
def _automatic(monkeypatch):
    monkeypatch.delenv("JAXFLASH_CUDA_KERNELS", raising=False)


@needs_cuda
@pytest.mark.parametrize("H", [64, 256, 50])
@pytest.mark.parametrize("deterministic", [False, True])
def test_python_says_what_the_c_functions_say(H, deterministic):
    q = jax.ShapeDtypeStruct((2, 300, 4, H), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct((2, 500, 2, H), jnp.bfloat16)
    got = explain(q, kv, kv, deterministic=deterministic, device=CudaDevice())
    params = make_params(H=H)
    params.forward.deterministic = deterministic
    for direction in ("forward", "backward"):
        one, answer = getattr(got, direction), answer_of(direction, params)
        assert one.implementation == "cuda"
        assert one.family == answer.family.decode()
        assert one.family_reason == answer.reason.decode()
        assert one.is_reproducible == bool(answer.is_reproducible)
        assert one.workspace_bytes >= answer.workspace_bytes
        for kernel, want in zip(
            one.kernels, answer.kernels[: answer.num_kernels], strict=True
        ):
            for name in (field[0] for field in Kernel._fields_[1:]):
                assert getattr(kernel, name) == getattr(want, name), name
            assert kernel.name == want.name.decode()


@needs_hopper
def test_python_merges_batch_axes_as_the_call_does():
    x = jax.ShapeDtypeStruct((3, 2, 64, 4, 64), jnp.float16)
    lengths = jax.ShapeDtypeStruct((3, 2), jnp.int32)
    scale = jax.ShapeDtypeStruct((), jnp.float32)
    got = explain(
        x, x, x, key_value_seq_lengths=lengths, scale=scale, device=CudaDevice()
    )
    assert got.forward.family == got.backward.family == "sm90"


@needs_cuda
def test_without_a_device_one_must_be_given():
    try:
        jax.devices("cuda")
    except RuntimeError:
        x = jax.ShapeDtypeStruct((64, 4, 64), jnp.bfloat16)
        with pytest.raises(RuntimeError, match="cuda"):
            explain(x, x, x, platform="cuda")
    else:
        pytest.skip("there is a CUDA device")


@pytest.mark.gpu
def test_the_device_of_this_process():
    x = jnp.zeros((64, 4, 64), jnp.bfloat16)
    got = explain(x, x, x)
    major = jax.devices("cuda")[0].compute_capability.split(".")[0]
    assert got.forward.implementation == "cuda"
    assert got.forward.family == ("sm90" if major == "9" else "sm80")


SERVED = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "heads": {"K": 2, "is_causal": True},
    "softcap": {"softcap": 5.0},
    "mask": {"mask": np.ones((1, 1, 6, 9), bool)},
}
UNSERVED = {
    "query with head dim H = 257": {"H": 257},
    "value with head dim Hv = 257": {"Hv": 257},
}


@pytest.mark.parametrize("case", [*SERVED, *UNSERVED])
def test_the_cpu_answer_is_what_is_lowered(case):
    call = make_call(6, 9, **(SERVED | UNSERVED)[case])
    got = explain(**call)
    # Explaining is silent, and leaves the warning to the call.
    selection._warn_once.cache_clear()
    jax.clear_caches()
    lowered = jax.jit(lambda: dot_product_attention(**call)).lower
    if case in UNSERVED:
        reason = f"jaxflash's cpu kernels do not serve {case} yet"
        with pytest.warns(UserWarning, match=case) as caught:
            text = lowered().as_text()
        assert str(caught[0].message).startswith(got.forward.reason)
        assert got.forward.reason == got.backward.reason == reason
        assert got.forward.workspace_bytes is None
    else:
        text = lowered().as_text()
        assert got.forward.reason == "the cpu kernels serve the call"
    served = text.count("@jaxflash_attention_forward") == 1
    want = "cpu" if served else "reference"
    assert got.forward.implementation == got.backward.implementation == want


@needs_cuda
def test_gpu_is_another_name_of_cuda():
    x = jax.ShapeDtypeStruct((64, 4, 64), jnp.bfloat16)
    want = explain(x, x, x, platform="cuda", device=CudaDevice())
    assert explain(x, x, x, platform="gpu", device=CudaDevice()) == want


@pytest.mark.parametrize("text", ["90", "9.", "sm_90", "9.0a"])
def test_a_compute_capability_has_a_dot(text):
    with pytest.raises(ValueError, match="compute_capability must be like"):
        CudaDevice(text).numbers()


def test_the_reference_has_its_reasons():
    x = jax.ShapeDtypeStruct((5, 2, 8), jnp.float32)
    got = explain(x, x, x, implementation="reference")
    assert got.forward.reason == "implementation='reference' asks for it"
    assert explain(x, x, x, platform="tpu").forward.reason == (
        "jaxflash has no kernels for this platform"
    )
    empty = jax.ShapeDtypeStruct((5, 0, 8), jnp.float32)
    assert "without heads" in explain(empty, empty, empty).forward.reason
    if not isinstance(CUDA, str):
        got = explain(x, x, x, device=CudaDevice())
        assert got.forward.implementation == "reference"
        assert "cuda kernels do not serve query of dtype float32" in str(got)


def test_named_kernels_are_explained_by_their_name():
    x = jax.ShapeDtypeStruct((5, 2, 8), jnp.float32)
    got = explain(x, x, x, implementation="cpu", platform="cpu")
    assert got.forward.reason == "implementation='cpu' asks for it"

    def loss(q):
        return dot_product_attention(q, q, q, implementation="cpu").sum()

    program = jax.jit(jax.grad(loss)).lower(x).as_text()
    assert f"tensor<{got.backward.workspace_bytes}xui8>" in program
    assert str(got).startswith("forward: cpu (implementation='cpu' asks for it)\n")


def test_arrays_and_their_types_explain_alike():
    call = make_call(6, 9, K=2, is_causal=True)
    types = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "shape") else x
        for name, x in call.items()
    }
    assert explain(**call) == explain(**types)
    seen = []

    @jax.jit
    def inside(query):
        seen.append(explain(**(call | {"query": query})))
        return query

    inside.lower(call["query"])
    assert seen == [explain(**call)]


def test_wrong_calls_raise_what_the_call_raises():
    x = jax.ShapeDtypeStruct((5, 2, 8), jnp.float32)
    with pytest.raises(ValueError, match=r"key must have shape .*, got \(5, 2, 9\)"):
        explain(x, jax.ShapeDtypeStruct((5, 2, 9), jnp.float32), x)
    wide = jax.ShapeDtypeStruct((5, 2, 257), jnp.float32)
    with pytest.raises(NotImplementedError, match="does not serve query with head dim"):
        explain(wide, wide, wide, implementation="cpu")
    with pytest.raises(NotImplementedError, match="compiled for cuda"):
        explain(x, x, x, implementation="cpu", platform="cuda")
    with pytest.raises(ValueError, match="platform must be 'cuda'"):
        explain(x, x, x, platform="cpu", device=CudaDevice())
    with pytest.raises(TypeError, match="platform must be None or a name, got 5"):
        explain(x, x, x, platform=5)
    with pytest.raises(TypeError, match="device must be None or a CudaDevice, got 'h1"):
        explain(x, x, x, device="h100")
    with pytest.raises(TypeError, match="unknown"):
        explain(x, x, x, unknown=1)


def test_the_example_of_the_docstring():
    (example,) = doctest.DocTestFinder(recurse=False).find(explain, "explain")
    assert len(example.examples) == 3
    assert doctest.DocTestRunner().run(example).failed == 0


@needs_hopper
def test_the_example_of_the_readme(capsys):
    readme = (pathlib.Path(__file__).parent.parent / "README.md").read_text()
    ((code, output),) = re.findall(
        r"```python\n([^`]*explain\([^`]*)```\n\n```\n(.*?)\n```", readme, re.DOTALL
    )
    exec(code, {})
    assert capsys.readouterr().out == output + "\n"
