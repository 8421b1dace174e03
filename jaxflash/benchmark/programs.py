"""Compiled programs of one case, with one interface for JAX and for torch.

program = ...                  compiled, holds no inputs yet
program.load(inputs)           puts the arguments in place
results = program.run()        starts one call
program.wait(results)          returns when it is done
program.arrays(results)        JAX arrays by name: out, dq, dk, dv
program.device_seconds(n)      device time of n calls, or None without a device clock
"""

import importlib
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from jaxflash.benchmark import device_clock
from jaxflash.benchmark.cases import Case

NAMES = {
    "forward": ("out",),
    "backward": ("dq", "dk", "dv"),
    "both": ("out", "dq", "dk", "dv"),
}


class JaxProgram:
    """A function (query, key, value) -> out of JAX, in the direction of the case."""

    def __init__(self, case: Case, attention):
        """Compiles; holds no inputs until `load`."""
        self.names = NAMES[case.direction]
        query = jax.ShapeDtypeStruct(
            (case.batch, case.q_len, case.num_heads, case.head_dim), case.dtype
        )
        key = jax.ShapeDtypeStruct(
            (case.batch, case.kv_len, case.num_kv_heads, case.head_dim), case.dtype
        )
        inputs = (query, key, key)
        self._residuals = None
        if case.direction == "forward":
            self._compiled = jax.jit(attention).lower(*inputs).compile()
        elif case.direction == "both":

            def both(query, key, value, d_out):
                out, vjp = jax.vjp(attention, query, key, value)
                return (out, *vjp(d_out))

            self._compiled = jax.jit(both).lower(*inputs, query).compile()
        else:
            # The backward pass alone: a first program leaves its residuals.
            tree = []

            def forward(query, key, value):
                residuals, structure = jax.tree.flatten(
                    jax.vjp(attention, query, key, value)[1]
                )
                tree.append(structure)
                return residuals

            def backward(residuals, d_out):
                return jax.tree.unflatten(tree[0], residuals)(d_out)

            lowered = jax.jit(forward).lower(*inputs)
            self._residuals = lowered.compile()
            self._compiled = jax.jit(backward).lower(lowered.out_info, query).compile()
        self.memory = _peak_memory(self._compiled)
        if self._residuals is not None:
            self.memory = max(self.memory, _peak_memory(self._residuals))
        self._args: Any = ()

    def load(self, inputs):
        """Takes the inputs of the case; runs the forward pass that precedes."""
        args = tuple(inputs[name] for name in ("query", "key", "value"))
        if self._residuals is not None:
            args = (self._residuals(*args), inputs["d_out"])
        elif len(self.names) > 1:
            args = (*args, inputs["d_out"])
        self._args = jax.block_until_ready(args)

    def run(self):
        """Starts one call."""
        return self._compiled(*self._args)

    def wait(self, results):
        """Blocks until the call that gave `results` is done."""
        jax.block_until_ready(results)

    def arrays(self, results) -> dict[str, jax.Array]:
        """Results by name."""
        results = results if isinstance(results, tuple) else (results,)
        return dict(zip(self.names, results, strict=True))

    def device_seconds(self, calls: int) -> list[float] | None:
        """Device time of each call, by JAX's profiler."""
        if jax.default_backend() != "gpu":
            return None
        return device_clock.seconds_per_call(self.run, self.wait, calls)


def _peak_memory(compiled) -> int:
    """Bytes of arguments, outputs and scratch of a compiled program."""
    stats = compiled.memory_analysis()
    return (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        + stats.temp_size_in_bytes
        - stats.alias_size_in_bytes
    )


class TorchProgram:
    """`scaled_dot_product_attention` of torch, eager, on the device of JAX."""

    def __init__(self, case: Case, backend: str | None):
        """Takes a name of torch's SDPBackend, or None for torch's own choice."""
        self.torch = importlib.import_module("torch")
        self.on_gpu = jax.default_backend() == "gpu"
        if self.on_gpu and not self.torch.cuda.is_available():
            raise NotImplementedError("this torch has no CUDA")
        self.case, self.backend = case, backend
        self.names = NAMES[case.direction]
        self.memory = None

    def load(self, inputs):
        """Brings the inputs into torch's layout [B, N, T, H]."""
        arrays = [
            self.torch.from_dlpack(inputs[name]).transpose(1, 2).contiguous()
            for name in ("query", "key", "value", "d_out")
        ]
        self.leaves, self.d_out = arrays[:3], arrays[3]
        if self.case.direction != "forward":
            for leaf in self.leaves:
                leaf.requires_grad_()
        self.out = self._forward() if self.case.direction == "backward" else None

    def _forward(self):
        functional = self.torch.nn.functional
        grouped = self.case.num_kv_heads != self.case.num_heads
        options: dict[str, Any] = {"enable_gqa": True} if grouped else {}
        if self.backend is None:
            return functional.scaled_dot_product_attention(
                *self.leaves, is_causal=self.case.is_causal, **options
            )
        choices = importlib.import_module("torch.nn.attention")
        with choices.sdpa_kernel(getattr(choices.SDPBackend, self.backend)):
            return functional.scaled_dot_product_attention(
                *self.leaves, is_causal=self.case.is_causal, **options
            )

    def run(self):
        """Runs one call; on a GPU it is only enqueued."""
        out = self._forward() if self.out is None else self.out
        if self.case.direction == "forward":
            return (out,)
        gradients = self.torch.autograd.grad(
            out, self.leaves, self.d_out, retain_graph=self.out is not None
        )
        return gradients if self.out is not None else (out, *gradients)

    def wait(self, results):
        """Blocks until everything enqueued is done."""
        del results
        if self.on_gpu:
            self.torch.cuda.synchronize()

    def arrays(self, results) -> dict[str, jax.Array]:
        """Results by name, as JAX arrays [B, T, N, H]."""
        self.wait(results)
        return {
            name: jnp.from_dlpack(x.detach().transpose(1, 2).contiguous())
            for name, x in zip(self.names, results, strict=True)
        }

    def device_seconds(self, calls: int) -> list[float] | None:
        """Time between CUDA events around each call."""
        if not self.on_gpu:
            return None
        event = self.torch.cuda.Event
        marks = [event(enable_timing=True) for _ in range(calls + 1)]
        self.run()
        marks[0].record()
        for mark in marks[1:]:
            self.run()
            mark.record()
        self.torch.cuda.synchronize()
        return [a.elapsed_time(b) * 1e-3 for a, b in itertools.pairwise(marks)]
