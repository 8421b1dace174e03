"""The C API says what a call would launch on a device that need not be there."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys

import c_api
import pytest
from c_explain import (
    A100,
    CUDA,
    H200,
    RTX4090,
    Answer,
    Device,
    answer_of,
    ask,
    make_params,
    needs_cuda,
    needs_hopper,
)

HEAD_DIMS = (8, 64, 96, 128, 192, 256)
NO_HOPPER = "the device is not of compute capability 9.0"
HOPPER = "the device is of compute capability 9.0"


def ceil(x: int, y: int) -> int:
    return -(-x // y)


@pytest.fixture(autouse=True)
def _automatic(monkeypatch):
    monkeypatch.delenv("JAXFLASH_CUDA_KERNELS", raising=False)


@pytest.mark.skipif(not isinstance(CUDA, str), reason="the library has CUDA kernels")
def test_a_library_without_cuda_says_so():
    for direction in ("forward", "backward"):
        status, _ = ask(direction, make_params())
        assert status == c_api.UNAVAILABLE
        assert "built without CUDA" in c_api.last_error()


@needs_hopper
@pytest.mark.parametrize("H", HEAD_DIMS)
def test_forward_on_hopper(H):
    answer = answer_of("forward", make_params(T=1000, H=H))
    assert (answer.family, answer.reason) == (b"sm90", HOPPER.encode())
    assert answer.names() == ["forward_kernel"]
    kernel = answer.kernels[0]
    # A block per tile, as long as there are SMs for them.
    assert kernel.num_blocks == ceil(1000, kernel.block_q) * 4 * 2 < H200.num_sms
    assert kernel.num_threads == 2 * kernel.block_q + 128
    matrices = 2 * kernel.num_stages * kernel.block_kv + kernel.block_q
    assert 2 * H * matrices <= kernel.shared_memory_bytes <= 232448
    assert answer.is_reproducible == 1
    many = answer_of("forward", make_params(batch=(9,), T=2000, S=8, H=H))
    assert many.kernels[0].num_blocks == H200.num_sms


@needs_hopper
@pytest.mark.parametrize("H", HEAD_DIMS)
def test_backward_on_hopper(H):
    answer = answer_of("backward", make_params(H=H))
    assert answer.family == b"sm90"
    rows, main, last = answer.kernels[:3]
    padded = ceil(300, 128) * 128 * 4 * 2
    assert rows.num_blocks * rows.block_q == padded
    assert last.num_blocks * last.block_q == padded
    assert main.num_blocks == ceil(500, main.block_kv) * 2 * 2
    assert main.num_threads == 384
    assert main.num_stages == 2
    names = ["backward_rows_kernel", "backward_fused_kernel", "dq_conversion_kernel"]
    if H > 128:
        names[1:] = ["backward_dkv_kernel", "backward_dq_kernel"]
        assert last.block_kv > 0
        assert last.num_threads == 384
        assert last.shared_memory_bytes > 0
    assert answer.names() == names
    # Blocks add to dQ in any order, unless one block owns its rows.
    assert answer.is_reproducible == (H > 128)


@needs_cuda
@pytest.mark.parametrize("device", [A100, RTX4090], ids=["8.0", "8.9"])
@pytest.mark.parametrize("H", [*HEAD_DIMS, 50])
def test_portable_kernels_elsewhere(H, device):
    params = make_params(H=H)
    forward, backward = (answer_of(d, params, device) for d in ("forward", "backward"))
    for answer in (forward, backward):
        assert (answer.family, answer.reason) == (b"sm80", NO_HOPPER.encode())
        for kernel in answer.kernels[: answer.num_kernels]:
            assert kernel.shared_memory_bytes <= device.shared_memory_of_block
    kernel = forward.kernels[0]
    assert forward.names() == ["forward_kernel"]
    assert forward.workspace_bytes == 0
    assert kernel.num_blocks == ceil(300, kernel.block_q) * 4 * 2
    assert backward.names() == [
        "backward_rows_kernel",
        "backward_kernel",
        "dq_conversion_kernel",
    ]
    main = backward.kernels[1]
    assert main.num_blocks == ceil(500, main.block_kv) * 2 * 2
    assert main.shared_memory_bytes > 0


@needs_cuda
def test_portable_tiles_depend_on_the_shared_memory():
    params = make_params(H=128)
    tiles = {
        device.compute_capability: answer_of("backward", params, device).kernels[1]
        for device in (A100, RTX4090)
    }
    assert tiles[80].shared_memory_bytes > RTX4090.shared_memory_of_block
    assert tiles[89].shared_memory_bytes <= RTX4090.shared_memory_of_block


@needs_hopper
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"H": 50}, "the head dim is no multiple of 8"),
        ({"k_offset": 2}, "k: rows do not start on 16 bytes"),
        ({"batch": (2, 3)}, "more than one batch axis"),
    ],
)
def test_what_hopper_kernels_lack_is_the_reason(direction, arguments, reason):
    answer = answer_of(direction, make_params(**arguments))
    assert (answer.family, answer.reason) == (b"sm80", reason.encode())


@needs_hopper
@pytest.mark.parametrize(
    ("setting", "family", "reason"),
    [
        ("", b"sm90", HOPPER),
        ("auto", b"sm90", HOPPER),
        ("sm90", b"sm90", HOPPER),
        ("sm80", b"sm80", "JAXFLASH_CUDA_KERNELS=sm80 asks for them"),
    ],
)
def test_the_environment_chooses(monkeypatch, setting, family, reason):
    monkeypatch.setenv("JAXFLASH_CUDA_KERNELS", setting)
    for direction in ("forward", "backward"):
        answer = answer_of(direction, make_params())
        assert (answer.family, answer.reason) == (family, reason.encode())


@needs_cuda
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    ("setting", "device", "status", "text"),
    [
        ("sm70", H200, c_api.INVALID_ARGUMENT, "auto, sm80 or sm90, got sm70"),
        ("sm90", RTX4090, c_api.UNAVAILABLE, "needs a device of compute capability 9."),
        ("auto", Device(75, 40, 65536, 65536), c_api.UNAVAILABLE, "has 7.5"),
        ("auto", Device(90, 0, 232448, 233472), c_api.INVALID_ARGUMENT, "num_sms"),
    ],
)
def test_refusals(monkeypatch, direction, setting, device, status, text):
    monkeypatch.setenv("JAXFLASH_CUDA_KERNELS", setting)
    got, answer = ask(direction, make_params(), device)
    assert got == status
    assert text in c_api.last_error()
    assert bytes(answer) == bytes(Answer(ctypes.sizeof(Answer))), "wrote its answer"


@needs_cuda
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_wrong_arguments_are_refused(direction):
    status, _ = ask(direction, make_params(), answer=Answer(8))
    assert status == c_api.INVALID_ARGUMENT
    assert "jaxflash_explanation" in c_api.last_error()
    for name, value, got in (("softcap", 5.0, "5"), ("window_left", 3, "3 and -1")):
        params = make_params()
        setattr(params.forward, name, value)
        status, _ = ask(direction, params)
        assert status == c_api.UNSUPPORTED
        assert name in c_api.last_error()
        assert f"got {got}" in c_api.last_error()


@needs_cuda
def test_nothing_to_compute():
    for direction in ("forward", "backward"):
        status, answer = ask(direction, make_params(batch=(0,)), device=None)
        assert status == c_api.OK, c_api.last_error()
        assert (answer.family, answer.num_kernels) == (b"none", 0)
        assert answer.reason == b"there is nothing to compute"


@needs_cuda
@pytest.mark.parametrize("device", [H200, A100], ids=["9.0", "8.0"])
def test_deterministic_calls_and_unwanted_gradients(device):
    params = make_params()
    assert answer_of("backward", params, device).is_reproducible == 0
    params.forward.deterministic = 1
    assert answer_of("backward", params, device).is_reproducible == 1
    params.forward.deterministic = 0
    params.dq.data = None
    answer = answer_of("backward", params, device)
    assert answer.is_reproducible == 1
    assert "dq_conversion_kernel" not in answer.names()


@needs_cuda
@pytest.mark.parametrize("device", [H200, A100], ids=["9.0", "8.0"])
def test_the_query_covers_the_workspace(device):
    params = make_params(H=192)
    for direction in ("forward", "backward"):
        size = ctypes.c_size_t()
        of_call = params.forward if direction == "forward" else params
        query = c_api.entry(direction, "_workspace", "cuda")
        assert query(ctypes.byref(of_call), ctypes.byref(size)) == c_api.OK
        answer = answer_of(direction, params, device)
        assert answer.workspace_bytes <= size.value


WITHOUT_DEVICES = """
import ctypes, c_api, c_explain
params = c_explain.make_params()
for direction, of_call in (("forward", params.forward), ("backward", params)):
    run = c_api.entry(direction, backend="cuda")
    print(run(ctypes.byref(of_call), None, 0, None), c_api.last_error())
    print(c_explain.ask(direction, params, None)[0], c_api.last_error())
"""


@needs_cuda
def test_what_the_cuda_runtime_reports_is_internal():
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    process = subprocess.run(
        [sys.executable, "-c", WITHOUT_DEVICES],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    assert len(lines) == 4
    # The call, the error's name, its text and its number.
    expected = rf"{c_api.INTERNAL} cudaGetDevice: cudaError\w+: .+ \(\d+\)"
    assert all(re.fullmatch(expected, line) for line in lines), lines
