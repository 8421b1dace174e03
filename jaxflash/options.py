"""Checks of the public functions' static arguments, which are known at trace time.

Every error names the argument, what was expected and what came.
"""

import numbers
import operator
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jaxflash.spec import UNLIMITED

_PRECISIONS = {
    None: 0,
    "highest": 0,
    "float32": 0,
    jax.lax.Precision.HIGHEST: 0,
    jax.lax.DotAlgorithmPreset.F32_F32_F32: 0,
    "high": 1,
    "bfloat16_3x": 1,
    jax.lax.Precision.HIGH: 1,
    jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3: 1,
    "default": 2,
    "tensorfloat32": 2,
    jax.lax.Precision.DEFAULT: 2,
    jax.lax.DotAlgorithmPreset.TF32_TF32_F32: 2,
}


_FLOAT32_MIN = float(np.finfo(np.float32).tiny)
_FLOAT32_MAX = float(np.finfo(np.float32).max)


def flag(name: str, x: Any) -> bool:
    """A static bool."""
    if not isinstance(x, bool | np.bool_):
        raise TypeError(f"{name} must be a Python bool, got {x!r}")
    return bool(x)


def window(x: Any) -> tuple[int, int]:
    """(left, right), -1 where unlimited."""
    expected = "an int or a pair (left, right) of int or None"
    error = TypeError(f"local_window_size must be {expected}, got {x!r}")
    if x is None:
        return UNLIMITED, UNLIMITED
    sides = tuple(x) if isinstance(x, tuple | list) else (x, x)
    if len(sides) != 2:
        raise error
    result = []
    for side in sides:
        if side is None:
            result.append(UNLIMITED)
            continue
        if isinstance(side, bool | Tracer):
            raise error
        try:
            result.append(operator.index(side))
        except TypeError:
            raise error from None
        if result[-1] < 0:
            raise ValueError(
                f"local_window_size must not be negative, got {x!r}; None is unlimited"
            )
    return result[0], result[1]


def number(name: str, x: Any) -> float:
    """A Python number that a float holds."""
    if isinstance(x, bool) or not isinstance(x, numbers.Real):
        raise TypeError(f"{name} must be a Python number, got {x!r}")
    try:
        return float(x)
    except OverflowError:
        raise ValueError(f"{name} must be a finite number, got {x!r}") from None


def softcap(x: Any) -> float:
    """A positive Python number, or None for none; 0 = off in the result."""
    if x is None:
        return 0.0
    value = number("softcap", x)
    if not _FLOAT32_MIN <= value <= _FLOAT32_MAX:
        raise ValueError(
            f"softcap must be finite and greater than 0 in float32, got {value}"
        )
    # From here on scores / softcap would lose bits or be flushed to 0. A score that is
    # changed by such a cap would be over 1e26.
    return value if value < 2.0**100 else 0.0


def precision(x: Any) -> int:
    """The number of a precision, or of a pair of equal ones, in jaxflash.spec.Spec."""
    sides = x if isinstance(x, tuple | list) and len(x) == 2 else (x, x)
    try:
        first, second = (_PRECISIONS[side] for side in sides)
    except (KeyError, TypeError):
        names = sorted({str(name) for name in _PRECISIONS if isinstance(name, str)})
        raise ValueError(
            f"precision must be None, a jax.lax.Precision, one of {names} or a pair of "
            f"equal ones, got {x!r}"
        ) from None
    if first != second:
        raise ValueError(
            f"precision must be the same for both operands of a product, got {x!r}"
        )
    return first
