"""Memory that ranks may use, on this machine or on named hosts. Owns sizes as text; no MLX."""

import re
import sys
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from services.commands.doctor.reading.linux import GPU_QUERY, read_gpus
from services.commands.doctor.reading.macos import read_number
from services.commands.doctor.system_commands import RunCommand, run_command
from shared.errors import UnavailableError, UsageError
from shared.os.memory import usable_memory

DeviceKind = Literal["metal", "cuda", "cpu"]

SMALL_BYTES = 36 * 2**30
SMALL_SHARE = 2 / 3
LARGE_SHARE = 3 / 4
"""Share of a Mac's memory that Metal lets the GPU use: less below 36 GB. `sysctl
iogpu.wired_limit_mb` changes it."""

GIB = 2**30
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": GIB, "t": 2**40}
_SIZE = re.compile(
    r"(?:(?P<times>\d{1,2})x)?(?P<number>\d{1,16}(?:\.\d{1,9})?)\s*(?P<unit>[kmgt]?)(?:i?b)?"
)

LOOK_S = 10.0
"""How long a command of the system may take to answer."""


class RankMemory(Struct, frozen=True):
    """Memory of one rank, before a model is loaded and a split is chosen."""

    host: str
    total_bytes: int
    """Memory of the host, or the rank's part of it."""
    usable_bytes: int
    """Part of it that its device may use, weights included."""


def usable_bytes_of(total_bytes: int, kind: DeviceKind, share: float | None = None) -> int:
    """Return how many bytes of memory a device may use.

    Args:
        total_bytes: memory of the host, or of the GPU.
        kind: the device.
        share: share of the memory, 0 to 1; None: the device's default, which is 1 except on Metal.
    """
    if share is None:
        share = 1.0
        if kind == "metal":
            share = SMALL_SHARE if total_bytes < SMALL_BYTES else LARGE_SHARE
    return int(total_bytes * share)


def memory_of_sizes(
    sizes: Sequence[int],
    kind: DeviceKind,
    share: float | None = None,
    names: Sequence[str] = (),
    *,
    machine_share: float = 0.0,
) -> list[RankMemory]:
    """Return the memory of one rank for each size.

    Args:
        sizes: bytes of memory, one per rank.
        kind: device of all ranks.
        share: share of it that the device may use, 0 to 1; None: the device's default.
        names: name of each rank's host; empty: "host 0", "host 1", ...
        machine_share: `rank_worker.memory_share`: part of the size for the rank; 0: all.
    """
    # With CUDA each rank has its own GPU.
    part = 1.0 if kind == "cuda" else machine_share or 1.0
    return [
        RankMemory(
            names[number] if names else f"host {number}",
            int(size * part),
            int(usable_bytes_of(size, kind, share) * part),
        )
        for number, size in enumerate(sizes)
    ]


def device_of_this_machine(
    runner: RunCommand = run_command, platform: str = sys.platform
) -> DeviceKind:
    """Return the device that MLX would use here: Metal on macOS, else CUDA if there is a GPU.

    Args:
        runner: runs a system command.
        platform: name of the platform, as in `sys.platform`.
    """
    if platform == "darwin":
        return "metal"
    return "cuda" if _gpu_bytes(runner) else "cpu"


def memory_of_this_machine(
    ranks: int,
    kind: DeviceKind,
    share: float | None = None,
    *,
    machine_share: float = 0.0,
    runner: RunCommand = run_command,
) -> list[RankMemory]:
    """Return the memory of `ranks` ranks that all run here: a GPU each, or parts of this machine.

    Args:
        ranks: number of ranks.
        kind: their device.
        share: share of the memory that it may use, 0 to 1; None: as the system or device limits it.
        machine_share: `rank_worker.memory_share`: part of this machine for each rank, except with
            CUDA; 0: equal parts.
        runner: runs a system command.

    Raises:
        UsageError: when there are fewer GPUs than ranks.
        UnavailableError: when the system does not report its memory.
    """
    if kind == "cuda":
        cards = _gpu_bytes(runner)
        if len(cards) < ranks:
            raise UsageError(
                f"{ranks} ranks need a GPU each, and this machine has {len(cards)}: give the "
                "memory of others with --memory."
            )
        return memory_of_sizes(cards[:ranks], kind, share, [f"GPU {n}" for n in range(ranks)])
    if kind == "metal":
        total = _sysctl(runner, "hw.memsize")
        limit = _sysctl(runner, "iogpu.wired_limit_mb") * 2**20
        allowed = limit if limit and share is None else usable_bytes_of(total, kind, share)
        part = machine_share or 1.0 / ranks
        total, allowed = int(total * part), int(allowed * part)
    else:
        # Available without swapping and within a container's limit, as the rank worker counts it.
        total = usable_memory(ranks, machine_share).free_bytes
        allowed = usable_bytes_of(total, kind, share)
    if not total:
        raise UnavailableError("The system does not report how much memory it has: give --memory.")
    return [RankMemory("this host", total, allowed)] * ranks


def parse_sizes(text: str) -> list[int]:
    """Parse sizes of memory such as "512GB,2x192GB" into bytes, one number per host.

    GB and GiB are both 2**30 bytes.

    Raises:
        UsageError: when it is not a list of sizes, or one of them is 0.
    """
    found: list[int] = []
    for part in text.split(","):
        match = _SIZE.fullmatch(part.strip().lower())
        size = int(float(match["number"]) * _UNITS[match["unit"]]) if match else 0
        times = int(match["times"] or 1) if match else 0
        if not size or not times or size > 2**50:
            raise UsageError(
                f"{part.strip()[:64]!r} is not a size of memory: write for example 512GB, or "
                "512GB,192GB for two hosts."
            )
        found += [size] * times
    return found


def _gpu_bytes(runner: RunCommand) -> list[int]:
    said = runner(GPU_QUERY, LOOK_S)
    return [card.total for card in read_gpus(said.text) if card.total] if said.ok else []


def _sysctl(runner: RunCommand, name: str) -> int:
    """Return a number of the system; 0: unknown."""
    said = runner(["/usr/sbin/sysctl", "-n", name], LOOK_S)
    return (said.ok and read_number(said.text)) or 0
