"""The C API from outside: the examples, a C program, and what the package installs."""

from __future__ import annotations

import importlib.metadata
import pathlib
import re
import shutil
import subprocess
import sys

import c_api
import ctypes_numpy
import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = pathlib.Path(ctypes_numpy.find_library()).parent.parent


def run(*command, cwd: pathlib.Path) -> str:
    """Output of a command that must succeed."""
    process = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def cmake(*arguments, cwd: pathlib.Path) -> str:
    found = shutil.which("cmake")
    program = [found] if found else [sys.executable, "-m", "cmake"]
    return run(*program, *arguments, cwd=cwd)


def test_ctypes_example_equals_numpy(tmp_path):
    text = run(sys.executable, ROOT / "examples" / "ctypes_numpy.py", cwd=tmp_path)
    assert "\nequal to NumPy" in text


def test_pybind11_project_builds_against_the_installed_package(tmp_path):
    pytest.importorskip("pybind11")
    project = ROOT / "examples" / "embed_pybind11"
    settings = ("-DCMAKE_BUILD_TYPE=Release", f"-DPython_EXECUTABLE={sys.executable}")
    cmake("-S", project, "-B", tmp_path, *settings, cwd=tmp_path)
    cmake("--build", tmp_path, cwd=tmp_path)
    text = run(sys.executable, project / "check.py", tmp_path, cwd=tmp_path)
    assert "refused: num_heads must be" in text


C_PROGRAM = r"""
#include <jaxflash/attention.h>
#include <stdio.h>
#include <string.h>

int main(void) {
  float q[2] = {1, 1}, v[2] = {3, 5}, out[2], lse[2];
  jaxflash_attention_params p;
  memset(&p, 0, sizeof p);
  p.struct_size = sizeof p;
  p.q_len = p.kv_len = 2;
  p.num_heads = p.num_kv_heads = p.head_dim = p.value_head_dim = 1;
  p.window_left = p.window_right = -1;
  p.q.data = p.k.data = q;
  p.v.data = v;
  p.out.data = out;
  p.lse.data = lse;
  p.q.dtype = p.k.dtype = p.v.dtype = p.out.dtype = p.lse.dtype = JAXFLASH_FLOAT32;
  p.q.strides[0] = p.k.strides[0] = p.v.strides[0] = p.out.strides[0] = 1;
  p.lse.strides[1] = 1;
  size_t bytes = 0;
  jaxflash_status status = jaxflash_attention_forward_workspace_cpu(&p, &bytes);
  if (status == JAXFLASH_OK && bytes == 0)
    status = jaxflash_attention_forward_cpu(&p, NULL, 0, NULL);
  printf("%s %s %g %g\n", jaxflash_version(), jaxflash_status_name(status),
         (double)out[0], (double)out[1]);
  return 0;
}
"""


def test_a_c99_program_compiles_without_warnings_and_runs(tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    source, program = tmp_path / "program.c", tmp_path / "program"
    source.write_text(C_PROGRAM)
    library = PACKAGE / "lib"
    flags = ("-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror")
    paths = (f"-I{PACKAGE / 'include'}", f"-L{library}", f"-Wl,-rpath,{library}")
    run(compiler, *flags, source, *paths, "-ljaxflash", "-o", program, cwd=tmp_path)
    version = importlib.metadata.version("jaxflash")
    assert run(program, cwd=tmp_path) == f"{version} OK 4 4\n"


def test_the_version_is_stated_once_per_language_and_agrees():
    version = importlib.metadata.version("jaxflash")
    header = (PACKAGE / "include" / "jaxflash" / "attention.h").read_text()
    numbers = re.findall(
        r"#define JAXFLASH_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header
    )
    assert ".".join(numbers) == version
    assert c_api.LIBRARY.jaxflash_version().decode() == version


def test_the_library_exports_the_c_api_and_nothing_else():
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("no nm")
    library = PACKAGE / "lib" / "libjaxflash.so"
    lines = run(nm, "-D", "--defined-only", library, cwd=PACKAGE).splitlines()
    exported = {line.split()[2] for line in lines}
    header = (PACKAGE / "include" / "jaxflash" / "attention.h").read_text()
    declared = set(re.findall(r"\b(jaxflash_\w+)\(", header))
    for_python = {"_ZN8jaxflash3cpu11simd_targetEv"}
    assert exported == declared | for_python
