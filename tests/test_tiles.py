"""Every tile configuration of the kernels, over more than one tile of each kind."""

import numpy as np
import pytest
from calls import QKV, cotangents, make_call, run, run_gradients
from compare import assert_close, assert_equal, assert_forward, assert_gradients

HEAD_DIMS = (32, 64, 96, 128, 192, 256)
CASES = {
    "ragged": {"T": 200, "S": 333},
    "causal": {"T": 300, "S": 270, "is_causal": True},
    "offset": {"T": 140, "S": 400, "is_causal": True, "query_offset": 260},
    "rows_before_keys": {"T": 300, "S": 200, "is_causal": True, "query_offset": -150},
}
LENGTHS = {
    "query_seq_lengths": np.array([130, 260], np.int32),
    "key_value_seq_lengths": np.array([300, 77], np.int32),
}


def check(call, implementation):
    out, lse = run(call, implementation)
    assert_forward(call, out, lse)
    cts = cotangents(call)
    assert_gradients(call, run_gradients(call, implementation, *cts), *cts)


@pytest.mark.implementations("cpu", "cuda")
@pytest.mark.parametrize("H", HEAD_DIMS)
@pytest.mark.parametrize("case", CASES)
def test_grouped_heads(implementation, working_dtype, H, case):
    call = make_call(batch=(1,), N=6, K=2, H=H, dtype=working_dtype, **CASES[case])
    check(call, implementation)


@pytest.mark.implementations("cpu", "cuda")
@pytest.mark.parametrize("H", HEAD_DIMS)
def test_lengths(implementation, working_dtype, H):
    call = make_call(260, 300, N=2, H=H, dtype=working_dtype, is_causal=True)
    check(call | LENGTHS | {"query_offset": 40}, implementation)


# More rows than what the tiles for few rows serve.
@pytest.mark.implementations("cpu", "cuda")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("H", [64, 256])
def test_many_rows(implementation, working_dtype, H, is_causal):
    call = make_call(1100, 270, batch=(1,), N=2, H=H, dtype=working_dtype)
    call |= {"is_causal": is_causal, "query_offset": -400}
    check(call, implementation)


# A block of the Hopper forward kernel takes several tiles, one after the other: some
# see nothing, some one or more tiles of keys. The batch is REPEATS times the same, so
# that the oracle computes one of them; all must have the same bits.
REPEATS = 6


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("H", HEAD_DIMS)
def test_many_tiles(H, is_causal, lengths):
    B = 16
    call = make_call(200, 300, batch=(B,), N=8, K=2, H=H, dtype="float16")
    call |= {"is_causal": is_causal, "query_offset": 60}
    if lengths:
        choose = np.random.default_rng(7).choice
        call["query_seq_lengths"] = choose([0, 0, 1, 70, 200], B).astype(np.int32)
        call["key_value_seq_lengths"] = choose([0, 1, 65, 300], B).astype(np.int32)
        call["scale"] = -0.2
    out, lse = run_repeated(call)
    assert_forward(call, out, lse)
    if lengths:
        hidden = np.arange(300) >= call["key_value_seq_lengths"][:, None]
        call["value"][hidden] = np.nan
        again, _ = run_repeated(call)
        np.testing.assert_array_equal(again, out)


def run_repeated(call):
    """out and lse of the first repeat, which all others equal."""
    tiled = {
        name: np.concatenate([x] * REPEATS) if isinstance(x, np.ndarray) else x
        for name, x in call.items()
    }
    results = []
    for result in run(tiled, "cuda"):
        first, *others = np.split(np.asarray(result), REPEATS)
        for other in others:
            np.testing.assert_array_equal(other, first)
        results.append(first)
    return results


# The same for tiles that serve many rows.
@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("H", [64, 256])
def test_many_tiles_of_many_rows(H, is_causal):
    call = make_call(1100, 130, batch=(16,), N=2, H=H, dtype="float16")
    call |= {"is_causal": is_causal, "query_offset": -500}
    out, lse = run(call, "cuda")
    assert_forward(call, out, lse)


# Causal blocks of the Hopper backward kernels go in sections of no more heads than fill
# the GPU, which walk the rows upwards and downwards in turn: two or more here, of 66 or
# 44 heads on an H100 or H200 and the rest.
def make_sections(T, batch, H, N=8, **arguments):
    call = make_call(T, batch=(batch,), N=N, K=4, H=H, dtype="float16")
    return call | {"is_causal": True} | arguments


@pytest.mark.gpu
@pytest.mark.parametrize("H", [64, 96, 128, 192, 256])
@pytest.mark.parametrize(("T", "batch"), [(130, 18), (260, 12)])
def test_sections_of_grouped_heads(H, T, batch):
    check(make_sections(T, batch, H), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("H", [64, 128, 256])
@pytest.mark.parametrize("offset", [-70, 70])
def test_sections_off_the_diagonal(H, offset):
    offset = np.array(offset, np.int32)
    check(make_sections(200, 18, H, N=16, query_offset=offset), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("H", [64, 256])
@pytest.mark.parametrize("lengths", ["query_seq_lengths", "key_value_seq_lengths"])
def test_sections_that_lengths_leave_empty(H, lengths):
    call = make_sections(130, 18, H)
    check(call | {lengths: np.arange(18, dtype=np.int32) * 8}, "cuda")


# lse of some tiles is in natural units.
@pytest.mark.gpu
@pytest.mark.parametrize("H", [64, 256])
def test_sections_with_large_logits(H):
    call = make_sections(200, 18, H)
    call["query"][:, 100:] *= 1000
    check(call, "cuda")


# The last bits of deterministic gradients do not depend on what else is in the batch.
@pytest.mark.gpu
@pytest.mark.parametrize("H", [64, 256])
def test_sections_of_deterministic_calls(H):
    call = make_sections(200, 18, H, deterministic=True)
    cts = cotangents(call)
    whole = run_gradients(call, "cuda", *cts)
    last = {name: x[-1:] if name in QKV else x for name, x in call.items()}
    alone = run_gradients(last, "cuda", *(x[-1:] for x in cts))
    for name, gradient in whole.items():
        assert_equal(np.asarray(gradient)[-1:], np.asarray(alone[name]), f"d{name}")


# Deterministic turns: many blocks for one tile of dQ, and more of them than the GPU
# runs at a time.
@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("H", [64, 96, 128])
@pytest.mark.parametrize(("T", "S"), [(2048, 2048), (512, 20_000)])
def test_turns(H, T, S, is_causal):
    call = make_call(T, S, batch=(1,), N=2, H=H, dtype="float16")
    call |= {"is_causal": is_causal, "query_offset": S - T}
    cts = cotangents(call)
    want = run_gradients(call, "cuda", *cts)
    got = run_gradients(call | {"deterministic": True}, "cuda", *cts)
    for name, grad in got.items():
        size = np.abs(np.asarray(want[name]).astype(np.float32))
        atol = 2e-3 * size.max(-1, keepdims=True) + 1e-7
        assert_close(grad, want[name], atol, f"d{name}")
    again = run_gradients(call | {"deterministic": True}, "cuda", *cts)
    for name, grad in got.items():
        np.testing.assert_array_equal(np.asarray(again[name]), np.asarray(grad))
