"""scan, cond, remat, donation and the other ways a program is put together."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import QKV, make_call
from compare import assert_close
from tracing import count

from jaxflash import checkpoint_policies, dot_product_attention

LAYERS = 4
TOLERANCE = {"float32": 1e-5, "float16": 1e-2}


def layer(x, weight, implementation, length=None):
    """A self-attention layer [B, T, N, H] -> [B, T, N, H]."""
    q = x * weight
    out = dot_product_attention(
        q,
        x,
        x,
        is_causal=True,
        key_value_seq_lengths=length,
        implementation=implementation,
    )
    return x + out


@pytest.fixture
def inputs(working_dtype):
    x = make_call(10, N=2, H=8, dtype=working_dtype)["query"]
    weights = np.linspace(0.5, 1.5, LAYERS).astype(working_dtype)
    return jnp.asarray(x), jnp.asarray(weights)


def unrolled(implementation, wrap=lambda f: f):
    def loss(x, weights):
        body = wrap(functools.partial(layer, implementation=implementation))
        for n in range(LAYERS):
            x = body(x, weights[n])
        return (x.astype(jnp.float32) ** 2).sum()

    return loss


def scanned(implementation, wrap=lambda f: f):
    def loss(x, weights):
        body = functools.partial(layer, implementation=implementation)
        step = wrap(lambda x, w: (body(x, w), None))
        x, _ = jax.lax.scan(step, x, weights)
        return (x.astype(jnp.float32) ** 2).sum()

    return loss


def check(got, want, dtype):
    for leaf, target in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        size = float(np.abs(np.asarray(target)).max())
        assert_close(leaf, target, TOLERANCE[dtype] * size)


def test_scan_equals_the_unrolled_loop(implementation, inputs, working_dtype):
    argnums = (0, 1)
    got = jax.jit(jax.value_and_grad(scanned(implementation), argnums))(*inputs)
    want = jax.jit(jax.value_and_grad(unrolled(implementation), argnums))(*inputs)
    check(got, want, working_dtype)


def test_jvp_in_scan_and_checkpoint(implementation, inputs, working_dtype):
    tangents = jax.tree.map(jnp.ones_like, inputs)
    want = jax.jvp(unrolled(implementation), inputs, tangents)
    for wrap in (lambda f: f, jax.checkpoint):
        got = jax.jit(lambda *x, w=wrap: jax.jvp(scanned(implementation, w), *x))
        check(got(inputs, tangents), want, working_dtype)


POLICIES = [
    (None, 2 * LAYERS),
    (checkpoint_policies.save_attention, LAYERS),
    (jax.checkpoint_policies.everything_saveable, LAYERS),
    (jax.checkpoint_policies.nothing_saveable, 2 * LAYERS),
]


@pytest.mark.parametrize(
    ("policy", "forwards"), POLICIES, ids=["default", "attention", "all", "nothing"]
)
def test_remat_reruns_the_forward_unless_its_results_are_saved(
    implementation, inputs, working_dtype, policy, forwards
):
    wrap = functools.partial(jax.checkpoint, policy=policy)
    grad = jax.grad(unrolled(implementation, wrap))
    jaxpr = jax.make_jaxpr(grad)(*inputs)
    assert count(jaxpr, "attention_forward") == forwards
    assert count(jaxpr, "attention_backward") == LAYERS
    check(
        jax.jit(grad)(*inputs),
        jax.grad(unrolled(implementation))(*inputs),
        working_dtype,
    )


def test_remat_in_scan_saves_attention(implementation, inputs):
    counts = {}
    policies = {"default": None, "attention": checkpoint_policies.save_attention}
    for name, policy in policies.items():
        wrap = functools.partial(jax.checkpoint, policy=policy)
        jaxpr = jax.make_jaxpr(jax.grad(scanned(implementation, wrap)))(*inputs)
        counts[name] = count(jaxpr, "attention_forward")
    assert counts == {"default": 2, "attention": 1}


def test_grad_runs_one_forward_and_one_backward(implementation, inputs):
    jaxpr = jax.make_jaxpr(jax.grad(unrolled(implementation)))(*inputs)
    assert count(jaxpr, "attention_forward") == LAYERS
    assert count(jaxpr, "attention_backward") == LAYERS
    assert count(jaxpr, "attention_tangent") == 0


def test_cond_takes_either_branch(implementation, inputs, working_dtype):
    def loss(x, weights, flag):
        return jax.lax.cond(
            flag,
            unrolled(implementation),
            lambda x, w: (x * w[0]).sum().astype(jnp.float32),
            x,
            weights,
        )

    grad = jax.jit(jax.grad(loss))
    want = jax.grad(unrolled(implementation))(*inputs)
    check(grad(*inputs, True), want, working_dtype)
    check(grad(*inputs, False), jnp.full_like(inputs[0], inputs[1][0]), working_dtype)


def test_while_loop_decodes_with_a_traced_offset_and_length(
    implementation, working_dtype
):
    call = make_call(12, N=2, H=8, dtype=working_dtype)
    q, k, v = (jnp.asarray(call[name]) for name in QKV)

    def step(t, out):
        row = dot_product_attention(
            jax.lax.dynamic_slice_in_dim(q, t, 1, axis=1),
            k,
            v,
            is_causal=True,
            query_offset=t,
            key_value_seq_lengths=jnp.full((2,), t + 1, jnp.int32),
            implementation=implementation,
        )
        return jax.lax.dynamic_update_slice_in_dim(out, row, t, axis=1)

    got = jax.jit(lambda: jax.lax.fori_loop(0, 12, step, jnp.zeros_like(q)))()
    want = dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
    check(got, want, working_dtype)


def test_disable_jit(implementation, inputs, working_dtype):
    want = jax.jit(jax.value_and_grad(unrolled(implementation)))(*inputs)
    with jax.disable_jit():
        got = jax.value_and_grad(unrolled(implementation))(*inputs)
    check(got, want, working_dtype)


def test_debug_nans_accepts_rows_without_keys(implementation, inputs, working_dtype):
    x, _ = inputs

    def loss(x):
        out = layer(x, jnp.ones((), x.dtype), implementation, jnp.array([0, 4]))
        return (out.astype(jnp.float32) ** 2).sum()

    with jax.debug_nans(True):
        grad = jax.jit(jax.grad(loss))(x)
    assert np.all(np.isfinite(np.asarray(grad)))


def test_donated_inputs(implementation, inputs, working_dtype):
    step = functools.partial(layer, implementation=implementation)
    want = jax.jit(step)(inputs[0], inputs[1][0])
    x = jnp.array(inputs[0], copy=True)
    got = jax.jit(step, donate_argnums=0)(x, inputs[1][0])
    check(got, want, working_dtype)
    assert x.is_deleted()


def test_compiled_ahead_of_time(implementation, inputs, working_dtype):
    grad = jax.jit(jax.grad(unrolled(implementation)))
    check(grad.lower(*inputs).compile()(*inputs), grad(*inputs), working_dtype)


def test_static_arguments_of_equal_value_and_other_type_share_no_error(
    implementation, working_dtype
):
    call = make_call(6, 7, dtype=working_dtype)
    results = [
        dot_product_attention(
            **call, is_causal=flag, scale=scale, implementation=implementation
        )
        for flag, scale in ((True, 1), (True, 1.0), (np.True_, np.float32(1)))
    ]
    for got in results[1:]:
        np.testing.assert_array_equal(got, results[0])
