"""Seconds per call, in two modes that answer two questions.

burst      a few calls after a pause: what the kernels can do. On a GPU the clock is
           the device's, without any host; elsewhere wall time of each call.
sustained  calls back to back for a fixed window, wall time: what a training loop sees,
           at the clock rate that power and temperature leave.

Numbers of one mode compare only within one run, which is why the peers take turns.
"""

import dataclasses
import math
import statistics
import time

import jax

LONG_CALL_S = 2.0  # from here on a call is timed once, and warming up gains nothing


@dataclasses.dataclass
class Timing:
    """Seconds per call of one program, one entry per round."""

    burst: list[float] = dataclasses.field(default_factory=list)
    sustained: list[float] = dataclasses.field(default_factory=list)
    burst_clock: str = "wall"


@dataclasses.dataclass(frozen=True)
class Protocol:
    """How to time."""

    modes: tuple[str, ...] = ("burst", "sustained")
    rounds: int = 3
    pause_s: float = 0.1
    burst_calls: int = 4
    window_s: float = 0.25


def measure_round(program, timing: Timing, protocol: Protocol, call_s: float) -> None:
    """Adds one round to `timing`. `call_s` is about what one call takes."""
    if call_s > LONG_CALL_S:
        # Far longer than the window: one call is a burst and sustained at once.
        time.sleep(protocol.pause_s)
        seconds = _wall(program, calls=1)
        timing.burst.append(seconds)
        timing.sustained.append(seconds)
        return
    if "burst" in protocol.modes:
        time.sleep(protocol.pause_s)
        timing.burst.append(_burst(program, timing, protocol))
    if "sustained" in protocol.modes:
        calls = max(1, math.ceil(protocol.window_s / call_s))
        timing.sustained.append(_wall(program, calls))


def _burst(program, timing: Timing, protocol: Protocol) -> float:
    try:
        on_device = program.device_seconds(protocol.burst_calls)
    except Exception:
        # No CUPTI, or another profiler has it. What is wrong with the program itself
        # shows again below.
        on_device = None
    if on_device:
        timing.burst_clock = "device"
        return min(on_device)
    return min(_wall(program, calls=1) for _ in range(protocol.burst_calls))


def _wall(program, calls: int) -> float:
    """Seconds per call of `calls` calls in a row."""
    # XLA's CPU client may run calls that do not depend on each other side by side.
    in_turn = jax.default_backend() == "cpu"
    began = time.perf_counter()
    results = None
    for _ in range(calls):
        results = program.run()
        if in_turn:
            program.wait(results)
    program.wait(results)
    return (time.perf_counter() - began) / calls


def first_calls(program) -> tuple:
    """Warms up; returns (results, about what a call in a row of calls takes)."""
    began = time.perf_counter()
    results = program.run()
    program.wait(results)
    seconds = time.perf_counter() - began
    if seconds < LONG_CALL_S:
        seconds = _wall(program, calls=1)
        calls = min(20, math.ceil(0.05 / seconds))
        seconds = _wall(program, calls)
    return results, seconds


def seconds(timing: Timing, mode: str) -> float:
    """One number of all rounds: the fastest burst, the median of sustained."""
    if mode == "burst":
        return min(timing.burst)
    return statistics.median(timing.sustained)
