"""The memory that ranks may use: of hosts that are named, or of this machine. No MLX."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from shared.errors import UnavailableError, UsageError

Kind = Literal["metal", "cuda", "cpu"]

SMALL_BYTES = 36 * 2**30
SMALL_SHARE = 2 / 3
LARGE_SHARE = 3 / 4
"""Metal lets the GPU use this part of a Mac's memory: less of one with less than 36 GB. `sysctl
iogpu.wired_limit_mb` moves it."""

LOOK_S = 10.0
"""How long a command of the system may take to answer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """What one rank may use."""

    host: str
    total_bytes: int
    """What the host has, or the rank's part of it."""
    usable_bytes: int
    """What of it its device may use, weights included."""


Ask = Callable[[Sequence[str]], str]
"""Runs a command and returns what it writes; "" when there is none or it fails."""


def ask_system(command: Sequence[str]) -> str:
    """Run a command of the system."""
    try:
        done = subprocess.run(  # noqa: S603 - fixed commands
            command, check=False, capture_output=True, text=True, timeout=LOOK_S
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def usable(total_bytes: int, kind: Kind, share: float | None = None) -> int:
    """Return what a device may use of its host's memory; a GPU of its own and a CPU: all of it."""
    if share is None:
        share = 1.0
        if kind == "metal":
            share = SMALL_SHARE if total_bytes < SMALL_BYTES else LARGE_SHARE
    return int(total_bytes * share)


def named(
    sizes: Sequence[int], kind: Kind, share: float | None = None, names: Sequence[str] = ()
) -> list[Memory]:
    """Return one rank's memory per size; `share`: what part may be used, None: the system's."""
    return [
        Memory(names[number] if names else f"host {number}", size, usable(size, kind, share))
        for number, size in enumerate(sizes)
    ]


def this_kind(ask: Ask = ask_system, platform: str = sys.platform) -> Kind:
    """Return what MLX would compute on here, as far as the system tells it."""
    if platform == "darwin":
        return "metal"
    return "cuda" if _gpu_bytes(ask) else "cpu"


def this_machine(
    ranks: int,
    kind: Kind,
    share: float | None = None,
    *,
    ask: Ask = ask_system,
    meminfo: Path = Path("/proc/meminfo"),
) -> list[Memory]:
    """Return the memory of `ranks` ranks that all run here.

    Raises:
        UsageError: there are fewer GPUs than ranks.
        UnavailableError: the system does not say how much memory there is.
    """
    if kind == "cuda":
        cards = _gpu_bytes(ask)
        if len(cards) < ranks:
            raise UsageError(
                f"{ranks} ranks need a GPU each, and this machine has {len(cards)}: give the "
                "memory of others with --memory."
            )
        return named(cards[:ranks], kind, share, [f"GPU {n}" for n in range(ranks)])
    if kind == "metal":
        total = _number(ask(["/usr/sbin/sysctl", "-n", "hw.memsize"]))
        limit = _number(ask(["/usr/sbin/sysctl", "-n", "iogpu.wired_limit_mb"])) * 2**20
        allowed = limit if limit and share is None else usable(total, kind, share)
    else:
        total = _available_bytes(meminfo)
        allowed = usable(total, kind, share)
    if not total:
        raise UnavailableError("The system does not say how much memory it has: give --memory.")
    return [Memory("this host", total // ranks, allowed // ranks) for _ in range(ranks)]


def _gpu_bytes(ask: Ask) -> list[int]:
    text = ask(["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"])
    return [size * 2**20 for size in map(_number, text.splitlines()) if size]


def _number(text: str) -> int:
    return int(text) if text.strip().isascii() and text.strip().isdecimal() else 0


def _available_bytes(meminfo: Path) -> int:
    """Return what the system could give without swapping, as `rank_worker.hardware` counts it."""
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1_024
    except (OSError, ValueError, IndexError):
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
