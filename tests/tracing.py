"""Looking into jaxprs."""

from collections.abc import Iterator
from typing import Any

import jax


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr, those of nested jaxprs included."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for equation in jaxpr.eqns:
        yield equation
        for nested in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(nested, "eqns") or hasattr(nested, "jaxpr"):
                yield from equations(nested)


def count(jaxpr: Any, primitive: str) -> int:
    return sum(e.primitive.name == primitive for e in equations(jaxpr))
