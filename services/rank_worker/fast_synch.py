"""Whether Metal's fast synchronization has been shown to work on this host. No MLX.

`MLX_METAL_FAST_SYNCH=1` makes a crossing between GPU and network some 40 times faster, and has
returned stale data and wedged GPUs on some builds of macOS (mlx issues 3142 and 3830). So it counts
as proven only for the very build of the system, the MLX and the device with which a world has
passed its canary and computed a step. That is kept in a small file of this host.
"""

import contextlib
import functools
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from services.rank_worker.device import Device, mlx_version
from shared import private_files
from shared.errors import CanaryFailed, ConfigError
from shared.log import Log
from shared.messages import CanaryFinding

VARIABLE = "MLX_METAL_FAST_SYNCH"
FILE_NAME = "fast-synch.json"
BUILDS_MAX = 16
"""Builds that are remembered, the latest last."""

_log = Log("rank_worker.fast_synch")

State = Literal["unproven", "proven"]


def build_of(device: Device, system: str = sys.platform) -> str:
    """Return what a proof is worth for: system, MLX and device; "" where there is no Metal."""
    if system != "darwin" or device.kind != "metal":
        return ""
    # The kernel's version differs between two builds of one release of macOS.
    release = platform.mac_ver()[0]
    return f"macOS {release}, {platform.version()}, MLX {mlx_version()}, {device.name}"


def file(environment: Mapping[str, str] = os.environ) -> Path:
    """Return this user's file, in the cache folder in which blocks are kept by default."""
    if sys.platform == "darwin":
        return Path("~/Library/Caches/lockstep").expanduser() / FILE_NAME
    base = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "lockstep" / FILE_NAME


def state(path: Path, build: str) -> State:
    """Return whether a build is proven. A file that cannot be read proves nothing."""
    return "proven" if build and build in _builds(path) else "unproven"


def is_on(environment: Mapping[str, str] = os.environ) -> bool:
    """Tell whether this process runs with it."""
    return environment.get(VARIABLE) == "1"


def proof(
    device: Device,
    findings: Sequence[CanaryFinding],
    *,
    path: Path | None = None,
    system: str = sys.platform,
    environment: Mapping[str, str] = os.environ,
) -> Callable[[], None] | None:
    """Return what is to be done once this rank's world serves; None: nothing is proven by it.

    Args:
        device: of this rank.
        findings: of its canary, which has passed.
        path: of the file; None: this user's.
        system: as `sys.platform` names it.
        environment: of this process.
    """
    build = build_of(device, system)
    if not build or not findings or not is_on(environment):
        return None
    return functools.partial(_note, path or file(environment), build)


@contextlib.contextmanager
def trusted(
    device: Device,
    *,
    path: Path | None = None,
    system: str = sys.platform,
    environment: Mapping[str, str] = os.environ,
) -> Iterator[None]:
    """Forget the proof when the canary fails inside the block with the variable set.

    Args:
        device: of this rank.
        path: of the file; None: this user's.
        system: as `sys.platform` names it.
        environment: of this process.
    """
    try:
        yield
    except CanaryFailed:
        build = build_of(device, system)
        if build and is_on(environment):
            with contextlib.suppress(ConfigError):
                _replace(path or file(environment), functools.partial(_remove, build))
        raise


def _remove(build: str, known: list[str]) -> None:
    known[:] = [one for one in known if one != build]


def _note(path: Path, build: str) -> None:
    try:
        note_proven(path, build)
    except ConfigError as error:
        # The next start will not use it by itself; nothing else is lost.
        _log.warning("fast_synch_not_noted", detail=str(error))
    else:
        _log.info("fast_synch_proven", build=build)


def note_proven(path: Path, build: str) -> None:
    """Remember that a world has computed rightly with it on this build.

    Raises:
        ConfigError: the folder cannot be written.
    """
    _replace(path, lambda known: known.append(build))


def _replace(path: Path, change: Callable[[list[str]], None]) -> None:
    with private_files.locked(path.parent):
        known = _builds(path)
        change(known)
        # The latest mention of each counts.
        kept = list(dict.fromkeys(reversed(known)))[:BUILDS_MAX][::-1]
        private_files.replace(path, msgspec.json.encode({"proven": kept}).decode() + "\n")


def _builds(path: Path) -> list[str]:
    with contextlib.suppress(ConfigError, msgspec.MsgspecError):
        text = private_files.read(path, not_allowed=0o022, remedy="chmod 600")
        return msgspec.json.decode(text, type=dict[str, list[str]]).get("proven", [])
    return []
