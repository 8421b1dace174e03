"""Programs exported for symbolic shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import make_call
from jax import export

from jaxflash import dot_product_attention


def exported(shapes, implementation, order=0):
    """A call or its gradient, and its export for symbolic shapes of query and key."""
    scope = export.SymbolicScope()
    specs = [
        jax.ShapeDtypeStruct(export.symbolic_shape(shape, scope=scope), jnp.float32)
        for shape in shapes
    ]

    def attention(q, kv):
        return dot_product_attention(
            q, kv, kv, is_causal=True, implementation=implementation
        )

    def slope(q, kv):
        return jax.grad(lambda *x: attention(*x).sum(), (0, 1))(q, kv)

    function = jax.jit(slope if order else attention)
    return function, export.export(function)(*specs)


@pytest.mark.parametrize("order", [0, 1])
def test_reference_with_symbolic_batch_and_queries(order):
    shapes = ("b, t, 4, 8", "b, 70, 4, 8")
    function, program = exported(shapes, "reference", order)
    call = make_call(9, 70, batch=(3,), N=4, H=8)
    got = program.call(call["query"], call["key"])
    want = function(call["query"], call["key"])
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("backend", "shapes", "name"),
    [
        ("cpu", ("b, 9, 4, 8", "b, 7, 4, 8"), "query"),
        ("cpu", ("2, 9, 4, 8", "2, s, 4, 8"), "key"),
        ("reference", ("2, 9, 4, 8", "2, s, 4, 8"), "key"),
    ],
)
def test_what_may_not_be_symbolic_is_named(backend, shapes, name):
    with pytest.raises(NotImplementedError, match=f"{name} .*[bs]"):
        exported(shapes, backend)
