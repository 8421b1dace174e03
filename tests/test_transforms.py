"""jit, forward mode, reverse mode and every order of both."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from calls import QKV, cotangents, make_call
from compare import assert_close, xla_attention
from jax.test_util import check_grads

from jaxflash import dot_product_attention

ARGUMENTS = {"is_causal": True, "query_offset": 2}
TOLERANCE = {"float32": 2e-5, "float16": 1e-2}


@pytest.fixture
def call(working_dtype):
    call = make_call(9, 11, batch=(1,), N=4, K=2, H=8, dtype=working_dtype)
    call["key_value_seq_lengths"] = np.array([10], np.int32)
    return call | ARGUMENTS | {"scale": np.full((), 0.4, np.float32)}


def attention(call, implementation):
    """A function of a dict of some of the arguments, giving out and lse."""
    return lambda inputs: dot_product_attention(
        **(call | inputs), implementation=implementation, return_residual=True
    )


def part(call, names):
    return {name: jnp.asarray(call[name]) for name in names}


def directions(call, names, seed=5):
    rng = np.random.default_rng(seed)
    return {
        name: np.asarray(rng.standard_normal(call[name].shape), call[name].dtype)
        for name in names
    }


def scalar(function, seed=2):
    """A scalar loss that touches every element of out and lse, and is not linear."""

    def loss(inputs):
        out, lse = (x.astype(jnp.float32) for x in function(inputs))
        rng = np.random.default_rng(seed)
        a, b = (rng.standard_normal(x.shape).astype(np.float32) for x in (out, lse))
        return jnp.sum(a * jnp.sin(out)) + jnp.sum(b * lse**2)

    return loss


def in_float32(call):
    return call | {name: call[name].astype(np.float32) for name in QKV}


def assert_trees_close(got, want, dtype, factor=1.0):
    """Compares dicts (or nested dicts) leaf by leaf, relative to the largest value."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, leaf), target in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        size = np.abs(np.asarray(target)).max()
        atol = factor * TOLERANCE[dtype] * size
        assert_close(leaf, target, atol, jax.tree_util.keystr(path))


SUBSETS = [("query",), ("key",), ("value",), ("query", "value"), QKV, ("scale",)]
SUBSETS += [(*QKV, "scale")]


@pytest.mark.parametrize("names", SUBSETS, ids="-".join)
def test_jvp_matches_the_oracle(implementation, dtype, names):
    call = make_call(21, 33, K=2, H=24, dtype=dtype, **ARGUMENTS)
    call["scale"] = np.full((), 0.2, np.float32)
    tangents = directions(call, names)
    function = attention(call, implementation)
    _, (t_out, t_lse) = jax.jit(functools.partial(jax.jvp, function))(
        (part(call, names),), (tangents,)
    )
    want_out, want_lse = oracle.tangent(call, tangents)
    rtol = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 5e-3}[dtype]
    assert t_out.dtype == dtype
    assert_close(t_out, want_out, rtol * np.abs(want_out).max(), "t_out")
    assert_close(t_lse, want_lse, rtol * max(np.abs(want_lse).max(), 1.0), "t_lse")


def test_jvp_of_rows_without_keys_is_zero(implementation, working_dtype):
    call = make_call(12, 9, dtype=working_dtype, is_causal=True, query_offset=-5)
    call["query_seq_lengths"] = np.array([12, 8], np.int32)
    function = attention(call, implementation)
    _, (t_out, t_lse) = jax.jvp(
        jax.jit(function), (part(call, QKV),), (directions(call, QKV),)
    )
    for t in (np.asarray(t_out), np.asarray(t_lse)):
        assert np.all(np.isfinite(t))
        assert np.all(t[:, :5] == 0)
        assert np.all(t[1, 8:] == 0)
        assert np.all(np.any(t[0, 5:] != 0, axis=0))


def test_linearize_agrees_with_jvp(implementation, call, working_dtype):
    function = attention(call, implementation)
    primals, tangents = part(call, QKV), directions(call, QKV)
    out, want = jax.jvp(function, (primals,), (tangents,))
    linear_out, linear = jax.linearize(function, primals)
    assert_trees_close(linear_out, out, working_dtype)
    assert_trees_close(linear(tangents), want, working_dtype)


def test_vjp_is_the_transpose_of_jvp(implementation, call, working_dtype):
    function = attention(call, implementation)
    names = (*QKV, "scale")
    primals, tangents = part(call, names), directions(call, names)
    d_out, d_lse = cotangents(call)
    _, (t_out, t_lse) = jax.jvp(function, (primals,), (tangents,))
    (grads,) = jax.vjp(function, primals)[1]((jnp.asarray(d_out), jnp.asarray(d_lse)))
    left = [np.asarray(t, float) * ct for t, ct in ((t_out, d_out), (t_lse, d_lse))]
    right = [np.asarray(grads[name], float) * tangents[name] for name in names]
    size = sum(np.abs(x).sum() for x in left)
    atol = TOLERANCE[working_dtype] * size
    assert_close(sum(x.sum() for x in left), sum(x.sum() for x in right), atol)


@pytest.mark.parametrize("transform", [jax.jacfwd, jax.jacrev])
def test_jacobians(implementation, call, working_dtype, transform):
    # jacrev needs one dtype for all outputs.
    def of_outputs(inputs):
        outputs = attention(call, implementation)(inputs)
        return jax.tree.map(lambda x: x.astype("float32"), outputs)

    jacobian = jax.jit(transform(of_outputs))
    want = jax.jit(transform(lambda x: xla_attention(in_float32(call) | x)))
    got = jacobian(part(call, ("query",)))
    reference = want(part(in_float32(call), ("query",)))
    assert_trees_close(got, reference, working_dtype)


def hvp_forward_over_reverse(loss, x, t):
    return jax.jvp(jax.grad(loss), (x,), (t,))[1]


def hvp_reverse_over_reverse(loss, x, t):
    def along(x):
        grad = jax.grad(loss)(x)
        wide = {n: (grad[n].astype("float32"), t[n].astype("float32")) for n in grad}
        return sum(jnp.vdot(*pair) for pair in wide.values())

    return jax.grad(along)(x)


def hvp_reverse_over_forward(loss, x, t):
    return jax.grad(lambda x: jax.jvp(loss, (x,), (t,))[1])(x)


HVPS = [hvp_forward_over_reverse, hvp_reverse_over_reverse, hvp_reverse_over_forward]


@pytest.mark.parametrize("hvp", HVPS)
@pytest.mark.parametrize("names", [("query",), (*QKV, "scale")], ids="-".join)
def test_hessian_vector_products(implementation, call, working_dtype, hvp, names):
    wide, tangents = in_float32(call), directions(call, names)
    loss = scalar(attention(call, implementation))
    got = jax.jit(functools.partial(hvp, loss))(part(call, names), tangents)
    loss = scalar(lambda x: xla_attention(wide | x))
    tangents = {name: t.astype(np.float32) for name, t in tangents.items()}
    want = jax.jit(functools.partial(hvp, loss))(part(wide, names), tangents)
    assert_trees_close(got, want, working_dtype, factor=5.0)


def test_second_order_forward_mode(implementation, call, working_dtype):
    def second(function, x, t):
        along = lambda x: jax.jvp(function, (x,), (t,))[1]  # noqa: E731
        return jax.jvp(along, (x,), (t,))[1]

    tangents = directions(call, QKV)
    function = attention(call, implementation)
    got = jax.jit(functools.partial(second, function))(part(call, QKV), tangents)
    wide = in_float32(call)
    tangents = {name: t.astype(np.float32) for name, t in tangents.items()}
    want = second(lambda x: xla_attention(wide | x), part(wide, QKV), tangents)
    assert_trees_close(got, want, working_dtype, factor=5.0)


@pytest.mark.parametrize("arguments", [{}, {"is_causal": True}, {"K": 1}], ids=str)
def test_hessian(implementation, working_dtype, arguments):
    call = make_call(4, 5, batch=(1,), N=2, H=3, dtype=working_dtype, **arguments)
    hessian = jax.jit(jax.hessian(scalar(attention(call, implementation))))
    got = hessian(part(call, QKV))
    wide = in_float32(call)
    hessian = jax.jit(jax.hessian(scalar(lambda x: xla_attention(wide | x))))
    assert_trees_close(got, hessian(part(wide, QKV)), working_dtype, factor=5.0)


@pytest.mark.implementations("reference", "cpu")
def test_third_derivative(implementation, call, working_dtype):
    def third(function, x):
        return jax.jit(jax.grad(jax.grad(jax.grad(function))))(x)

    def of_scale(function):
        loss = scalar(function)
        return lambda s: loss({"scale": s})

    scale = jnp.float32(0.4)
    got = third(of_scale(attention(call, implementation)), scale)
    want = third(of_scale(lambda x: xla_attention(call | x)), scale)
    assert_trees_close(got, want, working_dtype, factor=50.0)


@pytest.mark.implementations("reference", "cpu")
@pytest.mark.parametrize("mode", ["fwd", "rev"])
def test_check_grads_of_second_order(implementation, call, mode):
    loss = jax.jit(scalar(attention(call, implementation)))
    check_grads(loss, (part(call, QKV),), 2, modes=[mode], atol=0.03, rtol=0.03)


def test_jit_and_eager_agree(implementation, call, working_dtype):
    function, inputs = attention(call, implementation), part(call, QKV)
    eager, compiled = function(inputs), jax.jit(function)(inputs)
    for got, want in zip(eager, compiled, strict=True):
        np.testing.assert_array_equal(got, want)


def test_grad_of_a_mapped_integer_argument_is_float0(implementation, call):
    inputs = part(call, ("query", "key_value_seq_lengths"))
    loss = scalar(attention(call, implementation))
    grads = jax.grad(loss, allow_int=True)(inputs)
    assert grads["key_value_seq_lengths"].dtype == jax.dtypes.float0
    assert np.any(np.asarray(grads["query"]) != 0)


def test_transformed_shapes_come_without_running(implementation, call):
    function, inputs = attention(call, implementation), part(call, QKV)
    out, lse = jax.eval_shape(function, inputs)
    assert (out.shape, out.dtype) == ((1, 9, 4, 8), call["query"].dtype)
    assert (lse.shape, lse.dtype) == ((1, 9, 4), np.float32)
    grads = jax.eval_shape(jax.grad(scalar(function)), inputs)
    assert jax.tree.map(lambda x: x.shape, grads) == {n: call[n].shape for n in QKV}
