"""What a rank says about its device before it joins a world. No MLX."""

import subprocess
import sys
from typing import Literal

import msgspec

from shared.errors import UnavailableError

LOOK_S = 120.0
"""How long another process may take to start MLX and look."""


DeviceKind = Literal["cpu", "metal", "cuda"]


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """The device that MLX computes on by default."""

    kind: DeviceKind
    name: str
    memory_bytes: int
    """Memory that the rank may use, weights included."""


def look_elsewhere() -> Device:
    """Look at the device from another process, so that this one can still be given its own GPU.

    Raises:
        UnavailableError: MLX does not start.
    """
    done = subprocess.run(
        [sys.executable, "-m", "services.rank_worker.device.hardware"],
        check=False,
        capture_output=True,
        timeout=LOOK_S,
    )
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise UnavailableError(f"MLX does not start on this machine: {last}.")
    return msgspec.json.decode(done.stdout, type=Device)
