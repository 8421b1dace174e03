"""What only a GPU can run, the build can still guard: the compiled CUDA kernels.

Reads the installed libjaxflash with cuobjdump and fails where a compiler or an edit
lost something:

- stack: registers spilled past what was measured when the kernels were timed,
- HMMA: the tensor core instructions of each kernel, whose number follows from the
  tiles in csrc/cuda/sm80/tile_config.h.

Passes, with a sentence, where the library has no CUDA kernels.
"""

import collections
import importlib.metadata
import pathlib
import re
import subprocess
import sys

CONFIGS = pathlib.Path(__file__).parent.parent / "csrc/cuda/sm80/tile_config.h"
KERNEL = re.compile(
    r"(forward|backward|backward_rows|dq_conversion)_kernelI\w*?Li(\d+)E"
)

# Bytes of stack that a kernel may use: measured with nvcc 13.0. What is spilled lies
# outside the loop over full tiles, or is an address that the loop reads once.
MAX_STACK = {"forward": 96, "backward": 0, "backward_rows": 0, "dq_conversion": 0}
# sm_80 has no vector red, whose addresses do not fit the registers at H = 256.
MAX_STACK_SM80_BACKWARD = 96
SASS_ARCH = "sm_90"


def find_library() -> str:
    """The libjaxflash of the installed package."""
    for path in importlib.metadata.files("jaxflash") or ():
        if path.name.startswith("libjaxflash.so"):
            return str(path.locate())
    sys.exit("check_kernels: jaxflash is not installed with its library")


def cuobjdump(*arguments: str) -> str:
    """What cuobjdump of the CUDA wheels, or on PATH, prints."""
    tool, environment = "cuobjdump", None
    for path in importlib.metadata.files("nvidia-cuda-cuobjdump") or ():
        if path.name == "cuobjdump":
            tool = str(path.locate())
            environment = {"PATH": str(pathlib.Path(tool).parent)}
    command = [tool, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0 and "does not contain device code" not in done.stderr:
        sys.exit(f"check_kernels: {' '.join(command)} failed: {done.stderr}")
    return done.stdout


def table(name: str) -> list[list[int]]:
    """Rows of a table of tile_config.h."""
    text = re.search(rf"{name}\[\] = {{(.*?)}};", CONFIGS.read_text(), re.DOTALL)
    assert text is not None, name
    return [
        [int(number) for number in row.split(",")]
        for row in re.findall(r"{([\d, ]+)}", text.group(1))
    ]


def forward_mma(
    head_dim: int, block_q: int, block_kv: int, num_warps: int, num_stages: int
) -> int:
    """m16n8k16 products of a warp, in the masked and in the full loop."""
    row_tiles = block_q // (16 * num_warps)
    return 2 * 2 * row_tiles * (block_kv // 8) * (head_dim // 16)


def backward_mma(
    head_dim: int,
    block_q: int,
    block_kv: int,
    row_tiles: int,
    split: int,
    num_stages: int,
) -> int:
    """m16n8k16 products of a warp: S, dP, dV, dK and dQ are of one size."""
    num_warps = block_kv // (16 * row_tiles) * split
    return 5 * (block_q // 8) * (block_kv // 16) * (head_dim // 16) // num_warps


def check_stack(library: str) -> list[str]:
    """Kernels that use more stack than they may."""
    errors, arch, kernel = [], "", None
    for line in cuobjdump("-res-usage", library).splitlines():
        if match := re.search(r"arch = (sm_\d+)", line):
            arch = match.group(1)
        elif match := re.search(r"Function (\S+):", line):
            kernel = KERNEL.search(match.group(1))
        elif kernel and (match := re.search(r"STACK:(\d+)", line)):
            name, allowed = kernel.group(1), MAX_STACK[kernel.group(1)]
            if name == "backward" and arch == "sm_80":
                allowed = MAX_STACK_SM80_BACKWARD
            if int(match.group(1)) > allowed:
                errors.append(
                    f"{name}_kernel, configuration {kernel.group(2)}, {arch}: "
                    f"{match.group(1)} bytes of stack, at most {allowed} allowed"
                )
    return errors


def check_mma(library: str) -> list[str]:
    """Kernels whose number of tensor core instructions is not that of their tiles."""
    expected = {
        **{
            ("forward", i): forward_mma(*c)
            for i, c in enumerate(table("kForwardConfigs"))
        },
        **{
            ("backward", i): backward_mma(*c)
            for i, c in enumerate(table("kBackwardConfigs"))
        },
    }
    found: collections.Counter = collections.Counter()
    kernel, dtype = None, ""
    for line in cuobjdump("-sass", "-arch", SASS_ARCH, library).splitlines():
        if "Function :" in line:
            kernel = KERNEL.search(line)
            dtype = "half" if "6__half" in line else "bfloat16"
        elif kernel and "HMMA.16816" in line:
            found[kernel.group(1), int(kernel.group(2)), dtype] += 1
    return [
        f"{name}_kernel, configuration {index}, {dtype}: {found[name, index, dtype]} "
        f"HMMA instructions, its tiles need {count}"
        for (name, index), count in expected.items()
        for dtype in ("bfloat16", "half")
        if found[name, index, dtype] != count
    ]


def main() -> None:
    """Checks the installed library."""
    library = find_library()
    architectures = set(re.findall(r"sm_\d+", cuobjdump("-lelf", library)))
    if not architectures:
        print("check_kernels: this libjaxflash has no CUDA kernels")
        return
    errors = check_stack(library)
    if SASS_ARCH in architectures:
        errors += check_mma(library)
    if errors:
        sys.exit("\n".join(errors))
    print(f"check_kernels: {', '.join(sorted(architectures))} as measured")


if __name__ == "__main__":
    main()
