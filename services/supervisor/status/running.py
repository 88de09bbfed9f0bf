"""Locksteps that run on this machine for this user. Owns where commands look for them.

A process file holds the settings of its process, so that a command finds everything else with them.
Run folders outside the default place are registered there by a link.
"""

import contextlib
import dataclasses
import hashlib
from pathlib import Path

import msgspec
from msgspec import structs

from shared.configuration.settings import Config
from shared.errors import ConfigError
from shared.os import process_file, user_folders
from shared.os.process_file import RoleProcess

_LINK_PREFIX = "elsewhere-"


@dataclasses.dataclass(frozen=True, slots=True)
class Running:
    """The processes of one Lockstep that run on this machine, by their run folder."""

    folder: Path
    processes: list[RoleProcess]
    """At least one, in the order of `process_file.ROLES`."""
    config: Config
    """Settings of the first one."""


def facts(config: Config) -> str:
    """Return the settings as text for a process file, with `paths.run_dir` as an absolute path."""
    paths = structs.replace(config.paths, run_dir=str(config.run_dir.absolute()))
    return msgspec.json.encode(structs.replace(config, paths=paths)).decode()


def register(folder: Path) -> None:
    """Link a run folder from the default place of run folders, unless it is there.

    Without a home folder, or on a full disk, `find_running` does not find it.
    """
    with contextlib.suppress(OSError, ConfigError):
        place = user_folders.run_folders()
        folder = folder.absolute()
        if folder.parent == place:
            return
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        digest = hashlib.blake2b(str(folder).encode(), digest_size=4).hexdigest()
        link = place / f"{_LINK_PREFIX}{digest}"
        for other in place.glob(f"{_LINK_PREFIX}*"):
            if other == link or not other.exists():
                other.unlink(missing_ok=True)
        link.symlink_to(folder)


def find_running() -> list[Running]:
    """Return the Locksteps of this user that run on this machine, by port.

    Processes of another version, whose settings cannot be read, are left out. Links to run folders
    without processes are removed.
    """
    found = []
    try:
        entries = sorted(user_folders.run_folders().iterdir())
    except (OSError, ConfigError):
        return []
    for entry in entries:
        folder = entry.resolve()
        processes = process_file.find_all(folder)
        if processes:
            with contextlib.suppress(msgspec.MsgspecError):
                config = msgspec.json.decode(processes[0].facts, type=Config)
                found.append(Running(folder, processes, config))
        elif entry.is_symlink():
            entry.unlink(missing_ok=True)
    return sorted(found, key=lambda running: running.config.gateway.port)
