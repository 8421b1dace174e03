"""Plots of a run: TFLOP/s over the length, one PNG per dtype, direction and mode."""

import importlib
import pathlib

from jaxflash.benchmark.report import OURS, tflops
from jaxflash.benchmark.session import Session


def draw(folder: pathlib.Path, session: Session, title: str) -> list[pathlib.Path]:
    """Writes the plots; returns their paths, none where matplotlib is missing."""
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError:
        print("no plots: matplotlib is not installed")
        return []
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    paths = []
    kinds = dict.fromkeys((r.case.dtype, r.case.direction) for r in session.results)
    for dtype, direction in kinds:
        for mode in session.protocol.modes:
            chosen = [
                r
                for r in session.results
                if (r.case.dtype, r.case.direction) == (dtype, direction)
                and tflops(r, mode) is not None
            ]
            if not chosen:
                continue
            roof = session.roofline[dtype][mode]
            figure = _figure(pyplot, chosen, session.peers, mode, roof)
            figure.suptitle(f"{direction}, {dtype}, {mode}: {title}", fontsize=10)
            paths.append(folder / f"{dtype}_{direction}_{mode}.png")
            figure.savefig(paths[-1], dpi=110)
            pyplot.close(figure)
    return paths


def _figure(pyplot, results, names, mode, roof):
    """Panels by mask (down) and head dim (across), one line per implementation."""
    masks = sorted({r.case.mask for r in results}, reverse=True)
    head_dims = sorted({r.case.head_dim for r in results})
    lengths = sorted({r.case.q_len for r in results})
    figure, panels = pyplot.subplots(
        len(masks), len(head_dims), sharex=True, sharey=True, squeeze=False,
        figsize=(1.5 + 3.6 * len(head_dims), 0.8 + 2.7 * len(masks)),
        layout="constrained",
    )  # fmt: skip
    for row, mask in zip(panels, masks, strict=True):
        for axes, head_dim in zip(row, head_dims, strict=True):
            for color, name in enumerate(names):
                points = sorted(
                    (r.case.q_len, tflops(r, mode))
                    for r in results
                    if (r.implementation, r.case.mask, r.case.head_dim)
                    == (name, mask, head_dim)
                )
                if points:
                    axes.plot(
                        *zip(*points, strict=True), "o-", ms=3.5, label=name,
                        color=f"C{color}", lw=2.2 if name == OURS else 1.2,
                    )  # fmt: skip
            axes.axhline(roof, color="gray", ls=":", lw=1)
            axes.set_xscale("log", base=2)
            axes.set_xticks(lengths, [_short(length) for length in lengths])
            axes.minorticks_off()
            axes.set_title(f"{mask}, H={head_dim}", fontsize=9)
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
        row[0].set_ylabel("TFLOP/s (dotted: matmul)")
    for axes in panels[-1]:
        axes.set_xlabel("length T = S")
    panels[0][0].legend(fontsize=8)
    return figure


def _short(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)
