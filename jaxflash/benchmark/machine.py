"""Where a benchmark ran: hardware and versions, without names of hosts or users."""

import importlib.metadata
import os
import pathlib
import platform
import subprocess

import jax

_PACKAGES = (
    "jaxflash", "jax", "jaxlib", "numpy", "jax-cuda13-plugin", "jax-cuda12-plugin",
    "nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "flash-attn3-jax", "tokamax", "torch",
)  # fmt: skip


def describe() -> dict:
    """Devices, processor, memory and the versions of what takes part."""
    devices = jax.devices()
    return {
        "backend": jax.default_backend(),
        "device": devices[0].device_kind,
        "num_devices": len(devices),
        "gpu": _nvidia_smi(),
        "cpu": _cpu_name(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(_meminfo("MemTotal") / 2**30, 1),
        "system": platform.system() + " " + platform.machine(),
        "versions": {"python": platform.python_version(), **_versions()},
    }


def available_memory() -> int:
    """Bytes that new arrays on the default device can have."""
    if jax.default_backend() == "cpu":
        return _meminfo("MemAvailable")
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("bytes_limit", 2**62) - stats.get("bytes_in_use", 0)


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _meminfo(field: str) -> int:
    for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return 0


def _cpu_name() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _nvidia_smi() -> str | None:
    """Name, driver, power limit and memory of the GPUs, if there are any."""
    query = "name,driver_version,power.limit,memory.total"
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return "; ".join(answer.stdout.strip().splitlines())
