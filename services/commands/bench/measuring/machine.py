"""Facts about this machine, and CPU time and memory of its processes. Times nothing itself."""

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import psutil

_ROLES = ("gateway", "scheduler", "rank-worker", "cache-store")


def describe() -> dict[str, Any]:
    """Return the facts about this machine that a report shows beside its figures.

    Returns:
        system, processor, cores (usable by this process), memory_gib, load_average_at_start (over
        one minute), python, and the versions of mlx, mlx-lm, pyzmq, aiohttp and msgspec.
    """
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "cores": usable_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average_at_start": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("mlx", "mlx-lm", "pyzmq", "aiohttp", "msgspec")},
    }


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_seconds(pid: int) -> float:
    """Return user plus system CPU time of a process since its start; 0.0: it cannot be read."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    seconds: float = times.user + times.system
    return seconds


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process in MiB; 0.0: it cannot be read."""
    try:
        resident_bytes: int = psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0.0
    return resident_bytes / 2**20


def process_tree(pid: int) -> list[int]:
    """Return the ids of a process and its descendants; only its own when it cannot be read."""
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        children = []
    return [pid, *(child.pid for child in children)]


def role_pids(supervisor: int) -> dict[str, list[int]]:
    """Return role -> ids of the processes that a running `lockstep up` started for that role.

    Args:
        supervisor: process id of `lockstep up`.

    Returns:
        The keys are those of gateway, scheduler, rank-worker and cache-store that are running.
    """
    roles: dict[str, list[int]] = {}
    for pid in process_tree(supervisor):
        try:
            arguments = psutil.Process(pid).cmdline()
        except psutil.Error:
            continue
        role = next((role for role in _ROLES if role in arguments), None)
        if role is not None:
            roles.setdefault(role, []).append(pid)
    return roles


def _processor() -> str:
    # psutil does not tell the processor's name.
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
