"""Which kernels would serve a call, and why.

Nothing here decides anything: the call is traced by the public function, and the code
that lowers and launches it says what it would do.
"""

import dataclasses
from typing import Any

import jax
from jax.core import ShapedArray
from jax.typing import ArrayLike

from jaxflash import arguments, ffi, selection
from jaxflash.attention import dot_product_attention
from jaxflash.primitives.backward import attention_backward_p, operand_names
from jaxflash.primitives.forward import attention_forward_p
from jaxflash.spec import Spec

Types = list[tuple[str, ShapedArray]]


@dataclasses.dataclass(frozen=True)
class CudaDevice:
    """A CUDA device, as far as the choice of kernels depends on it; here an H200.

    Attributes:
        compute_capability: for instance "9.0".
        num_sms: its streaming multiprocessors.
        shared_memory_of_block: bytes that a block may ask for.
        shared_memory_of_sm: bytes that an SM has.
    """

    compute_capability: str = "9.0"
    num_sms: int = 132
    shared_memory_of_block: int = 232448
    shared_memory_of_sm: int = 233472

    def numbers(self) -> tuple[int, int, int, int]:
        """As the C API counts: 90 for "9.0"."""
        major, dot, minor = str(self.compute_capability).partition(".")
        if not (dot and major.isdigit() and minor.isdigit()):
            raise ValueError(
                "compute_capability must be like '9.0', got "
                f"{self.compute_capability!r}"
            )
        return (
            10 * int(major) + int(minor),
            self.num_sms,
            self.shared_memory_of_block,
            self.shared_memory_of_sm,
        )


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One CUDA kernel as it would be launched; 0 is what it does not have.

    Attributes:
        name: of its function, as profilers show it.
        block_q: rows of the query in a tile.
        block_kv: keys in a tile.
        num_stages: of the tiles that stream through shared memory.
        num_threads: of a block.
        num_blocks: of the grid.
        shared_memory_bytes: of a block.
    """

    name: str
    block_q: int
    block_kv: int
    num_stages: int
    num_threads: int
    num_blocks: int
    shared_memory_bytes: int

    def __str__(self) -> str:
        """One line."""
        tile = f"{self.block_q} rows"
        if self.block_kv:
            tile = f"{self.block_q} x {self.block_kv} tiles, {self.num_stages} stages"
        grid = f"{self.num_blocks} blocks, {self.num_threads} threads"
        if self.shared_memory_bytes:
            grid += f", {self.shared_memory_bytes} bytes shared"
        return f"{self.name}: {tile}; {grid}"


@dataclasses.dataclass(frozen=True)
class Pass:
    """What runs in one direction.

    Attributes:
        implementation: "cuda", "cpu" or "reference".
        reason: why this one.
        workspace_bytes: temporary memory of the kernels; None for the reference, whose
            memory XLA plans.
        family: of CUDA kernels, "sm80" or "sm90", and "none" where nothing is launched;
            None without CUDA.
        family_reason: why this family.
        kernels: the CUDA kernels, in the order of their launches.
        is_reproducible: whether each run gives the same bits; None without CUDA.
    """

    implementation: str
    reason: str
    workspace_bytes: int | None = None
    family: str | None = None
    family_reason: str | None = None
    kernels: tuple[Kernel, ...] = ()
    is_reproducible: bool | None = None

    def __str__(self) -> str:
        """A line for each choice and each kernel."""
        lines = [f"{self.implementation} ({self.reason})"]
        if self.family is not None:
            lines.append(f"{self.family} ({self.family_reason})")
        lines += map(str, self.kernels)
        if self.workspace_bytes is not None:
            lines.append(f"{self.workspace_bytes} bytes of workspace")
        if self.is_reproducible is False:
            lines.append("not the same bits in every run: see deterministic=True")
        return "\n  ".join(lines)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What runs in a call, and in its derivative by query, key and value.

    A forward pass that is differentiated with 16-bit inputs hands on more of its
    output, for which some head dims have kernels with larger tiles in shared memory:
    `forward` is the pass without.
    """

    forward: Pass
    backward: Pass

    def __str__(self) -> str:
        """Both passes."""
        return f"forward: {self.forward}\nbackward: {self.backward}"


def explain(
    query: ArrayLike | jax.ShapeDtypeStruct,
    key: ArrayLike | jax.ShapeDtypeStruct,
    value: ArrayLike | jax.ShapeDtypeStruct,
    bias: ArrayLike | jax.ShapeDtypeStruct | None = None,
    mask: ArrayLike | jax.ShapeDtypeStruct | None = None,
    *,
    platform: str | None = None,
    device: CudaDevice | None = None,
    **keywords: Any,
) -> Explanation:
    """Which kernels would serve a call of dot_product_attention, and why.

    Nothing is compiled and nothing runs. Every array may be a jax.ShapeDtypeStruct.

    Example:
        >>> import jax, jax.numpy as jnp, jaxflash
        >>> q = jax.ShapeDtypeStruct((2, 128, 8, 320), jnp.float32)
        >>> print(jaxflash.explain(q, q, q, platform="cpu").forward)
        reference (jaxflash's cpu kernels do not serve query with head dim H = 320 yet)

    Args:
        query: like the next four, as in dot_product_attention.
        key: see query.
        value: see query.
        bias: see query.
        mask: see query.
        platform: "cuda", "cpu", or whatever else JAX compiles for; None is where the
            call would run: the device of query where it is committed to one, else the
            default device.
        device: a CUDA device that is not at hand; implies platform="cuda". None is the
            one of this process.
        **keywords: the keyword arguments of dot_product_attention.

    Raises:
        ValueError, TypeError, NotImplementedError: as the call would.
        RuntimeError: there is no CUDA device, and none was given.
    """
    call = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask}
    call |= keywords
    if platform is not None and not isinstance(platform, str):
        raise TypeError(f"platform must be None or a name, got {platform!r}")
    if device is not None and not isinstance(device, CudaDevice):
        raise TypeError(f"device must be None or a CudaDevice, got {device!r}")
    if platform == "gpu":  # as JAX calls it, too
        platform = "cuda"
    if device is not None:
        if platform not in (None, "cuda"):
            raise ValueError(
                f"platform must be 'cuda' where a device is given, got {platform!r}"
            )
        platform = "cuda"
    platform = platform or _platform(query)
    if platform not in selection.PLATFORMS:
        platform = None
    forward, backward = _trace(call)
    spec, avals = forward.params["spec"], _avals(forward.invars)
    out, lse, *_ = _avals(forward.outvars)
    results = [("out", out), ("lse", lse)]
    given = platform, device
    first = _explain("forward", spec, spec.operands, avals, results, *given)
    avals = _avals(backward.invars)
    names = operand_names(avals, spec)
    wanted, summed = backward.params["wanted"], backward.params["summed"]
    results = ffi.kernel_gradients(names, avals, wanted, summed)
    return Explanation(first, _explain("backward", spec, names, avals, results, *given))


def _platform(query: Any) -> str:
    """The platform that a call is compiled for."""
    device: Any = jax.config.values["jax_default_device"]
    if not arguments.is_traced(query) and getattr(query, "committed", False):
        device = next(iter(query.devices()))
    if device is None or isinstance(device, str):
        device = jax.devices(device)[0]
    try:
        is_cuda = device in jax.devices("cuda")
    except RuntimeError:
        is_cuda = False
    return "cuda" if is_cuda else device.platform


def _trace(call: dict[str, Any]) -> tuple[Any, Any]:
    """The equations of the call and of its derivative."""
    shapes = {n: x for n, x in call.items() if isinstance(x, jax.ShapeDtypeStruct)}

    def gradients(arrays):
        rest = call | arrays
        qkv = [rest.pop(name) for name in ("query", "key", "value")]
        out, pullback = jax.vjp(
            lambda *qkv: dot_product_attention(*qkv, **rest),
            *arguments.query_key_value(*qkv),
        )
        return pullback(out)

    found = {eqn.primitive: eqn for eqn in jax.make_jaxpr(gradients)(shapes).eqns}
    return found[attention_forward_p], found[attention_backward_p]


def _avals(variables: Any) -> list[ShapedArray]:
    return [variable.aval for variable in variables]


def _explain(
    direction: str,
    spec: Spec,
    names: tuple[str, ...],
    avals: list[ShapedArray],
    results: Types,
    platform: str | None,
    device: CudaDevice | None,
) -> Pass:
    choice = selection.decide(spec, avals, platform)
    backend, reason = choice.implementation, choice.reason
    if backend == "reference":
        return Pass(backend, reason)
    workspace = ffi.workspace_bytes(backend, direction, spec, names, avals, results)
    if backend == "cpu":
        return Pass(backend, reason, workspace)
    module: Any = selection.load(backend)
    answer = module.explain(
        direction,
        ffi.tensor_types(names, ffi.kernel_operands(names, avals)),
        ffi.tensor_types(*zip(*results, strict=True)),
        ffi.attributes(spec),
        None if device is None else device.numbers(),
    )
    return Pass(
        backend,
        reason,
        workspace,
        answer["family"],
        answer["reason"],
        tuple(Kernel(**kernel) for kernel in answer["kernels"]),
        answer["is_reproducible"],
    )
