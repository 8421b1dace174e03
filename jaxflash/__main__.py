"""`python -m jaxflash`: where the C library is, and what this installation can run."""

import argparse
import pathlib

import jax

import jaxflash
from jaxflash import selection


def _paths() -> dict[str, pathlib.Path]:
    """Where CMake, a C compiler and ctypes find the library."""
    module = selection.load("cpu")
    if isinstance(module, str):
        raise SystemExit(module)
    # The library lies beside the compiled modules, also in an editable installation.
    root = pathlib.Path(str(module.__file__)).parent
    return {
        "library": root / "lib" / "libjaxflash.so",
        "include-dir": root / "include",
        "cmake-dir": root / "lib" / "cmake" / "jaxflash",
    }


def _report() -> str:
    lines = [f"jaxflash {jaxflash.__version__}, jax {jax.__version__}"]
    for backend in selection.PLATFORMS:
        module = selection.load(backend)
        if isinstance(module, str):
            lines.append(f"{backend}: {module}")
            continue
        info = ", ".join(f"{key} {value}" for key, value in module.info().items())
        lines.append(f"{backend}: {selection.unavailable(backend) or 'ready'} ({info})")
    devices = ", ".join(f"{d.platform} {d.device_kind}" for d in jax.devices())
    return "\n".join([*lines, f"devices: {devices}"])


def main() -> None:
    """Prints the path that was asked for, or all and a report."""
    parser = argparse.ArgumentParser(prog="python -m jaxflash", description=__doc__)
    group = parser.add_mutually_exclusive_group()
    for name in ("library", "include-dir", "cmake-dir"):
        group.add_argument(
            f"--{name}", dest="path", action="store_const", const=name, help="print it"
        )
    wanted = parser.parse_args().path
    if wanted:
        print(_paths()[wanted])
        return
    print(_report())
    if not isinstance(selection.load("cpu"), str):
        for name, path in _paths().items():
            print(f"{name}: {path}")


if __name__ == "__main__":
    main()
