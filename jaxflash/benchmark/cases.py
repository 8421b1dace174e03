"""What is measured: one shape, mask, dtype and direction, with its FLOP count."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp

# Matrix products, in units of one forward pass (q k^T and p v). The backward pass
# has five: it recomputes q k^T, then dP, dV, dQ and dK.
WORK = {"forward": 1.0, "backward": 2.5, "both": 3.5}


@dataclasses.dataclass(frozen=True)
class Case:
    """One point of a sweep; letters as in `jaxflash.dot_product_attention`."""

    dtype: str
    batch: int  # B
    q_len: int  # T
    kv_len: int  # S
    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H
    is_causal: bool
    direction: str  # a key of WORK

    @property
    def flops(self) -> float:
        """4 B N T S H forward, half of it if causal, times the direction's work."""
        dense = 4.0 * self.batch * self.num_heads * self.q_len * self.kv_len
        return dense * self.head_dim * WORK[self.direction] / (1 + self.is_causal)

    @property
    def mask(self) -> str:
        """`causal` or `full`."""
        return "causal" if self.is_causal else "full"

    @property
    def label(self) -> str:
        """One line for people."""
        lengths = f"T={self.q_len}"
        if self.kv_len != self.q_len:
            lengths += f" S={self.kv_len}"
        heads = f"N={self.num_heads}"
        if self.num_kv_heads != self.num_heads:
            heads += f" K={self.num_kv_heads}"
        return (
            f"{self.dtype} {self.direction} {self.mask} {lengths} "
            f"B={self.batch} {heads} H={self.head_dim}"
        )


def make_inputs(case: Case, seed: int) -> dict[str, jax.Array]:
    """Gaussian query, key, value and d_out, the same for every mask and direction."""
    query = (case.batch, case.q_len, case.num_heads, case.head_dim)
    key = (case.batch, case.kv_len, case.num_kv_heads, case.head_dim)
    return dict(_gaussian(query, key, case.dtype, seed))


@functools.lru_cache(maxsize=1)
def _gaussian(query, key, dtype, seed) -> dict[str, jax.Array]:
    shapes = {"query": query, "key": key, "value": key, "d_out": query}
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {
        name: jax.random.normal(k, shape, jnp.float32).astype(dtype)
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


@dataclasses.dataclass(frozen=True)
class Grid:
    """Lists that `cases` multiplies out, lengths outermost and in their given order.

    The heads of a case are `num_heads`, or `hidden // head_dim`; its batch is `batch`,
    or as many sequences as make up `tokens`.
    """

    dtypes: tuple[str, ...]
    head_dims: tuple[int, ...]
    lengths: tuple[int, ...]
    masks: tuple[str, ...] = ("full", "causal")
    directions: tuple[str, ...] = ("forward", "backward")
    batch: int | None = None
    tokens: int | None = None
    num_heads: int | None = None
    hidden: int | None = None
    num_kv_heads: int | None = None

    def cases(self) -> list[Case]:
        """Every point of the grid."""
        return [
            self._case(*point)
            for point in itertools.product(
                self.lengths, self.dtypes, self.head_dims, self.masks, self.directions
            )
        ]

    def _case(self, length, dtype, head_dim, mask, direction) -> Case:
        num_heads = self.num_heads or max(1, (self.hidden or head_dim) // head_dim)
        return Case(
            dtype=dtype,
            batch=self.batch or max(1, (self.tokens or length) // length),
            q_len=length,
            kv_len=length,
            num_heads=num_heads,
            num_kv_heads=self.num_kv_heads or num_heads,
            head_dim=head_dim,
            is_causal=mask == "causal",
            direction=direction,
        )


def default_grid(backend: str, quick: bool) -> Grid:
    """The grid of a backend: `cpu`, or `gpu` with 16,384 tokens of 2,048 channels.

    On a GPU the lengths that say most come first, so that a run that is cut short by
    its budget still covers every head dim, mask and direction.
    """
    if backend == "gpu":
        return Grid(
            dtypes=("bfloat16",),
            head_dims=(128,) if quick else (64, 128, 256),
            lengths=(8192, 2048) if quick else (8192, 2048, 512, 16384, 4096, 1024),
            tokens=16384,
            hidden=2048,
        )
    return Grid(
        dtypes=("float32", "bfloat16"),
        head_dims=(64,),
        lengths=(1024,) if quick else (512, 1024, 4096, 16384),
        directions=("forward", "both"),
        batch=1,
        num_heads=8,
    )
