"""What only a GPU can run, the build can still guard: the compiled CUDA kernels.

Reads libjaxflash, the installed one or that of --library, with cuobjdump and fails
where a compiler or an edit lost something: see sm80_gates.py and sm90_gates.py. Passes,
with a sentence, where the library has no CUDA kernels.
"""

import argparse
import pathlib
import sys

# The interpreter may have been told to leave this folder out.
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import sass
import sm80_gates
import sm90_gates


def find_library() -> str:
    """The libjaxflash of the installed package."""
    for path in sass.installed_files("jaxflash"):
        if path.name.startswith("libjaxflash.so"):
            return str(path)
    sys.exit("check_kernels: jaxflash is not installed with its library")


def main() -> None:
    """Checks one library."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", help="path of a libjaxflash.so")
    library = parser.parse_args().library or find_library()
    kernels = sass.read_kernels(
        library, {sm80_gates.ARCHITECTURE, sm90_gates.ARCHITECTURE}
    )
    if not kernels:
        print("check_kernels: this libjaxflash has no CUDA kernels")
        return
    built = {kernel.architecture for kernel in kernels}
    errors = []
    for family, gates in (("sm80", sm80_gates), ("sm90", sm90_gates)):
        errors += gates.check([k for k in kernels if k.family == family])
        # Both families are built for Hopper, or none is.
        if "sm_90" in built and gates.ARCHITECTURE not in built:
            errors.append(f"no {family} kernel for {gates.ARCHITECTURE}")
    errors += [
        f"{kernel}: no instructions were found"
        for kernel in kernels
        if kernel.architecture in (sm80_gates.ARCHITECTURE, sm90_gates.ARCHITECTURE)
        and not kernel.instructions
    ]
    if errors:
        sys.exit("\n".join(errors))
    print(f"check_kernels: {', '.join(sorted(built))} as measured")


if __name__ == "__main__":
    main()
