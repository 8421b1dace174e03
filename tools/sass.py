"""The compiled CUDA kernels of a libjaxflash, as cuobjdump shows them."""

import concurrent.futures
import dataclasses
import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterable

CUDA = pathlib.Path(__file__).parent.parent / "csrc/cuda"
KERNEL = re.compile(
    r"jaxflash\d(sm\d0)\d+(\w+?)_kernelI(?:13__nv_(bfloat16)|6__(half))Li(\d+)E"
)
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")


@dataclasses.dataclass
class Kernel:
    """One kernel, compiled for one architecture."""

    family: str  # folder of csrc/cuda
    name: str  # without _kernel
    element: str
    index: int  # of the tile configuration; of dq_conversion the head dim
    architecture: str
    stack: int  # bytes
    instructions: list[str] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        """How messages name it."""
        return (
            f"{self.family} {self.name}_kernel, configuration {self.index}, "
            f"{self.element}, {self.architecture}"
        )

    def find(self, opcode: str) -> list[int]:
        """Positions of the instructions whose opcode matches, predicated or not."""
        pattern = re.compile(rf"(?:@!?U?P\w+ )?(?:{opcode})\b")
        return [i for i, text in enumerate(self.instructions) if pattern.match(text)]


def installed_files(package: str) -> list[pathlib.Path]:
    """Where the files of an installed package lie; none if it is not."""
    try:
        files = importlib.metadata.files(package)
    except importlib.metadata.PackageNotFoundError:
        return []
    return [pathlib.Path(str(path.locate())) for path in files or ()]


def cuobjdump(*arguments: str, folder: str | None = None) -> str:
    """What cuobjdump of the CUDA wheels, or on PATH, prints."""
    tool, environment = "cuobjdump", None
    for path in installed_files("nvidia-cuda-cuobjdump"):
        if path.name == "cuobjdump":
            tool, environment = str(path), {"PATH": str(path.parent)}
    command = [tool, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=folder
    )
    if done.returncode != 0 and "does not contain device code" not in done.stderr:
        sys.exit(f"check_kernels: {' '.join(command)} failed: {done.stderr}")
    return done.stdout


def kernels_of(cubin: pathlib.Path, disassembled: set[str]) -> list[Kernel]:
    """The kernels of one cubin, with instructions if of such an architecture."""
    architecture = cubin.suffixes[-2].lstrip(".")
    kernels: dict[str, Kernel] = {}
    name = ""
    for line in cuobjdump("-res-usage", str(cubin)).splitlines():
        if match := re.search(r"Function (\S+):", line):
            name = match.group(1)
        elif (kernel := KERNEL.search(name)) and (
            stack := re.search(r"STACK:(\d+)", line)
        ):
            family, function, bfloat16, half, index = kernel.groups()
            kernels[name] = Kernel(
                family,
                function,
                bfloat16 or half,
                int(index),
                architecture,
                int(stack.group(1)),
            )
    if architecture in disassembled:
        for line in cuobjdump("-sass", str(cubin)).splitlines():
            if "Function :" in line:
                name = line.split(":")[1].strip()
            elif name in kernels and (text := INSTRUCTION.search(line)):
                kernels[name].instructions.append(text.group(1))
    return list(kernels.values())


def read_kernels(library: str, disassembled: set[str]) -> list[Kernel]:
    """The kernels of a library, for all its architectures."""
    with tempfile.TemporaryDirectory() as folder:
        cuobjdump("-xelf", "all", os.path.abspath(library), folder=folder)
        cubins = sorted(pathlib.Path(folder).glob("*.cubin"))
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            found = pool.map(lambda cubin: kernels_of(cubin, disassembled), cubins)
            return [kernel for kernels in found for kernel in kernels]


def table(header: str, struct: str, name: str) -> list[types.SimpleNamespace]:
    """Rows of a table of tile configurations, by the names of the struct's fields."""
    text = re.sub(r"//[^\n]*", "", (CUDA / header).read_text())
    text = re.sub(r"\bfalse\b", "0", re.sub(r"\btrue\b", "1", text))
    body = re.search(rf"struct {struct} {{(.*?)\n}};", text, re.DOTALL)
    rows = re.search(rf"{name}\[\] = {{(.*?)}};", text, re.DOTALL)
    assert body is not None, struct
    assert rows is not None, name
    members = re.findall(r"^  (?:int|bool) (\w+)(?: = (\d+))?;", body.group(1), re.M)
    fields = [field for field, _ in members]
    defaults = {field: int(default) for field, default in members if default}
    return [
        types.SimpleNamespace(**defaults | dict(zip(fields, values, strict=False)))
        for values in (
            map(int, row.split(",")) for row in re.findall(r"{([^{}]+)}", rows.group(1))
        )
    ]


def constant(header: str, name: str) -> int:
    """Value of a constexpr int."""
    match = re.search(rf"constexpr int {name} = (\d+);", (CUDA / header).read_text())
    assert match is not None, name
    return int(match.group(1))


def missing(
    kernels: list[Kernel], family: str, name: str, indices: Iterable[int]
) -> list[str]:
    """Configurations of a kernel that an architecture of the library lacks."""
    wanted = list(indices)
    architectures = {k.architecture for k in kernels if k.family == family}
    found = {(k.architecture, k.element, k.index) for k in kernels if k.name == name}
    return [
        f"{family} {name}_kernel, configuration {index}, {element}, {architecture}: "
        "not in the library"
        for architecture in sorted(architectures)
        for element in ("bfloat16", "half")
        for index in wanted
        if (architecture, element, index) not in found
    ]
