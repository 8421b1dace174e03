"""The examples run as a user would run them."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


def run(script: str, *arguments: str, cwd: pathlib.Path) -> str:
    """Standard output of an example, on the CPU, with every warning an error."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    process = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", EXAMPLES / script, *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def test_quickstart_agrees_with_jax_nn(tmp_path):
    text = run("quickstart.py", cwd=tmp_path)
    (difference,) = re.findall(r"largest difference from jax.nn: (\S+)", text)
    assert float(difference) < 0.02


def test_training_example_learns_and_leaves_a_curve(tmp_path):
    pytest.importorskip("flax")
    options = {"steps": 30, "batch": 4, "length": 64, "layers": 2, "width": 32}
    options["seconds"] = 0  # no limit
    arguments = [f"--{name}={value}" for name, value in options.items()]
    run("train_gpt.py", *arguments, f"--out={tmp_path}", cwd=tmp_path)
    assert (tmp_path / "loss.png").stat().st_size > 1000
    log = json.loads((tmp_path / "jaxflash.json").read_text())
    (first_step, first), *_, (last_step, last) = log["held_out_loss"]
    assert (first_step, last_step) == (0, options["steps"])
    # From all 256 bytes alike, at 5.5 nats, to the letters that are common in a text.
    assert last < first - 1
    losses = log["training_loss"]
    assert len(losses) == options["steps"]
    assert sum(losses[-5:]) / 5 < losses[0] - 1
