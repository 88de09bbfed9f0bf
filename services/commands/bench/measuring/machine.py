"""What this machine is, and what its processes have cost. Measures nothing itself."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def describe() -> dict[str, Any]:
    """Return what a reader must know to judge the numbers."""
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "cores": usable_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average_at_start": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("mlx", "mlx-lm", "pyzmq", "aiohttp", "msgspec")},
    }


def usable_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_seconds(pid: int) -> float | None:
    """Return user plus system time of a process, all its threads; None when it cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    except FileNotFoundError:
        return _ps_seconds(pid)


def descendants(pid: int) -> list[int]:
    """Return the process and all below it."""
    children: dict[int, list[int]] = {}
    for line in _ps("-A", "-o", "pid=,ppid=").splitlines():
        child, parent = line.split()
        children.setdefault(int(parent), []).append(int(child))
    found, queue = [], [pid]
    while queue:
        one = queue.pop()
        found.append(one)
        queue += children.get(one, [])
    return found


def role_pids(supervisor: int) -> dict[str, list[int]]:
    """Return role -> process ids of a running `lockstep up`."""
    roles: dict[str, list[int]] = {}
    for pid in descendants(supervisor):
        command = _ps("-p", str(pid), "-o", "command=").split()
        for role in ("gateway", "scheduler", "rank-worker", "cache-store"):
            if role in command:
                roles.setdefault(role, []).append(pid)
                break
    return roles


def role_cpu_seconds(roles: dict[str, list[int]]) -> dict[str, float]:
    """Return role -> CPU seconds so far."""
    return {role: sum(cpu_seconds(pid) or 0.0 for pid in pids) for role, pids in roles.items()}


def role_resident_mib(roles: dict[str, list[int]]) -> dict[str, float]:
    """Return role -> resident memory in MiB."""
    return {
        role: sum(float(_ps("-p", str(pid), "-o", "rss=").strip() or 0) for pid in pids) / 1_024
        for role, pids in roles.items()
    }


def _ps_seconds(pid: int) -> float | None:
    """Read "[[hours:]minutes:]seconds" from ps, where there is no /proc."""
    text = _ps("-p", str(pid), "-o", "time=").strip()
    if not text:
        return None
    seconds = 0.0
    for part in text.replace("-", ":").split(":"):
        seconds = seconds * 60 + float(part)
    return seconds


def _ps(*arguments: str) -> str:
    done = subprocess.run(["/bin/ps", *arguments], capture_output=True, text=True, check=False)
    return done.stdout


def _processor() -> str:
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
