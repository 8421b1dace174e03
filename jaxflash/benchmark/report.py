"""What a run leaves behind: lines on the screen, table, JSON, CSV and plots."""

import csv
import dataclasses
import json
import pathlib

from jaxflash.benchmark import timing
from jaxflash.benchmark.session import Result, Session

OURS = "jaxflash"


def tflops(result: Result, mode: str) -> float | None:
    """TFLOP/s of one result in one mode, None where it was not timed."""
    if result.status != "ok" or not getattr(result.times, mode):
        return None
    return result.case.flops / timing.seconds(result.times, mode) * 1e-12


def best_peer(results: list[Result], mode: str) -> tuple[str, float] | None:
    """Name and TFLOP/s of the fastest implementation that is not ours."""
    speeds = [
        (speed, r.implementation)
        for r in results
        if r.implementation != OURS and (speed := tflops(r, mode)) is not None
    ]
    if not speeds:
        return None
    speed, name = max(speeds)
    return name, speed


def summary(results: list[Result], modes) -> str:
    """One case on one line."""
    ours = next((r for r in results if r.implementation == OURS), None)
    parts = [f"{results[0].case.label:60}"]
    for mode in modes:
        best = best_peer(results, mode)
        speed = tflops(ours, mode) if ours else None
        text = f"{mode} {_number(speed)}" if speed else f"{mode} -"
        if best:
            text += f" ({best[0]} {_number(best[1])}"
            text += f", {speed / best[1]:.2f}x)" if speed else ")"
        parts.append(text)
    trouble = [f"{r.implementation}: {r.status}" for r in results if r.status != "ok"]
    return "  ".join(parts) + (f"  [{'; '.join(trouble)}]" if trouble else "")


def table(session: Session) -> str:
    """Markdown: one line per case and implementation."""
    modes = session.protocol.modes
    head = ["case", "implementation"]
    for mode in modes:
        head += [f"{mode} TFLOP/s", "% of matmul", "x best peer"]
    lines = [[*head, "memory MiB"]]
    for results in by_case(session.results):
        for i, result in enumerate(results):
            line = ["" if i else result.case.label, result.implementation]
            if result.status != "ok":
                line += [result.status, *[""] * (3 * len(modes) - 1)]
                line.append(_mebibytes(result))
                lines.append(line)
                continue
            for mode in modes:
                speed = tflops(result, mode)
                roof = session.roofline[result.case.dtype][mode]
                others = [r for r in results if r.implementation != OURS]
                best = best_peer(others, mode)
                line += [
                    _number(speed) if speed else "",
                    f"{100 * speed / roof:.0f}" if speed else "",
                    f"{speed / best[1]:.2f}" if speed and best else "",
                ]
            lines.append([*line, _mebibytes(result)])
    return _markdown(lines)


def overview(session: Session) -> str:
    """Markdown: our speed over the length and how it compares, one table per mode."""
    lengths = list(dict.fromkeys(r.case.q_len for r in session.results))
    lengths.sort()
    text = []
    for mode in session.protocol.modes:
        rows: dict[str, dict[int, str]] = {}
        for results in by_case(session.results):
            case = results[0].case
            kind = f"{case.dtype} {case.direction} {case.mask} H={case.head_dim}"
            ours = next((r for r in results if r.implementation == OURS), None)
            speed = tflops(ours, mode) if ours else None
            best = best_peer(results, mode)
            cell = _number(speed) if speed else (ours.status if ours else "")
            if speed and best:
                cell += f" ({speed / best[1]:.2f}x {best[0]})"
            rows.setdefault(kind, {})[case.q_len] = cell
        head = [f"{mode}, TFLOP/s (x best other)", *(f"T={n}" for n in lengths)]
        lines = [head]
        lines += [[k, *(v.get(n, "") for n in lengths)] for k, v in rows.items()]
        text.append(_markdown(lines))
    return "\n".join(text)


def notes(session: Session) -> list[str]:
    """What a reader of the table must know about this run."""
    lines = []
    for dtype, roof in session.roofline.items():
        numbers = ", ".join(f"{mode} {speed:.3g}" for mode, speed in roof.items())
        lines.append(f"{dtype} matmul (100 %): {numbers} TFLOP/s")
    untimed = [r for r in session.results if r.status != "ok"]
    lines += dict.fromkeys(
        f"{r.implementation}: {r.status}: {r.detail}" for r in untimed
    )
    timed = [r for r in session.results if r.times.burst]
    if any(r.times.burst_clock == "device" for r in timed):
        wall = {r.implementation for r in timed if r.times.burst_clock == "wall"}
        if wall:
            names = ", ".join(sorted(wall))
            lines.append(f"burst by wall clock, host included, for some of: {names}")
    if not session.complete:
        lines.append("the sweep is not complete: stopped by its budget, or on its way")
    return lines


def by_case(results: list[Result]) -> list[list[Result]]:
    """Results grouped by case, in order."""
    groups: dict = {}
    for result in results:
        groups.setdefault(result.case, []).append(result)
    return list(groups.values())


def write(folder: pathlib.Path, session: Session, about: dict) -> None:
    """results.json, results.csv and table.md of everything measured so far."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [_flat(result, session) for result in session.results]
    record = {
        **about,
        "complete": session.complete,
        "protocol": dataclasses.asdict(session.protocol),
        "roofline_tflops": session.roofline,
        "results": rows,
    }
    _replace(folder / "results.json", json.dumps(record, indent=1) + "\n")
    text = table(session) + "".join(f"\n{line}" for line in notes(session)) + "\n"
    _replace(folder / "table.md", f"{overview(session)}\n{text}")
    with (folder / "results.csv").open("w", newline="") as file:
        scalars = [
            {k: v for k, v in row.items() if not isinstance(v, list | dict)}
            for row in rows
        ]
        writer = csv.DictWriter(file, list(scalars[0]) if scalars else [])
        writer.writeheader()
        writer.writerows(scalars)


def _flat(result: Result, session: Session) -> dict:
    row = dataclasses.asdict(result.case)
    row |= {
        "flops": result.case.flops,
        "implementation": result.implementation,
        "status": result.status,
        "detail": result.detail,
        "memory_bytes": result.memory_bytes,
        "burst_clock": result.times.burst_clock,
    }
    for mode in session.protocol.modes:
        row[f"{mode}_tflops"] = tflops(result, mode)
        row[f"{mode}_s"] = getattr(result.times, mode)
    return row | {"deviation": result.deviation}


def _replace(path: pathlib.Path, text: str) -> None:
    """Writes beside and renames, so that a reader never sees half a file."""
    beside = path.with_suffix(path.suffix + ".part")
    beside.write_text(text)
    beside.replace(path)


def _number(x: float) -> str:
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}"


def _mebibytes(result: Result) -> str:
    if result.memory_bytes is None:
        return ""
    return f"{result.memory_bytes / 2**20:.0f}"


def _markdown(lines: list[list[str]]) -> str:
    """A table of cells; the first line is its head."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = [_row(line, widths) for line in lines]
    text.insert(1, _row(["-" * width for width in widths], widths))
    return "\n".join(text) + "\n"


def _row(cells, widths) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return "| " + " | ".join(padded) + " |"
