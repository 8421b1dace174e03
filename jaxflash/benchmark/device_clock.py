"""Time on the GPU alone, from the records of JAX's profiler.

A call takes from the start of its first kernel or copy to the end of its last. The sum
of the durations would be another number: a kernel that starts early and waits for the
one before (programmatic dependent launch) would count twice while the two overlap, and
gaps between kernels would not count.
"""

import glob
import os
import tempfile
from collections.abc import Callable
from typing import NamedTuple

import jax


class Activity(NamedTuple):
    """A kernel or a copy on the device."""

    start_ns: float
    end_ns: float
    name: str


def seconds_per_call(run: Callable, wait: Callable, calls: int) -> list[float] | None:
    """Runs `calls` calls in a row and returns what each took on the device.

    Args:
        run: starts one call, whose results it returns.
        wait: blocks until the call with these results is done.
        calls: how many.

    Returns:
        Seconds of each call, or None where nothing ran on a GPU.

    Raises:
        ValueError: if the calls did not all do the same, see `spans`.
    """
    activities = record(run, wait, calls)
    if not activities:
        return None
    return [ns * 1e-9 for ns in spans(activities, calls)]


def record(run: Callable, wait: Callable, calls: int) -> list[Activity]:
    """What the GPU did in these calls, in the order of the starts."""
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = 0  # nothing of the host is read below
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            results = None
            for _ in range(calls):
                results = run()
            wait(results)
        pattern = os.path.join(folder, "**", "*.xplane.pb")
        (path,) = glob.glob(pattern, recursive=True)
        profile = jax.profiler.ProfileData.from_file(path)
    return sorted(
        Activity(event.start_ns, event.start_ns + event.duration_ns, event.name)
        for plane in profile.planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    )


def spans(activities: list[Activity], calls: int) -> list[float]:
    """Nanoseconds from the first start to the last end within each call.

    Raises:
        ValueError: if the activities are not the same ones `calls` times.
    """
    per_call, left_over = divmod(len(activities), calls)
    groups = [activities[i * per_call : (i + 1) * per_call] for i in range(calls)]
    names = [sorted(activity.name for activity in group) for group in groups]
    if left_over or any(n != names[0] for n in names):
        raise ValueError(
            f"expected the same kernels in each of {calls} calls, got "
            f"{[activity.name for activity in activities]}"
        )
    return [max(a.end_ns for a in group) - group[0].start_ns for group in groups]
