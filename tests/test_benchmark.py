"""The benchmark: what it counts, what it refuses to time, what it leaves behind."""

from __future__ import annotations

import csv
import functools
import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxflash.benchmark import __main__ as command
from jaxflash.benchmark import checks, device_clock, peers, report, session, timing
from jaxflash.benchmark.cases import Case, Grid, default_grid, make_inputs
from jaxflash.benchmark.programs import NAMES, JaxProgram, TorchProgram

SMALL = Case("float32", 1, 96, 96, 4, 2, 16, True, "both")
FAST = timing.Protocol(rounds=1, pause_s=0.0, burst_calls=1, window_s=0.001)
xla = functools.partial(jax.nn.dot_product_attention, implementation="xla")


def with_direction(direction: str) -> Case:
    return Case("float32", 1, 96, 96, 4, 2, 16, True, direction)


def run(monkeypatch, cases=(SMALL,), *, options=None, **built):
    """A session over peers given as functions of a case."""
    for name, build in built.items():
        monkeypatch.setitem(peers.PEERS, name, build)
    found = session.Session(peers=list(built), protocol=FAST, **(options or {}))
    monkeypatch.setattr(found, "_measure_roofline", lambda dtype: None)
    found.roofline["float32"] = {"burst": 1.0, "sustained": 1.0}
    found.run(list(cases), lambda results: "")
    return {result.implementation: result for result in found.results}


def good(case):
    return JaxProgram(case, functools.partial(xla, is_causal=case.is_causal))


def wrong(change):
    """A peer whose output is `change` of the right one."""
    return lambda case: JaxProgram(
        case, lambda q, k, v: change(xla(q, k, v, is_causal=case.is_causal))
    )


def test_flops_follow_the_convention():
    full = Case("bfloat16", 2, 8192, 8192, 16, 16, 128, False, "forward")
    assert full.flops == 4 * 2 * 16 * 8192**2 * 128
    causal = Case("bfloat16", 2, 8192, 8192, 16, 16, 128, True, "backward")
    assert causal.flops == full.flops / 2 * 2.5
    assert with_direction("both").flops == 3.5 * with_direction("forward").flops


def test_default_gpu_grid_keeps_tokens_and_channels():
    cases = default_grid("gpu", quick=False).cases()
    assert len(cases) == len(set(cases)) == 6 * 3 * 2 * 2
    assert {c.batch * c.q_len for c in cases} == {16384}
    assert {c.num_heads * c.head_dim for c in cases} == {2048}


def test_default_cpu_grid():
    cases = default_grid("cpu", quick=False).cases()
    shapes = {(c.batch, c.q_len, c.num_heads, c.head_dim) for c in cases}
    assert shapes == {(1, t, 8, 64) for t in (512, 1024, 4096, 16384)}
    assert {c.direction for c in cases} == {"forward", "both"}
    assert len(cases) == 4 * 2 * 2 * 2


def test_command_line_changes_the_grid():
    options = "--length 64 128 --heads 6 --kv-heads 2 --batch 3 --mask causal"
    args = command.parse(options.split())
    cases = command.grid(args, "gpu").cases()
    assert {(c.batch, c.q_len, c.num_heads, c.num_kv_heads) for c in cases} == {
        (3, 64, 6, 2),
        (3, 128, 6, 2),
    }
    assert all(c.is_causal for c in cases)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--heads 6 --kv-heads 4", "--kv-heads 4 must divide"),
        ("--kv-heads 3", "--kv-heads 3 must divide the number of heads, got 8 heads"),
        ("--length 100 128 --tokens 300", "300 must be a multiple of --length 128"),
        ("--tokens 100", "--tokens 100 must be a multiple of --length 512"),
        ("--head-dim 48 --hidden 100", "100 must be a multiple of --head-dim 48"),
        ("--batch 2 --tokens 128", "--tokens: not allowed with argument --batch"),
        ("--heads 2 --hidden 128", "--hidden: not allowed with argument --heads"),
    ],
)
def test_command_line_refuses_sizes_that_do_not_fit(options, text, capsys):
    with pytest.raises(SystemExit):
        command.grid(command.parse(options.split()), "cpu")
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--length", "--batch", "--rounds", "--budget-s"])
def test_command_line_takes_only_numbers_above_0(option, capsys):
    with pytest.raises(SystemExit):
        command.parse([option, "0"])
    assert f"{option}: must be " in capsys.readouterr().err


@pytest.mark.parametrize("direction", NAMES)
def test_program_computes_its_direction(direction):
    case = with_direction(direction)
    inputs = make_inputs(case, 0)
    q, k, v, d_out = inputs.values()
    out, vjp = jax.vjp(functools.partial(xla, is_causal=True), q, k, v)
    expected: dict = dict(zip(NAMES["both"], (out, *vjp(d_out)), strict=True))
    program = good(case)
    program.load(inputs)
    got = program.arrays(program.run())
    assert tuple(got) == NAMES[direction]
    for name in got:
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("direction", NAMES)
def test_torch_program_agrees(direction):
    pytest.importorskip("torch")
    case = with_direction(direction)
    inputs = make_inputs(case, 0)
    program = TorchProgram(case, None)
    program.load(inputs)
    truth = checks.DenseSlice(case)(inputs)
    found, problem = checks.check(case, program.arrays(program.run()), truth, None)
    assert problem is None, found


def test_device_time_counts_overlaps_once_and_gaps():
    activities = [
        device_clock.Activity(start, start + duration, name)
        for name, start, duration in (
            ("first", 0, 10), ("early", 5, 15), ("first", 30, 10), ("early", 42, 8),
        )
    ]  # fmt: skip
    assert device_clock.spans(activities, 2) == [20, 20]


@pytest.mark.parametrize("names", ["aab", "abac"])
def test_device_time_refuses_calls_that_differ(names):
    activities = [device_clock.Activity(i, i + 1, n) for i, n in enumerate(names)]
    with pytest.raises(ValueError, match="same kernels in each of 2 calls"):
        device_clock.spans(activities, 2)


@pytest.mark.gpu
def test_device_time_lies_within_wall_time():
    program = good(SMALL)
    program.load(make_inputs(SMALL, seed=0))
    timing.first_calls(program)
    began = time.perf_counter()
    on_device = program.device_seconds(3)
    elapsed = time.perf_counter() - began
    assert len(on_device) == 3
    assert min(on_device) > 0
    assert sum(on_device) < elapsed


@pytest.mark.parametrize(
    "change",
    [
        lambda out: 1.01 * out,
        lambda out: out.at[:, :, -1].set(0.0),  # one head is missing
        lambda out: out.at[0, 0, 0, 0].add(1.0),  # outside the slice of the first check
        lambda out: out.at[..., -1, 0].set(jnp.nan),
    ],
    ids=["scaled", "head", "element", "nan"],
)
def test_peer_that_disagrees_is_not_timed(monkeypatch, change):
    results = run(monkeypatch, good=good, wrong=wrong(change))
    assert results["good"].status == "ok"
    assert results["good"].times.burst
    assert results["wrong"].status == "disagrees"
    assert not results["wrong"].times.burst
    assert not results["wrong"].times.sustained
    assert "off by" in results["wrong"].detail


def test_first_peer_is_checked_too(monkeypatch):
    results = run(monkeypatch, wrong=wrong(lambda out: -out), good=good)
    assert results["wrong"].status == "disagrees"
    assert results["good"].status == "ok"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ImportError("No module named flash"), "unsupported"),
        (NotImplementedError("head dim 128 only"), "unsupported"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), "out of memory"),
        (RuntimeError("launch failed"), "failed"),
    ],
)
@pytest.mark.parametrize("moment", ["build", "run"])
def test_peer_that_fails_is_reported(monkeypatch, error, status, moment):
    def failing(*_):
        raise error

    def fails_when_run(case):
        program = good(case)
        program.run = failing
        return program

    build = failing if moment == "build" else fails_when_run
    results = run(monkeypatch, bad=build, good=good)
    assert results["bad"].status == status
    assert str(error) in results["bad"].detail
    assert results["good"].status == "ok"


def test_budget_stops_and_keeps_what_is_done(monkeypatch, tmp_path):
    lengths = Grid(("float32",), (16,), (32, 64), batch=1, num_heads=2).cases()
    saved = []
    options = {"budget_s": 1e-9, "save": lambda s: saved.append(len(s.results))}
    assert run(monkeypatch, lengths, options=options, good=good) == {}
    assert saved == [0]
    options["budget_s"] = 1e9
    run(monkeypatch, lengths, options=options, good=good)
    assert saved == [0, 0, 1, 2, 3, 4, 5, 6, 7, 8]


def test_sweep_is_not_complete_if_a_case_before_the_last_was_left_out(monkeypatch):
    cases = Grid(("float32",), (16,), (32,), batch=1, num_heads=2).cases()[:3]
    monkeypatch.setattr(session.os, "cpu_count", lambda: 1)
    monkeypatch.setattr(
        session.Session,
        "_long_calls_s",
        lambda self, case: 1e9 if case is cases[1] else 0.0,
    )
    saved = []
    options = {
        "budget_s": 1e8,
        "save": lambda s: saved.append(([r.case for r in s.results], s.complete)),
    }
    run(monkeypatch, cases, options=options, good=good)
    assert saved[-1] == ([cases[0], cases[2]], False)


def test_calls_that_would_take_too_long_are_skipped(monkeypatch):
    short, long = (
        Case("float32", 1, t, t, 2, 2, 16, False, "forward") for t in (32, 128)
    )
    found = run(monkeypatch, [short, long], options={"max_call_s": 0.0}, good=good)
    assert found["good"].case == long
    assert found["good"].status == "skipped"


def test_host_memory_is_not_overrun(monkeypatch):
    monkeypatch.setattr(session.machine, "available_memory", lambda: 1000)
    results = run(monkeypatch, good=good)
    assert results["good"].status == "out of memory"


@pytest.fixture
def _quick_command(monkeypatch):
    monkeypatch.setattr(command, "Protocol", lambda **_: FAST)
    monkeypatch.setattr(
        session, "matmul_program", lambda dtype, _: peers.matmul_program(dtype, 64)
    )


@pytest.mark.usefixtures("_quick_command")
@pytest.mark.parametrize(
    ("options", "reached"),
    [("--budget-s 1e-9", 0), ("--mask full --direction forward --peers cudnn", 1)],
)
def test_command_fails_if_nothing_was_measured(options, reached, tmp_path, capsys):
    options += " --length 64 --head-dim 16 --dtype float32 --no-plots --out"
    assert command.main([*options.split(), str(tmp_path)]) == 1
    text = capsys.readouterr().err
    assert f"nothing was measured: {reached} of" in text


@pytest.mark.usefixtures("_quick_command")
def test_command_writes_everything(tmp_path, capsys):
    options = "--length 64 --head-dim 16 --dtype float32 --peers jaxflash xla --out"
    assert command.main([*options.split(), str(tmp_path)]) == 0
    record = json.loads((tmp_path / "results.json").read_text())
    assert record["command"].startswith("python -m jaxflash.benchmark --length 64")
    assert record["complete"]
    assert record["machine"]["versions"]["jax"] == jax.__version__
    assert {r["status"] for r in record["results"]} == {"ok"}
    assert len(record["results"]) == 2 * 2 * 2
    for row in record["results"]:
        expected = row["flops"] / min(row["burst_s"]) * 1e-12
        assert row["burst_tflops"] == pytest.approx(expected)
    with (tmp_path / "results.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(record["results"])
    assert "| jaxflash" in (tmp_path / "table.md").read_text()
    plots = {path.name for path in tmp_path.glob("*.png")}
    assert "float32_forward_burst.png" in plots
    assert "float32_both_sustained.png" in plots
    assert "x best peer" in capsys.readouterr().out


def test_progress_needs_no_package(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    results = run(monkeypatch, good=good)
    assert results["good"].status == "ok"
    assert f"[0/1] {SMALL.label}" in capsys.readouterr().err


def test_table_compares_with_the_best_of_the_others():
    def result(name, seconds):
        times = timing.Timing(burst=[seconds], sustained=[seconds])
        return session.Result(SMALL, name, times=times)

    results = [result("jaxflash", 1.0), result("xla", 2.0), result("torch", 4.0)]
    assert report.best_peer(results, "burst") == ("xla", SMALL.flops / 2 * 1e-12)
    assert "2.00x" in report.summary(results, ("burst",))
    found = session.Session(peers=[], protocol=FAST, results=results)
    speed = SMALL.flops * 1e-12
    (row,) = [line for line in report.overview(found).splitlines() if "2.00x" in line][
        :1
    ]
    assert f"{speed:.3g} (2.00x xla)" in row
