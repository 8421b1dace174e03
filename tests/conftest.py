"""Strict JAX, the implementations under test, and the devices they run on."""

from __future__ import annotations

import os
from typing import Any

# Several test processes share one GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Test processes run one per core: the oracle's matrix products (NumPy, which nobody has
# imported yet) would start as many threads again in each.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 2)

IMPLEMENTATIONS = ("reference", "cpu", "cuda")
DTYPES = {
    "reference": ("float32", "bfloat16", "float16"),
    "cpu": ("float32", "bfloat16", "float16"),
    "cuda": ("bfloat16", "float16"),
}


def _device(implementation: str) -> Any:
    """Where tests of this implementation put their arrays."""
    if implementation != "cuda":
        return jax.devices("cpu")[0]
    try:
        return jax.devices("cuda")[0]
    except RuntimeError as error:
        pytest.skip(f"no CUDA device: {str(error).splitlines()[0]}")


def _parameters(names: tuple[str, ...]) -> list:
    return [
        pytest.param(name, marks=pytest.mark.gpu if name == "cuda" else ())
        for name in names
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Gives `implementation` and `dtype` the pairs that exist.

    A test that takes both runs on every dtype that a kernel serves. On the reference it
    runs in float32 alone unless it is marked `every_dtype`: plain JAX needs no sweep
    over tile sizes, and takes a second to compile. A test that takes `implementation`
    alone runs on each once (see `working_dtype`). The marker `implementations` narrows
    the choice.
    """
    if "implementation" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("implementations")
    names = marker.args if marker else IMPLEMENTATIONS
    if "dtype" not in metafunc.fixturenames:
        metafunc.parametrize("implementation", _parameters(names))
        return
    every = metafunc.definition.get_closest_marker("every_dtype")
    pairs = [
        pytest.param(name, dtype, marks=pytest.mark.gpu if name == "cuda" else ())
        for name in names
        for dtype in DTYPES[name]
        if name != "reference" or dtype == "float32" or every
    ]
    metafunc.parametrize("implementation, dtype", pairs)


@pytest.fixture
def working_dtype(implementation: str) -> str:
    """The most accurate dtype that the implementation serves."""
    return "float16" if implementation == "cuda" else "float32"


@pytest.fixture(autouse=True)
def _placement(request: pytest.FixtureRequest):
    """Runs each test on the device of its implementation; the CPU where it has none."""
    name = "cpu"
    if "implementation" in request.fixturenames:
        name = request.getfixturevalue("implementation")
    elif request.node.get_closest_marker("gpu"):
        name = "cuda"
    with jax.default_device(_device(name)):
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu",
        action="store_true",
        help="run only the tests that need a GPU, and fail if none of them ran",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "implementations(*names): run on these implementations only"
    )
    config.addinivalue_line("markers", "every_dtype: the reference too")
    config.pluginmanager.register(_GpuCount(config), "jaxflash-gpu-count")


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    if not config.getoption("--require-gpu"):
        return
    dropped = [item for item in items if not item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=dropped)
    items[:] = [item for item in items if item.get_closest_marker("gpu")]


class _GpuCount:
    """Counts the GPU tests that ran, since a suite of skips looks like a success."""

    def __init__(self, config: pytest.Config):
        self.required = config.getoption("--require-gpu")
        self.ran = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        finished = report.when == "call" and not report.skipped
        self.ran += finished and "gpu" in report.keywords

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if (
            self.required
            and not self.ran
            and not hasattr(session.config, "workerinput")
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter) -> None:
        if self.required:
            terminalreporter.write_line(f"GPU tests run: {self.ran}")
