"""Whether Metal's fast synchronization has been shown to work on this host. No MLX.

`MLX_METAL_FAST_SYNCH=1` makes a crossing between GPU and network some 40 times faster, and has
returned stale data and wedged GPUs on some builds of macOS (mlx issues 3142 and 3830). So it counts
as proven only for the very build of the system, the MLX and the device with which a world has
passed its canary and computed a step. That is kept in a small file of this host, and not while a
canary runs: one that wedges the GPU ends this process without a word.
"""

import contextlib
import functools
import os
import platform
import plistlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal
from xml.parsers.expat import ExpatError

import msgspec

from services.rank_worker.device.description import Device, mlx_version
from shared import canary_names
from shared.errors import CanaryFailed, ConfigError
from shared.log import Log
from shared.messages import CanaryFinding, LeaveWorld
from shared.os import private_files

VARIABLE = "MLX_METAL_FAST_SYNCH"
FILE_NAME = "fast-synch.json"
BUILDS_MAX = 16
"""Builds that are remembered, the latest last."""

_SYSTEM_FILE = Path("/System/Library/CoreServices/SystemVersion.plist")

_log = Log("rank_worker.fast_synch")

State = Literal["unproven", "proven"]


def build_of(device: Device, system: str = sys.platform) -> str:
    """Return what a proof is worth for: system, MLX and device; "" where there is no Metal."""
    if system != "darwin" or device.kind != "metal":
        return ""
    # Two builds of one release may have the same kernel, and two kernels the same release.
    release = f"{platform.mac_ver()[0]} {_system_build()}".strip()
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


class Trust:
    """What this rank's canary and its world do to the proof, where the variable is set."""

    def __init__(
        self,
        device: Device,
        *,
        path: Path | None = None,
        system: str = sys.platform,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """Change nothing yet.

        Args:
            device: of this rank.
            path: of the file; None: this user's.
            system: as `sys.platform` names it.
            environment: of this process.
        """
        self._path = path or file(environment)
        self._build = build_of(device, system) if is_on(environment) else ""
        self._is_held_back = False
        """There was a proof, and a canary runs."""
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def canary(self) -> Iterator[None]:
        """Run a part of the canary: there is no proof meanwhile, nor afterwards if it fails.

        Whatever else ends the block says nothing about synchronization, and leaves the proof.
        """
        with self._lock:
            self._is_held_back = state(self._path, self._build) == "proven"
            if self._is_held_back:
                self._forget()
        try:
            yield
        except CanaryFailed:
            with self._lock:
                self._is_held_back = False
                self._forget()
            raise
        finally:
            self._give_back()

    def left(self, order: LeaveWorld) -> None:
        """Take in why the world has ended, in a thread that will end this process.

        Only the scheduler compares what ranks have found, so a rank may hear of it but here.
        """
        if order.cause != "canary":
            self._give_back()
            return
        with self._lock:
            self._is_held_back = False
            self._forget()

    def proof(self, findings: Sequence[CanaryFinding]) -> Callable[[], None] | None:
        """Return what is to be done once this rank's world serves; None: nothing is proven by it.

        Args:
            findings: of its canary, which has passed; without sums and a prompt it proves nothing.
        """
        names = [finding.name for finding in findings]
        is_whole = all(
            any(name.startswith(kind) for name in names)
            for kind in (canary_names.SUM, canary_names.PROMPT)
        )
        if not self._build or not is_whole:
            return None
        return functools.partial(_note, self._path, self._build)

    def _give_back(self) -> None:
        with self._lock:
            if self._is_held_back:
                self._is_held_back = False
                _note(self._path, self._build)

    def _forget(self) -> None:
        if not self._build:
            return
        try:
            _replace(self._path, functools.partial(_remove, self._build))
        except ConfigError as error:
            _log.error(
                "fast_synch_not_forgotten",
                detail=str(error),
                remedy=f"delete {self._path} if the canary fails",
            )


def _system_build() -> str:
    """Return the build of macOS, such as 25C56; "" where there is none."""
    try:
        with _SYSTEM_FILE.open("rb") as stream:
            return str(plistlib.load(stream).get("ProductBuildVersion", ""))
    except (OSError, ValueError, ExpatError):
        return ""


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
