"""Command line of the benchmark."""

import argparse
import dataclasses
import datetime
import os
import pathlib
import shlex
import sys

import jax

from jaxflash.benchmark import machine, plots, report
from jaxflash.benchmark.cases import WORK, Grid, default_grid
from jaxflash.benchmark.peers import PEERS, installed_peers
from jaxflash.benchmark.session import Session
from jaxflash.benchmark.timing import Protocol


def positive(text: str) -> int:
    """A whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def seconds(text: str) -> float:
    """A time above 0."""
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"must be above 0 seconds, got {number}")
    return number


def _parser() -> argparse.ArgumentParser:
    """Options; what is not given comes from the default grid of the backend."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxflash.benchmark",
        description="Measures attention side by side: jaxflash, jax.nn and what else "
        "is installed. Everything is checked before it is timed.",
    )
    shapes = parser.add_argument_group("what (default: a grid for the backend)")
    shapes.add_argument("--length", nargs="+", type=positive, help="T = S")
    shapes.add_argument("--head-dim", nargs="+", type=positive, help="H")
    shapes.add_argument(
        "--dtype", nargs="+", choices=("float32", "bfloat16", "float16")
    )
    shapes.add_argument("--mask", nargs="+", choices=("full", "causal"))
    shapes.add_argument(
        "--direction",
        nargs="+",
        choices=WORK,
        help="both: forward and backward in one program",
    )
    batch = shapes.add_mutually_exclusive_group()
    batch.add_argument("--batch", type=positive, help="B")
    batch.add_argument("--tokens", type=positive, help="B * T, instead of --batch")
    heads = shapes.add_mutually_exclusive_group()
    heads.add_argument("--heads", type=positive, help="N")
    heads.add_argument("--hidden", type=positive, help="N * H, instead of --heads")
    shapes.add_argument("--kv-heads", type=positive, help="K, default N")
    how = parser.add_argument_group("how")
    how.add_argument(
        "--peers",
        nargs="+",
        choices=PEERS,
        help="all that run, jaxflash too only if it is named; default: all installed",
    )
    how.add_argument(
        "--mode",
        nargs="+",
        choices=("burst", "sustained"),
        default=["burst", "sustained"],
        help="burst: a few calls after a pause; sustained: back to back",
    )
    how.add_argument("--quick", action="store_true", help="a small grid, under 60 s")
    how.add_argument(
        "--budget-s", type=seconds, help="start no case that would pass it"
    )
    how.add_argument(
        "--rounds", type=positive, help="turns of each peer, default 3, quick 1"
    )
    how.add_argument("--window-s", type=seconds, default=0.25, help="sustained window")
    how.add_argument(
        "--max-call-s", type=seconds, default=30.0, help="skip slower calls"
    )
    how.add_argument("--seed", type=int, default=0)
    how.add_argument(
        "--out",
        type=pathlib.Path,
        default="out/benchmark",
        help="folder of the results, default %(default)s",
    )
    how.add_argument("--no-plots", action="store_true")
    return parser


def parse(argv=None) -> argparse.Namespace:
    """The command line; whether its sizes fit together, `grid` checks."""
    return _parser().parse_args(argv)


def grid(args: argparse.Namespace, backend: str) -> Grid:
    """The default grid with what the command line says; exits where that misfits."""
    changes = {
        "lengths": args.length,
        "head_dims": args.head_dim,
        "dtypes": args.dtype,
        "masks": args.mask,
        "directions": args.direction,
    }
    chosen = {name: tuple(value) for name, value in changes.items() if value}
    if args.batch or args.tokens:
        chosen |= {"batch": args.batch, "tokens": args.tokens}
    if args.heads or args.hidden:
        chosen |= {"num_heads": args.heads, "hidden": args.hidden}
    if args.kv_heads:
        chosen["num_kv_heads"] = args.kv_heads
    found = dataclasses.replace(default_grid(backend, args.quick), **chosen)
    for option, total, part_option, parts in (
        ("--tokens", args.tokens, "--length", found.lengths),
        ("--hidden", args.hidden, "--head-dim", found.head_dims),
    ):
        for part in parts:
            if total and total % part:
                _parser().error(
                    f"{option} {total} must be a multiple of {part_option} {part}"
                )
    for case in found.cases():
        if case.num_heads % case.num_kv_heads:
            _parser().error(
                f"--kv-heads {case.num_kv_heads} must divide the number of heads, got "
                f"{case.num_heads} heads of head dim {case.head_dim}"
            )
    return found


def main(argv=None) -> int:
    """Runs the sweep.

    Returns:
        0 if something was timed, and jaxflash, where it is a peer, in every case that
        was reached.
    """
    args = parse(argv)
    # Peers outside JAX need memory too, and JAX would take most of the GPU's at once.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    backend = "gpu" if jax.default_backend() == "gpu" else "cpu"
    cases = grid(args, backend).cases()
    command = shlex.join(sys.argv[1:] if argv is None else argv)
    about = {
        "command": f"python -m jaxflash.benchmark {command}".strip(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine.describe(),
    }
    session = Session(
        peers=args.peers or installed_peers(backend),
        protocol=Protocol(
            modes=tuple(args.mode),
            rounds=args.rounds or (1 if args.quick else 3),
            window_s=args.window_s,
        ),
        seed=args.seed,
        budget_s=args.budget_s or (50.0 if args.quick else None),
        max_call_s=args.max_call_s,
        save=lambda session: report.write(args.out, session, about),
    )
    place = about["machine"]
    versions = place["versions"]
    title = f"{place['device'] if backend == 'gpu' else place['cpu']}, "
    title += f"jax {versions['jax']}"
    print(f"{title}; implementations: {', '.join(session.peers)}")

    session.run(cases, lambda results: report.summary(results, session.protocol.modes))
    report.write(args.out, session, about)
    print(f"\n{report.table(session)}")
    print("\n".join(report.notes(session)))
    drawn = [] if args.no_plots else plots.draw(args.out, session, title)
    print(f"JSON, CSV, table and {len(drawn)} plots: {args.out}")
    if all(r.status != "ok" for r in session.results):
        reached = len(report.by_case(session.results))
        print(
            f"nothing was measured: {reached} of {len(cases)} cases were reached, and "
            "no implementation was timed in any",
            file=sys.stderr,
        )
        return 1
    ours = [r for r in session.results if r.implementation == report.OURS]
    return 0 if all(r.status == "ok" for r in ours) else 1


if __name__ == "__main__":
    sys.exit(main())
