"""The examples run as a user would run them."""

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
    arguments = [f"--{name}={value}" for name, value in options.items()]
    run("train_gpt.py", *arguments, f"--out={tmp_path}", cwd=tmp_path)
    assert (tmp_path / "loss.png").stat().st_size > 1000
