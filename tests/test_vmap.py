"""vmap over any subset of the operands, against a Python loop over the examples."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import QKV, cotangents, make_call
from compare import assert_close, assert_equal
from tracing import equations

from jaxflash import dot_product_attention

COUNT = 3
OPERANDS = (*QKV, "scale", "query_offset", "query_seq_lengths", "key_value_seq_lengths")
SUBSETS = [s for n in (1, 2, 3) for s in itertools.combinations(QKV, n)]
SUBSETS += [(name,) for name in OPERANDS[3:]]
SUBSETS += [("query", "scale", "query_seq_lengths"), ("key", "query_offset"), OPERANDS]
TOLERANCE = {"float32": 3e-6, "float16": 3e-3}


def examples(dtype, mapped, count=COUNT, **shape):
    """One call, and `count` versions of its mapped operands stacked on axis 0."""

    def one(seed):
        rng = np.random.default_rng(seed)
        return make_call(9, 11, K=2, H=8, dtype=dtype, seed=seed, **shape) | {
            "scale": np.asarray(rng.random(), np.float32),
            "query_offset": np.asarray(rng.integers(-3, 6), np.int32),
            "query_seq_lengths": rng.integers(0, 10, 2).astype(np.int32),
            "key_value_seq_lengths": rng.integers(0, 12, 2).astype(np.int32),
        }

    calls = [one(seed) for seed in range(count)]
    stacks = {name: np.stack([call[name] for call in calls]) for name in mapped}
    return calls[0], stacks


def attention(call, implementation):
    return lambda inputs: dot_product_attention(
        **(call | inputs),
        is_causal=True,
        deterministic=True,
        implementation=implementation,
        return_residual=True,
    )


def pulled_back(function, inputs, cts):
    return jax.vjp(function, inputs)[1](cts)[0]


def loop(function, stacks, *more):
    """The stacked results of function, one example at a time."""
    compiled = jax.jit(function)
    count = len(next(iter(stacks.values())))
    results = [
        compiled(jax.tree.map(lambda x, n=n: x[n], stacks), *(m[n] for m in more))
        for n in range(count)
    ]
    return jax.tree.map(lambda *x: np.stack(x), *results)


def check_trees(got, want, dtype):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, leaf), target in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        if target.dtype == jax.dtypes.float0:
            continue
        wide = np.asarray(target, np.float64)
        size = np.abs(wide[np.isfinite(wide)]).max(initial=0.0)
        name = jax.tree_util.keystr(path)
        assert_close(leaf, target, TOLERANCE[dtype] * size, name)


@pytest.mark.parametrize("mapped", SUBSETS, ids="-".join)
def test_vmap_equals_a_loop(implementation, working_dtype, mapped):
    call, stacks = examples(working_dtype, mapped)
    function = attention(call, implementation)
    got = jax.jit(jax.vmap(function))(stacks)
    check_trees(got, loop(function, stacks), working_dtype)


@pytest.mark.parametrize("mapped", SUBSETS[:7], ids="-".join)
def test_vmap_of_grad_gives_each_example_its_own_gradient(
    implementation, working_dtype, mapped
):
    call, stacks = examples(working_dtype, mapped)
    d_out, d_lse = (x[0] for x in (np.asarray(c)[None] for c in cotangents(call)))
    shared = {name: call[name] for name in (*QKV, "scale") if name not in stacks}

    def grads(inputs):
        function = attention(call, implementation)
        return pulled_back(function, shared | inputs, (d_out, d_lse))

    got = jax.jit(jax.vmap(grads))(stacks)
    check_trees(got, loop(grads, stacks), working_dtype)


@pytest.mark.parametrize("mapped", SUBSETS[:7], ids="-".join)
def test_grad_of_vmap_sums_over_examples_of_shared_operands(
    implementation, working_dtype, mapped
):
    call, stacks = examples(working_dtype, mapped)
    single = cotangents(call)
    cts = tuple(np.stack([(n + 1) * x for n in range(COUNT)]) for x in single)
    cts = tuple(c.astype(s.dtype) for c, s in zip(cts, single, strict=True))
    shared = {name: call[name] for name in (*QKV, "scale") if name not in stacks}

    def mapped_attention(inputs):
        stacks, shared = inputs
        return jax.vmap(lambda x: attention(call | shared, implementation)(x))(stacks)

    got, got_shared = jax.jit(
        lambda inputs: pulled_back(mapped_attention, inputs, cts)
    )((stacks, shared))

    def one(inputs, d_out, d_lse):
        function = attention(call, implementation)
        return pulled_back(function, shared | inputs, (d_out, d_lse))

    want = loop(one, stacks, *cts)
    check_trees(got, {name: want[name] for name in stacks}, working_dtype)
    for name in shared:
        # The sum runs in float32, so the loop's rounded terms are the larger error.
        total = np.asarray(want[name], np.float64).sum(0)
        assert got_shared[name].dtype == np.asarray(call[name]).dtype
        atol = TOLERANCE[working_dtype] * np.abs(want[name]).max() * COUNT
        assert_close(got_shared[name], total, float(atol), name)


@pytest.mark.parametrize("mapped", SUBSETS[:7], ids="-".join)
def test_jvp_of_vmap(implementation, working_dtype, mapped):
    call, stacks = examples(working_dtype, mapped)
    rng = np.random.default_rng(3)
    tangents = {
        name: rng.standard_normal(x.shape).astype(x.dtype) for name, x in stacks.items()
    }
    function = attention(call, implementation)

    def push(inputs, tangents):
        return jax.jvp(function, (inputs,), (tangents,))[1]

    got = jax.jit(lambda x, t: jax.jvp(jax.vmap(function), (x,), (t,))[1])
    want = jax.jit(jax.vmap(push))
    check_trees(got(stacks, tangents), want(stacks, tangents), working_dtype)
    examples_of = [jax.tree.map(lambda x, n=n: x[n], tangents) for n in range(COUNT)]
    one = jax.jit(push)(jax.tree.map(lambda x: x[1], stacks), examples_of[1])
    middle = jax.tree.map(lambda x: x[1], want(stacks, tangents))
    check_trees(middle, jax.tree.map(np.asarray, one), working_dtype)


def test_batched_cotangents_alone(implementation, working_dtype):
    call, _ = examples(working_dtype, ())
    d_out, d_lse = cotangents(call)
    cts = tuple(np.stack([x, -x, 0 * x]) for x in (d_out, d_lse))
    inputs = {name: jnp.asarray(call[name]) for name in QKV}
    _, pullback = jax.vjp(attention(call, implementation), inputs)
    (got,) = jax.jit(jax.vmap(pullback))(cts)
    want = [jax.jit(pullback)(tuple(c[n] for c in cts))[0] for n in range(3)]
    want = jax.tree.map(lambda *x: np.stack(x), *want)
    check_trees(got, want, working_dtype)
    for name in QKV:
        assert np.all(np.asarray(got[name][2]) == 0)
        assert_equal(np.asarray(got[name][1]), -np.asarray(got[name][0]))


@pytest.mark.parametrize("axes", [(1, 2, 0), (-1, 0, 1), (2, None, 1), (None, 3, None)])
def test_vmap_over_inner_axes(implementation, working_dtype, axes):
    mapped = [name for name, axis in zip(QKV, axes, strict=True) if axis is not None]
    call, stacks = examples(working_dtype, mapped)
    function = attention(call, implementation)
    moved = [
        call[name] if axis is None else np.moveaxis(stacks[name], 0, axis)
        for name, axis in zip(QKV, axes, strict=True)
    ]

    def positional(*qkv):
        return function(dict(zip(QKV, qkv, strict=True)))

    got = jax.jit(jax.vmap(positional, axes, out_axes=(1, -1)))(*moved)
    out, lse = loop(function, stacks)
    want = (np.moveaxis(out, 0, 1), np.moveaxis(lse, 0, -1))
    check_trees(got, want, working_dtype)


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        (("query",), ("key",)),
        (("key", "value"), ("query",)),
        (QKV, ("query", "key_value_seq_lengths")),
        (("scale",), QKV),
    ],
    ids=str,
)
def test_nested_vmap(implementation, working_dtype, outer, inner):
    names = tuple(dict.fromkeys((*outer, *inner)))
    sizes = {name: 2 if name in outer and name in inner else 1 for name in names}
    call, stacks = examples(working_dtype, names, count=6)
    stacks = {
        name: x.reshape(3, 2, *x.shape[1:])
        if sizes[name] == 2
        else x[:3]
        if name in outer
        else x[:2]
        for name, x in stacks.items()
    }
    function = attention(call, implementation)
    inner_axes = ({name: 0 if name in inner else None for name in names},)
    outer_axes = ({name: 0 if name in outer else None for name in names},)
    nested = jax.vmap(jax.vmap(function, inner_axes), outer_axes)
    got = jax.jit(nested)(stacks)

    compiled = jax.jit(function)

    def pick(name, i, j):
        x = stacks[name][i] if name in outer else stacks[name]
        return x[j] if name in inner else x

    rows = [
        [compiled({name: pick(name, i, j) for name in names}) for j in range(2)]
        for i in range(3)
    ]
    want = tuple(np.stack([[r[n] for r in row] for row in rows]) for n in range(2))
    check_trees(got, want, working_dtype)


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("mapped", SUBSETS[:6], ids="-".join)
def test_vmap_copies_no_unmapped_operand(implementation, working_dtype, mapped, batch):
    call = make_call(9, 11, batch=batch, K=2, H=8, dtype=working_dtype)
    stacks = {name: np.stack([call[name]] * COUNT) for name in mapped}
    unmapped = [name for name in QKV if name not in mapped]
    shared = {name: call[name] for name in unmapped}

    def mapped_attention(stacks, shared):
        return jax.vmap(lambda x: attention(shared, implementation)(x))(stacks)

    jaxpr = jax.make_jaxpr(mapped_attention)(stacks, shared)
    (forward,) = [
        e for e in equations(jaxpr) if e.primitive.name == "attention_forward"
    ]
    sizes = [v.aval.size for v in forward.invars[:3]]
    for name, size in zip(QKV, sizes, strict=True):
        assert size == call[name].size * (COUNT if name in mapped else 1), name


def test_vmap_with_a_named_axis(implementation, working_dtype):
    call, stacks = examples(working_dtype, ("query",))
    function = attention(call, implementation)

    def summed(inputs):
        return jax.tree.map(lambda x: jax.lax.psum(x, "n"), function(inputs))

    out, _ = jax.jit(jax.vmap(summed, axis_name="n"))(stacks)
    want, _ = loop(function, stacks)
    total = np.broadcast_to(want.astype(np.float64).sum(0), out.shape)
    assert_close(out, total, TOLERANCE[working_dtype] * 4, "out")


def test_more_alternating_axes_than_kernels_walk(implementation, working_dtype):
    """Eight vmaps in turns over keys and over queries: no two of the axes merge."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), working_dtype)  # noqa: E731
    qs, ks, vs = (
        draw(*[2] * 4, 3, 2, 4),
        draw(*[2] * 4, 3, 1, 4),
        draw(*[2] * 4, 3, 1, 4),
    )

    def attention(q, k, v):
        return dot_product_attention(q, k, v, implementation=implementation)

    nested = attention
    for _ in range(4):
        nested = jax.vmap(jax.vmap(nested, (0, None, None)), (None, 0, 0))

    def copied(qs, ks, vs):
        qs = qs[None, :, None, :, None, :, None, :]
        ks, vs = (x[:, None, :, None, :, None, :, None] for x in (ks, vs))
        return attention(
            *(jnp.broadcast_to(x, (*[2] * 8, *x.shape[8:])) for x in (qs, ks, vs))
        )

    def results(function):
        def loss(*qkv):
            return (function(*qkv).astype(jnp.float32) ** 2).sum()

        step = lambda *qkv: (function(*qkv), jax.grad(loss, (0, 1, 2))(*qkv))  # noqa: E731
        return jax.jit(step)(qs, ks, vs)

    got, want = results(nested), results(copied)
    for leaf, target in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        target = np.asarray(target, np.float64)
        size = np.abs(target).max()
        assert_close(leaf, target, 2 * TOLERANCE[working_dtype] * size)
