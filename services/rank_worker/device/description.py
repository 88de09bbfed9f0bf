"""The description of a rank's device, and how to get it without starting MLX here. No MLX."""

import subprocess
import sys
from typing import Literal

import msgspec

from shared.errors import UnavailableError

DESCRIBE_TIMEOUT_S = 120.0
"""Limit for the other process, which has to start MLX."""


DeviceKind = Literal["cpu", "metal", "cuda"]


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """Kind, name and memory of the device that MLX computes on by default."""

    kind: DeviceKind
    name: str
    """MLX's name of the device or its architecture."""
    memory_bytes: int
    """Memory that the rank may use, including weights."""


def own_part(device: Device, ranks_on_host: int, machine_share: float = 0.0) -> int:
    """Return the bytes of a device's memory for one of the ranks that share it.

    Args:
        device: the device.
        ranks_on_host: number of ranks that share it in equal parts.
        machine_share: part for this rank, instead of an equal one; 0: an equal one.
    """
    if machine_share:
        return int(device.memory_bytes * machine_share)
    return device.memory_bytes // max(1, ranks_on_host)


def describe_in_subprocess() -> Device:
    """Describe MLX's default device from another process; this process can still choose its GPU.

    Raises:
        UnavailableError: when MLX does not start.
        subprocess.TimeoutExpired: when it takes longer than `DESCRIBE_TIMEOUT_S`.
    """
    done = subprocess.run(
        [sys.executable, "-m", "services.rank_worker.device.hardware"],
        check=False,
        capture_output=True,
        timeout=DESCRIBE_TIMEOUT_S,
    )
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise UnavailableError(f"MLX does not start on this machine: {last}.")
    return msgspec.json.decode(done.stdout, type=Device)
