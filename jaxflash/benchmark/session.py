"""One run of the benchmark: compile, check, time, within a budget."""

import concurrent.futures
import dataclasses
import gc
import os
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxflash.benchmark import checks, machine, timing
from jaxflash.benchmark.cases import Case, make_inputs
from jaxflash.benchmark.peers import PEERS, matmul_program
from jaxflash.benchmark.progress import progress_bar


@dataclasses.dataclass
class Result:
    """What came out for one implementation in one case."""

    case: Case
    implementation: str
    status: str = "ok"  # ok, unsupported, out of memory, disagrees, failed, skipped
    detail: str = ""
    memory_bytes: int | None = None
    deviation: dict = dataclasses.field(default_factory=dict)
    times: timing.Timing = dataclasses.field(default_factory=timing.Timing)


@dataclasses.dataclass
class Session:
    """Runs cases with their peers and keeps every result.

    Attributes:
      peers: names of `peers.PEERS`.
      protocol: how to time.
      seed: of the inputs.
      budget_s: seconds after which no further case starts; None for no limit.
      max_call_s: a call that is predicted to take longer is skipped.
      save: called after the roofline and after each case.
    """

    peers: list[str]
    protocol: timing.Protocol
    seed: int = 0
    budget_s: float | None = None
    max_call_s: float = 30.0
    save: Callable[["Session"], None] = lambda session: None
    results: list[Result] = dataclasses.field(default_factory=list)
    roofline: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    complete: bool = False
    _rates: dict = dataclasses.field(default_factory=dict)

    def run(self, cases: list[Case], summary: Callable[[list[Result]], str]) -> None:
        """Measures the cases in their order and prints the summary of each."""
        began = time.monotonic()
        longest = chunk_s = 0.0
        measured = 0

        def over_budget(next_s: float) -> bool:
            elapsed = time.monotonic() - began
            return bool(self.budget_s) and elapsed + next_s > self.budget_s

        # Compilation runs ahead of the timing, never beside it.
        ahead = max(1, (os.cpu_count() or 1) // 4)
        with progress_bar(len(cases)) as bar:
            bar.describe("roofline")
            for dtype in dict.fromkeys(case.dtype for case in cases):
                self._measure_roofline(dtype)
            self.save(self)
            for first in range(0, len(cases), ahead):
                if over_budget(chunk_s + longest):
                    break
                mark = time.monotonic()
                chunk = cases[first : first + ahead]
                bar.describe(f"compile {len(chunk)} cases")
                programs = self._compile(chunk)
                chunk_s = time.monotonic() - mark
                for case in chunk:
                    expected_s = longest or chunk_s / len(chunk)
                    if over_budget(expected_s + self._long_calls_s(case)):
                        break
                    mark = time.monotonic()
                    bar.describe(case.label)
                    done = self._measure(case, programs.pop(case))
                    self.results += done
                    bar.write(summary(done))
                    bar.update()
                    measured += 1
                    self.complete = measured == len(cases)
                    self.save(self)
                    longest = max(longest, time.monotonic() - mark)

    def _measure_roofline(self, dtype: str) -> None:
        on_gpu = jax.default_backend() == "gpu"
        program, flops = matmul_program(dtype, 8192 if on_gpu else 2048)
        times = timing.Timing()
        _, call_s = timing.first_calls(program)
        for _ in range(self.protocol.rounds):
            timing.measure_round(program, times, self.protocol, call_s)
        self.roofline[dtype] = {
            mode: flops / timing.seconds(times, mode) * 1e-12
            for mode in self.protocol.modes
        }

    def _compile(self, chunk: list[Case]) -> dict[Case, dict[str | None, Any]]:
        """The check and the programs of each case, or the exceptions that came."""

        def build(case, name):
            try:
                return (checks.DenseSlice if name is None else PEERS[name])(case)
            except Exception as error:
                return error

        with concurrent.futures.ThreadPoolExecutor() as pool:
            futures = {
                case: {
                    name: pool.submit(build, case, name) for name in (None, *self.peers)
                }
                for case in chunk
            }
            return {
                case: {name: future.result() for name, future in by_name.items()}
                for case, by_name in futures.items()
            }

    def _measure(self, case: Case, programs: dict[str | None, Any]) -> list[Result]:
        """One case: every peer runs and is checked, then they are timed in turns."""
        results = {name: Result(case, name) for name in self.peers}
        try:
            inputs = make_inputs(case, self.seed)
            truth = _or_raise(programs.pop(None))(inputs)
        except Exception as error:
            for result in results.values():
                _explain(result, error)
            return list(results.values())
        anchor = None
        ready = {}
        for name in self.peers:
            result = results[name]
            try:
                program = _or_raise(programs.pop(name))
                result.memory_bytes = program.memory
                if self._skip(result):
                    continue
                program.load(inputs)
                raw, call_s = timing.first_calls(program)
                arrays = program.arrays(raw)
                result.deviation, problem = checks.check(case, arrays, truth, anchor)
            except Exception as error:
                _explain(result, error)
                continue
            self._rates[_kind(result)] = call_s / case.flops
            if problem:
                result.status, result.detail = "disagrees", problem
                continue
            anchor = arrays if anchor is None else anchor
            ready[name] = program, call_s
            del raw, arrays
        del anchor, truth, inputs

        for turn in range(self.protocol.rounds):
            for name in _rotated(list(ready), turn):
                program, call_s = ready[name]
                times = results[name].times
                if turn and call_s > timing.LONG_CALL_S:
                    continue
                try:
                    timing.measure_round(program, times, self.protocol, call_s)
                except Exception as error:
                    _explain(results[name], error)
                    del ready[name]
        ready.clear()
        gc.collect()
        return list(results.values())

    def _long_calls_s(self, case: Case) -> float:
        """What the calls of a case take that are too long to fit the usual rounds."""
        calls = [
            self._rates.get(_kind(Result(case, name)), 0.0) * case.flops
            for name in self.peers
        ]
        return sum(
            2 * call_s
            for call_s in calls
            if timing.LONG_CALL_S < call_s <= self.max_call_s
        )

    def _skip(self, result: Result) -> bool:
        """Whether the call would take too long, or more memory than is free."""
        rate = self._rates.get(_kind(result))
        if rate and rate * result.case.flops > self.max_call_s:
            result.status = "skipped"
            result.detail = f"about {rate * result.case.flops:.0f} s a call"
        needed, free = result.memory_bytes or 0, machine.available_memory()
        if needed > free:
            result.status = "out of memory"
            result.detail = f"needs {needed / 2**30:.1f} GiB of {free / 2**30:.1f}"
        return result.status != "ok"


def _or_raise(built):
    if isinstance(built, Exception):
        raise built
    return built


def _kind(result: Result) -> tuple:
    """What a peer's seconds per FLOP depend on, the length apart."""
    case = result.case
    return (result.implementation, case.dtype, case.head_dim, case.mask, case.direction)


def _rotated(names: list[str], turn: int) -> list[str]:
    """Another peer goes first in each round."""
    shift = turn % len(names) if names else 0
    return names[shift:] + names[:shift]


def _explain(result: Result, error: Exception) -> None:
    """Turns an exception into a status and one line."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
    if "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
        result.status = "out of memory"
    elif isinstance(error, NotImplementedError | ImportError):
        result.status = "unsupported"
    else:
        result.status = "failed"
        text = f"{type(error).__name__}: {text}"
    result.detail = text
