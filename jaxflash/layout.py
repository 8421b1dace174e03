"""How the reference arranges arrays: scores [*batch, K, G, T, S] with N = K * G.

Batch axes are aligned to one rank, with size 1 where an operand does not vary, so that
everything broadcasts against scores:

    query  [*batch, T, K, G, H]         out, d_out                [*batch, K, G, T, Hv]
    key    [*batch, S, K, H]            lse, d_lse                [*batch, K, G, T, 1]
    value  [*batch, S, K, Hv]           sinks, alibi_slopes       [*batch, K, G, 1, 1]
    bias, mask  [*batch, K|1, G|1, T|1, S|1]
    query_segment_ids  [*batch, 1, 1, T, 1]      scale, lengths, offset: all core axes 1
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxflash import compat
from jaxflash.spec import Spec, accumulator, batch_shape, core_rank, lead

Arrays = dict[str, Array]

# Arrays that are cut into blocks of keys, and the axis that is cut.
_KEY_AXIS: dict[str, int] = {
    **{name: -3 for name in ("key", "value", "raw_value", "t_key", "t_value")},
    **{name: -1 for name in ("bias", "t_bias", "mask", "key_taint")},
    "key_value_segment_ids": -1,
}
# Scores in one block of keys: bounds the temporaries of a step to some 64 MB.
_BLOCK_ELEMENTS = 2**24
_MIN_BLOCK, _MAX_BLOCK = 32, 512

_PRECISION = (lax.Precision.HIGHEST, lax.Precision.HIGH, lax.Precision.DEFAULT)


class Call:
    """One call: its spec and sizes, and how its arrays enter and leave the layout.

    Names that start with "t_" are tangents, arranged like what they are tangents of.
    """

    def __init__(self, spec: Spec, names: Sequence[str], arrays: Sequence[Array]):
        """Takes the arrays of a primitive and what each of them is."""
        self.spec = spec
        self.given = dict(zip(names, arrays, strict=True))
        # The reference sums again whatever rounding took something from.
        self.given.pop("out_low", None)
        kinds = [name.removeprefix("t_") for name in self.given]
        self.batch = batch_shape(kinds, [x.shape for x in self.given.values()])
        self.dtype = self.given["query"].dtype
        self.wide = accumulator(self.dtype)
        self.q_len, self.num_heads, _ = self.given["query"].shape[-3:]
        self.kv_len, self.num_kv_heads, _ = self.given["key"].shape[-3:]
        self.value_dim = self.given["value"].shape[-1]
        self.heads = self.num_kv_heads, self.num_heads // max(self.num_kv_heads, 1)
        self.rows = (*self.batch, *self.heads, self.q_len)

    def _core(self, kind: str, core: tuple[int, ...]) -> tuple[int, ...]:
        match kind:
            case "query" | "out" | "d_out":
                return (core[0], *self.heads, core[2])
            case "key" | "value":
                return core
            case "bias" | "mask":
                heads = self.heads if core[0] == self.num_heads else (1, 1)
                return (*heads, *core[1:])
            case "lse" | "d_lse":
                return (*self.heads, core[1], 1)
            case "sinks" | "alibi_slopes":
                return (*self.heads, 1, 1)
            case "query_segment_ids":
                return (1, 1, core[0], 1)
            case "key_value_segment_ids":
                return (1, 1, 1, core[0])
        return (1, 1, 1, 1, *core)

    def _arrange(self, kind: str, array: Array) -> Array:
        batch = lead(kind, array.shape)
        pad = (1,) * (len(self.batch) - len(batch))
        return array.reshape(*pad, *batch, *self._core(kind, array.shape[len(batch) :]))

    def _enter(self, name: str, array: Array) -> Array:
        kind = name.removeprefix("t_")
        array = self._arrange(kind, array)
        if kind in ("query", "key", "value"):
            # NaN times a weight of zero is NaN: what is not finite stays out of every
            # product, and taints put it back where it is seen.
            finite = jnp.isfinite(self._arrange(kind, self.given[kind]))
            array = jnp.where(finite, array, jnp.zeros_like(array))
        if jnp.issubdtype(array.dtype, jnp.floating):
            array = array.astype(self.wide)
        return jnp.moveaxis(array, -4, -2) if kind in ("out", "d_out") else array

    def enter(self) -> Arrays:
        """All arrays, arranged and widened, and three more.

        query_taint and key_taint are NaN for rows and keys that are not finite, else 0;
        raw_value is the value with what is not finite.
        """
        x = {name: self._enter(name, array) for name, array in self.given.items()}
        q, k, x["raw_value"] = (
            self._arrange(name, self.given[name]) for name in ("query", "key", "value")
        )
        q_taint, k_taint = (
            jnp.where(jnp.isfinite(array).all(-1), 0, jnp.nan).astype(self.wide)
            for array in (q, k)
        )
        # A scale of NaN makes every row one that is not finite.
        no_scale = jnp.isnan(x["scale"])
        x["scale"] = jnp.where(no_scale, jnp.zeros_like(x["scale"]), x["scale"])
        x["query_taint"] = jnp.where(
            no_scale, jnp.nan, jnp.moveaxis(q_taint, -3, -1)[..., None]
        )
        x["key_taint"] = jnp.swapaxes(k_taint, -1, -2)[..., None, None, :]
        return x

    def leave(self, out: Array, lse: Array) -> tuple[Array, Array]:
        """Results of the whole batch shape, as the primitives return them."""
        out = jnp.moveaxis(out, -2, -4).astype(self.dtype)
        shape = (*self.batch, self.q_len, self.num_heads)
        return (
            out.reshape(*shape, self.value_dim),
            lse.reshape(*self.batch, self.num_heads, self.q_len),
        )

    def leave_gradient(self, name: str, grad: Array) -> Array:
        """A gradient in the core shape and dtype of its operand."""
        given = self.given[name]
        core = given.shape[given.ndim - core_rank(name) :]
        batch = grad.shape[: len(self.batch)]
        return grad.reshape(*batch, *core).astype(given.dtype)

    def einsum(self, subscripts: str, *arrays: Array) -> Array:
        """A product of widened arrays."""
        # 16-bit inputs were widened without loss, so one TF32 pass multiplies them
        # exactly; only float32 inputs need the products of several.
        narrow = jnp.finfo(self.dtype).bits == 16
        precision = _PRECISION[-1 if narrow else self.spec.precision]
        return jnp.einsum(subscripts, *arrays, precision=precision)

    def round(self, p: Array) -> Array:
        """Weights as the kernels multiply them: rounded to the input dtype.

        To its mantissa: with its exponent too, reduce_precision would make zeros of the
        subnormal numbers of float16, which a weight among 16,384 is.
        """
        if self.dtype == self.wide:
            return p
        nexp = jnp.finfo(self.wide).nexp
        return lax.reduce_precision(p, nexp, jnp.finfo(self.dtype).nmant)

    def positions(self, x: Arrays, j: Array) -> tuple[Array, Array, Array]:
        """Query index i, key index j and j - (i + query_offset), ready to broadcast."""
        ones = (1,) * (len(self.rows) - 1)
        i = jnp.arange(self.q_len, dtype=jnp.int32).reshape(*ones, -1, 1)
        j = j.reshape(*ones, 1, -1)
        offset = x.get("query_offset", jnp.zeros((1,) * i.ndim, jnp.int32))
        return i, j, j - i - offset

    def distance(self, x: Arrays, j: Array) -> Array:
        """|i + query_offset - j| as a float."""
        return jnp.abs(self.positions(x, j)[2]).astype(self.wide)

    def padded(self, x: Arrays) -> Array:
        """Rows past the query length."""
        i, _, _ = self.positions(x, jnp.zeros(1, jnp.int32))
        return i >= x.get("query_seq_lengths", self.q_len)


def fold_keys(call: Call, x: Arrays, step: Callable, carry):
    """Folds carry = step(carry, block of x, its key positions) over blocks of keys."""
    if not isinstance(call.kv_len, int):
        raise NotImplementedError(
            f"key must have a length S that is a number, got {call.kv_len}; batch axes "
            "and the query length may be symbolic"
        )
    rows = max(math.prod(call.rows), 1)
    if not isinstance(rows, int):
        rows = _BLOCK_ELEMENTS  # symbolic sizes of an export: the smallest block
    block_len = min(max(_BLOCK_ELEMENTS // rows, _MIN_BLOCK), _MAX_BLOCK)
    if call.kv_len <= block_len:
        return step(carry, x, jnp.arange(call.kv_len, dtype=jnp.int32))

    @jax.checkpoint
    def body(carry, first):
        start = jnp.minimum(first, call.kv_len - block_len)
        block = x | {
            name: lax.dynamic_slice_in_dim(x[name], start, block_len, axis)
            for name, axis in _KEY_AXIS.items()
            if name in x and x[name].shape[axis] == call.kv_len
        }
        block["first"] = first
        j = start + jnp.arange(block_len, dtype=jnp.int32)
        return step(carry, block, j), None

    firsts = jnp.arange(0, call.kv_len, block_len, dtype=jnp.int32)
    carry = compat.vary_like(carry, x.values())
    return lax.scan(body, carry, firsts)[0]


def sum_to(array: Array, shape: Sequence[int]) -> Array:
    """Sums over the axes where `shape` has 1: the transpose of broadcasting."""
    axes = [i for i, size in enumerate(shape) if size == 1 and array.shape[i] != 1]
    return jnp.broadcast_to(array.sum(axes, keepdims=True), shape)


def add_block(total: Array, part: Array, name: str, j: Array) -> Array:
    """Adds the gradient of the keys j."""
    if part.shape == total.shape:
        return total + part
    axis = _KEY_AXIS[name]
    old = lax.dynamic_slice_in_dim(total, j[0], j.shape[0], axis)
    return lax.dynamic_update_slice_in_dim(total, old + part, j[0], axis)
