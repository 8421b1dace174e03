"""Attention inside CUDA graphs: those that XLA makes, and those of a C API caller."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import QKV, make_call

from jaxflash import dot_product_attention

pytestmark = pytest.mark.gpu

HEAD_DIMS = (36, 64, 128, 256)  # 36: the portable kernels, also on Hopper
NO_GRAPH = 1_000_000  # calls from which on XLA makes one


def attend(query, key, value):
    return dot_product_attention(
        query, key, value, is_causal=True, deterministic=True, implementation="cuda"
    )


def chain(query, key, value):
    """Calls in a row and nothing else, so that a graph can hold nothing else."""
    for _ in range(3):
        query = attend(query, key, value)
    return query


def loop(query, key, value):
    """The same graph, launched again and again."""

    def step(carry, _):
        return attend(carry, key, value), None

    return jax.lax.scan(step, query, length=5)[0]


def gradients(query, key, value):
    out, vjp = jax.vjp(chain, query, key, value)
    return vjp(out)


def compiled(function, arguments, directory, smallest_graph):
    """The program, and whether XLA put anything of it into CUDA graphs."""
    program = jax.jit(function).lower(*arguments)
    program = program.compile(
        compiler_options={
            "xla_gpu_enable_command_buffer": "CUSTOM_CALL",
            "xla_gpu_graph_min_graph_size": smallest_graph,
            "xla_dump_to": str(directory),
        }
    )
    dumps = [path.read_text() for path in directory.rglob("*thunk_sequence*")]
    assert any("kCustomCall" in text for text in dumps)
    return program, any("kCommandBuffer" in text for text in dumps)


@pytest.mark.parametrize("H", HEAD_DIMS)
@pytest.mark.parametrize("function", [chain, loop, gradients])
def test_graphs_of_xla_compute_the_same(function, H, tmp_path):
    inputs = []
    for seed in range(4):
        call = make_call(200, 200, N=4, K=2, H=H, dtype="float16", seed=seed)
        inputs.append([jnp.asarray(call[name]) for name in QKV])
    plain, has_graphs = compiled(function, inputs[0], tmp_path / "plain", NO_GRAPH)
    assert not has_graphs
    captured, has_graphs = compiled(function, inputs[0], tmp_path / "captured", 1)
    assert has_graphs
    # XLA may run the first call without its graph, and updates the graph for buffers
    # in other places: all results are kept. The last calls repeat earlier ones.
    got = [captured(*arguments) for arguments in [*inputs, *inputs]]
    want = [plain(*arguments) for arguments in inputs]
    for results, expected in zip(got, [*want, *want], strict=True):
        jax.tree.map(np.testing.assert_array_equal, results, expected)


def replayed(enqueue):
    """Captures a pass and launches its graph twice."""
    driver = importlib.import_module("sanitize").driver
    stream, graph, instance = (ctypes.c_void_p() for _ in range(3))
    non_blocking, this_thread_alone = 1, 1
    driver("cuStreamCreate", ctypes.byref(stream), non_blocking)
    driver("cuStreamBeginCapture_v2", stream, this_thread_alone)
    enqueue(stream)
    driver("cuStreamEndCapture", stream, ctypes.byref(graph))
    no_flags = ctypes.c_ulonglong(0)
    driver("cuGraphInstantiateWithFlags", ctypes.byref(instance), graph, no_flags)
    for _ in range(2):
        driver("cuGraphLaunch", instance, stream)
    driver("cuStreamSynchronize", stream)
    driver("cuGraphExecDestroy", instance)
    driver("cuGraphDestroy", graph)
    driver("cuStreamDestroy_v2", stream)


# A call that allocates or waits would end the capture with an error.
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("H", HEAD_DIMS)
def test_graphs_of_a_c_api_caller_can_be_launched_again(H, deterministic):
    sanitize = importlib.import_module("sanitize")
    sanitize.use_first_device()
    case = sanitize.Case(
        T=200, S=260, H=H, is_causal=True, deterministic=deterministic, out_low=True
    )
    # Kernels are loaded by a first call. Of another size, or memory that is used again
    # could hold the results already.
    sanitize.check(dataclasses.replace(case, T=180))
    sanitize.check(case, replayed)


# Whoever waits for a stream whose work is recorded breaks the record, and what is
# launched there from then on fails. The next call on a good stream does not.
@pytest.mark.parametrize("H", HEAD_DIMS)
def test_failed_launches_are_reported_by_the_call_that_made_them(H):
    sanitize = importlib.import_module("sanitize")
    sanitize.use_first_device()
    messages = []

    def broken(enqueue):
        enqueue(None)  # loads the kernels
        stream, graph = ctypes.c_void_p(), ctypes.c_void_p()
        non_blocking, this_thread_alone = 1, 1
        sanitize.driver("cuStreamCreate", ctypes.byref(stream), non_blocking)
        sanitize.driver("cuStreamBeginCapture_v2", stream, this_thread_alone)
        assert sanitize.CUDA.cuStreamSynchronize(stream) != 0
        with pytest.raises(RuntimeError) as failure:
            enqueue(stream)
        messages.append(str(failure.value))
        assert sanitize.CUDA.cuStreamEndCapture(stream, ctypes.byref(graph)) != 0
        sanitize.driver("cuStreamDestroy_v2", stream)

    sanitize.check(sanitize.Case(T=60, S=70, H=H), broken)
    assert len(messages) == 2
    for message, direction in zip(messages, ("forward", "backward"), strict=True):
        assert re.search(rf"{direction}.*: cudaErrorStreamCapture\w+: .+ \(90", message)
