"""Checks that the layers of the C++ and Python code know only what they may know.

Inline assembly lives in common/ptx_*.cuh and common/wgmma.cuh, includes point one way,
only the FFI layer sees XLA, and only compat.py uses private names of JAX.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Folder below csrc -> folders whose headers it may include, besides the public header.
LAYERS = {
    "include": set(),
    "api": {"api"},
    "formula": {"formula"},
    "cpu": {"api", "cpu", "formula"},
    "cuda": {"api", "cuda", "cuda/common", "cuda/sm80", "cuda/sm90"},
    "cuda/common": {"api", "cuda/common", "formula"},
    "cuda/sm80": {"api", "cuda/common", "cuda/sm80", "formula"},
    "cuda/sm90": {"api", "cuda/common", "cuda/sm90"},
    "ffi": {"ffi"},
    "python": {"cpu", "ffi", "python"},
}
XLA_LAYERS = {"ffi", "python"}
ASM_FILE = re.compile(r"(ptx_\w+|wgmma)\.cuh")
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def layer_of(folder: Path) -> str | None:
    """The longest layer name that the folder lies in."""
    parts = folder.parts
    for length in range(len(parts), 0, -1):
        name = "/".join(parts[:length])
        if name in LAYERS:
            return name
    return None


def resolve(name: str, source: Path, csrc: Path) -> Path | None:
    """The file of this project that an include names, relative to csrc."""
    for base in (csrc, source.parent, csrc / "cuda"):
        if (base / name).is_file():
            return (base / name).resolve().relative_to(csrc)
    return None


def check_cpp(csrc: Path) -> list[str]:
    """Problems in the C++ and CUDA files."""
    problems = []
    files = (
        p for p in csrc.rglob("*") if p.suffix in {".h", ".cc", ".cuh", ".cu", ".in"}
    )
    for path in sorted(files):
        text = COMMENT.sub("", path.read_text())
        relative = path.relative_to(csrc)
        layer = layer_of(relative.parent)
        where = f"csrc/{relative}"
        if re.search(r"\basm\b", text) and not ASM_FILE.fullmatch(relative.name):
            problems.append(
                f"{where}: asm belongs in ptx_*.cuh or wgmma.cuh of csrc/cuda/common"
            )
        for name in INCLUDE.findall(text):
            if name.startswith("xla/") and layer not in XLA_LAYERS:
                problems.append(
                    f"{where}: includes {name}, but only csrc/ffi knows XLA"
                )
            target = resolve(name, path, csrc)
            if layer is None or target is None or target.parts[0] == "include":
                continue
            if layer_of(target.parent) not in LAYERS[layer]:
                problems.append(f"{where}: {layer} may not include {name}")
    return problems


def check_python(package: Path) -> list[str]:
    """Problems in the Python package."""
    return [
        f"{path.relative_to(package.parent)}: jax._src belongs in compat.py"
        for path in sorted(package.rglob("*.py"))
        if path.name != "compat.py" and "jax._src" in path.read_text()
    ]


def main() -> int:
    """Prints the problems and returns the exit status."""
    problems = check_cpp(ROOT / "csrc") + check_python(ROOT / "jaxflash")
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
