"""What an attention call is: its static half, its operands, and who can serve it."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

# Axes of each operand after its leading batch axes. Letters: T query length, S
# key/value length, N query heads, K key/value heads, H query/key head dim, V value
# head dim. Axes of bias and mask may also have size 1.
CORE_AXES: dict[str, str] = {
    "query": "TNH",
    "key": "SKH",
    "value": "SKV",
    "scale": "",
    "query_offset": "",
    "query_seq_lengths": "",
    "key_value_seq_lengths": "",
    "bias": "NTS",
    "mask": "NTS",
    "query_segment_ids": "T",
    "key_value_segment_ids": "S",
    "sinks": "N",
    "alibi_slopes": "N",
    "dropout_seed": "2",
    "out": "TNV",
    "lse": "NT",
    "out_low": "TNV",
    "d_out": "TNV",
    "d_lse": "NT",
}
DIFFERENTIABLE = ("query", "key", "value", "scale", "bias", "sinks", "alibi_slopes")

# Offsets are clamped to this, so that i + query_offset never leaves int32.
MAX_OFFSET = 2**30
MAX_WINDOW = 2**31 - 1  # no |j - (i + query_offset)| is larger
UNLIMITED = -1


@dataclasses.dataclass(frozen=True)
class Spec:
    """The static parameter of every primitive.

    JAX caches by ==, and 1 == 1.0 == True, so every field is cast to its one type.

    Attributes:
        operands: names of the forward pass's array operands, in order.
        is_causal: hide j > i + query_offset.
        window_left: hide j < i + query_offset - window_left; -1 = unlimited.
        window_right: hide j > i + query_offset + window_right; -1 = unlimited.
        softcap: scores become softcap * tanh(scores / softcap); 0 = off.
        dropout_rate: probability of dropping an attention weight; 0 = off.
        precision: products of float32 inputs: 0 float32-class, 1 three bfloat16
            products, 2 one TF32 product.
        deterministic: gradients are the same bits in every run.
        implementation: "cuda", "cpu", "reference", or None for the best that serves.
    """

    operands: tuple[str, ...]
    is_causal: bool = False
    window_left: int = UNLIMITED
    window_right: int = UNLIMITED
    softcap: float = 0.0
    dropout_rate: float = 0.0
    precision: int = 0
    deterministic: bool = False
    implementation: str | None = None

    def __post_init__(self):
        """Casts every field to its one type, and causality to its one spelling."""
        cast = {"operands": tuple, "implementation": lambda name: name}
        for field in dataclasses.fields(self):
            to = cast.get(field.name, field.type)
            object.__setattr__(self, field.name, to(getattr(self, field.name)))
        object.__setattr__(self, "dropout_rate", _float32_rate(self.dropout_rate))
        for side in ("window_left", "window_right"):
            object.__setattr__(self, side, min(getattr(self, side), MAX_WINDOW))
        # A window that ends at the diagonal is causality, and causality covers every
        # wider right side.
        if self.is_causal or self.window_right == 0:
            object.__setattr__(self, "is_causal", True)
            object.__setattr__(self, "window_right", UNLIMITED)


def _float32_rate(rate: float) -> float:
    """The rate as the C API has it, so that every backend drops the same weights."""
    largest = np.nextafter(np.float32(1), np.float32(0))
    return float(min(np.float32(rate), largest))


@dataclasses.dataclass(frozen=True)
class Kernels:
    """What the kernels of one backend serve; Python asks no other table.

    The library refuses the same calls by its own (Support in csrc/api/validate.h).
    """

    dtypes: tuple[str, ...]
    operands: tuple[str, ...]
    max_head_dim: int
    window: bool = False
    softcap: bool = False
    value_head_dim: bool = False  # other than query's

    def refusal(
        self, spec: Spec, dtype: str, head_dim: int, value_head_dim: int
    ) -> str | None:
        """The first thing about a call that these kernels do not serve, or None."""
        for name in spec.operands:
            if name not in self.operands:
                return "dropout_rate" if name == "dropout_seed" else name
        windows = (spec.window_left, spec.window_right)
        if windows != (UNLIMITED, UNLIMITED) and not self.window:
            return "local_window_size"
        if spec.softcap and not self.softcap:
            return "softcap"
        if dtype not in self.dtypes:
            return f"query of dtype {dtype}"
        if head_dim > self.max_head_dim:
            return f"query with head dim H = {head_dim}"
        if value_head_dim > self.max_head_dim:
            return f"value with head dim Hv = {value_head_dim}"
        if head_dim != value_head_dim and not self.value_head_dim:
            return (
                "value with a head dim other than query's "
                f"({value_head_dim} != {head_dim})"
            )
        return None

    def describe(self) -> str:
        """What works, for error texts."""
        options = {"local_window_size": self.window, "softcap": self.softcap}
        served = [*self.operands, "is_causal", *(x for x in options if options[x])]
        served = ["dropout_rate" if x == "dropout_seed" else x for x in served]
        return (
            f"{', '.join(self.dtypes)} with{'' if self.value_head_dim else ' equal'} "
            f"head dims from 1 to {self.max_head_dim} and the arguments "
            f"{', '.join(served)}"
        )


_COMMON_OPERANDS = (
    "query",
    "key",
    "value",
    "scale",
    "query_offset",
    "query_seq_lengths",
    "key_value_seq_lengths",
)
KERNELS: dict[str, Kernels] = {
    "cpu": Kernels(
        ("float32", "bfloat16", "float16"),
        (
            *_COMMON_OPERANDS,
            "bias",
            "mask",
            "query_segment_ids",
            "key_value_segment_ids",
            "sinks",
            "alibi_slopes",
            "dropout_seed",
        ),
        256,
        window=True,
        softcap=True,
        value_head_dim=True,
    ),
    "cuda": Kernels(("bfloat16", "float16"), _COMMON_OPERANDS, 256),
}
IMPLEMENTATIONS = (*KERNELS, "reference")


def core_rank(name: str) -> int:
    """Number of axes that operand `name` has after its batch axes."""
    return len(CORE_AXES[name])


def lead(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The leading batch axes of operand `name`."""
    return tuple(shape[: len(shape) - core_rank(name)])


def batch_shape(
    names: Sequence[str], shapes: Sequence[Sequence[int]]
) -> tuple[int, ...]:
    """Broadcast of the right-aligned batch axes of all operands."""
    leads = [lead(name, shape) for name, shape in zip(names, shapes, strict=True)]
    rank = max(map(len, leads))
    batch = []
    for axis in range(-rank, 0):
        sizes = {shape[axis] for shape in leads if len(shape) >= -axis} - {1}
        if len(sizes) > 1:
            raise ValueError(f"batch axes do not broadcast: {leads}")
        batch.append(sizes.pop() if sizes else 1)
    return tuple(batch)


def residuals(dtype) -> tuple[str, ...]:
    """What the forward pass hands to its derivative.

    out_low is what rounding took from a 16-bit out, eight bits of each element: delta =
    rowsum(d_out out) needs them, since its error is common to all keys of a row.
    """
    if jnp.dtype(dtype).itemsize == 2:
        return ("out", "lse", "out_low")
    return ("out", "lse")


def accumulator(dtype) -> jnp.dtype:
    """Dtype of scores, sums and lse: float32, or float64 for float64 inputs."""
    wide = jnp.dtype(dtype) == jnp.dtype("float64")
    return jnp.dtype("float64" if wide else "float32")
