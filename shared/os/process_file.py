"""Files in the run folder that name the process of each role. Owns their locks and stale detection.

A file is locked while its process runs. The kernel drops the lock at the process's end, however it
ends, so a leftover file is recognised as stale and a reused process id is never mistaken for the
role's. A file is written and locked under a temporary name and then linked to its own, so that a
reader never sees an incomplete one.

The locks are flock calls instead of a library's: readers probe with a shared lock so that they do
not hinder each other, and must not create files, while `filelock` only takes exclusive locks on
files that it creates.
"""

import contextlib
import dataclasses
import fcntl
import os
import re
import secrets
import threading
import time
from pathlib import Path

from shared.errors import ConfigError
from shared.os import run_folder

SUFFIX = ".pid"

SUPERVISOR = "supervisor"
"""Name of `lockstep up`, which each run folder has once."""

ROLES = (SUPERVISOR, "gateway", "scheduler", "store", "rank")
"""Names of all processes; those of ranks may have a number."""

TAKE_S = 0.2
"""Seconds to retry taking a name. A reader's probe holds a stale file's lock only for an
instant."""

TAKE_TRIES = 20
"""Attempts to take a name at least, in case this process was not scheduled during TAKE_S."""


RESTORE_INTERVAL_S = 1.0
"""Seconds between two checks whether the file was deleted."""

TEXT_BYTES_MAX = 1 << 16
"""Longest content of a file that is read."""


@dataclasses.dataclass(frozen=True, slots=True)
class RoleProcess:
    """A running process and its role."""

    name: str
    """The role, with the number of a rank: `scheduler`, `rank-0`. A second process of a role and an
    unnumbered rank have their process id appended: `rank.4711`."""
    pid: int
    facts: str = ""
    """What the process has written about itself, such as its settings; "" if nothing."""


class NameTaken(Exception):
    """Another process has the name."""

    def __init__(self, pid: int | None) -> None:
        """Record the other process's id, None if it is unknown."""
        super().__init__(f"process {pid or 'unknown'} has the name")
        self.pid = pid


class ProcessFile:
    """The locked file by which commands find this process under its role.

    A thread writes it again within `RESTORE_INTERVAL_S` when it was deleted.
    """

    def __init__(
        self,
        folder: Path,
        role: str,
        *,
        by_pid: bool = False,
        is_only: bool = False,
        facts: str = "",
    ) -> None:
        """Create and lock this process's file, with its process id as content.

        Args:
            folder: the run folder, which exists.
            role: name under which this process can be found.
            by_pid: append the process id to the name always. False: only if another process has the
                name, for example a second gateway.
            is_only: no second process may have the name.
            facts: further text about the process, without secrets.

        Raises:
            NameTaken: when `is_only` and another process has the name.
            OSError: when the folder cannot be written.
        """
        self._content = f"{os.getpid()}\n{facts}"
        self._paths = [] if by_pid else [folder / f"{role}{SUFFIX}"]
        if not is_only:
            self._paths.append(folder / f"{role}.{os.getpid()}{SUFFIX}")
        self._descriptor = -1
        self.path = self._paths[-1]
        if not self._write():
            if is_only:
                raise NameTaken(_holder(self.path)[0])
            raise BlockingIOError(f"{self.path} is held by another process")
        self._lock = threading.Lock()
        self._is_released = threading.Event()
        threading.Thread(target=self._keep, name="process-file", daemon=True).start()

    def release(self) -> None:
        """Delete the file. Call it right before the process ends."""
        self._is_released.set()
        with self._lock:
            self.path.unlink(missing_ok=True)
            os.close(self._descriptor)

    def _write(self) -> bool:
        """Write and lock the file. Return False if running processes have the names."""
        folder = self._paths[0].parent
        temporary = folder / f".{secrets.token_hex(8)}{SUFFIX}"
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(descriptor, self._content.encode())
            for path in self._paths:
                if _link(temporary, path):
                    # The descriptor of a deleted file is closed.
                    self.path, descriptor, self._descriptor = path, self._descriptor, descriptor
                    return True
            return False
        finally:
            temporary.unlink(missing_ok=True)
            if descriptor >= 0:
                os.close(descriptor)

    def _keep(self) -> None:
        while not self._is_released.wait(RESTORE_INTERVAL_S):
            # Without its file a process cannot be found, but it serves.
            with self._lock, contextlib.suppress(OSError, ConfigError):
                if not (self._is_released.is_set() or self._is_in_place()):
                    run_folder.prepare(self.path.parent)
                    self._write()

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(self.path.lstat(), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False


def find_processes(folder: Path, role: str) -> list[RoleProcess]:
    """Return the running processes with a role, by their locked files.

    Args:
        folder: the run folder.
        role: name of the role; `rank` finds every rank.

    Returns:
        Names and process ids, sorted so that `rank-2` precedes `rank-10`.
    """
    pattern = re.compile(rf"({re.escape(role)}(?:-\d+)?(?:\.\d+)?){re.escape(SUFFIX)}")
    found = []
    for path in folder.glob(f"*{SUFFIX}"):
        match = pattern.fullmatch(path.name)
        pid, facts = _holder(path) if match else (None, "")
        if match and pid:
            found.append(RoleProcess(match[1], pid, facts))
    return sorted(found, key=lambda holder: (len(holder.name), holder.name))


def find_all(folder: Path) -> list[RoleProcess]:
    """Return all running processes of a run folder, in the order of ROLES."""
    return [found for role in ROLES for found in find_processes(folder, role)]


def delete_stale_files(folder: Path) -> None:
    """Delete files in the run folder that no process locks: their processes have ended."""
    for path in list(folder.glob(f"*{SUFFIX}")):
        with contextlib.suppress(OSError):
            _remove_if_stale(path)


def _link(temporary: Path, path: Path) -> bool:
    """Link the file to its name. Return False if a running process has the name."""
    until_s = time.monotonic() + TAKE_S
    tries = 0
    while True:
        try:
            path.hardlink_to(temporary)
        except FileExistsError:
            if not _remove_if_stale(path):
                tries += 1
                if tries >= TAKE_TRIES and time.monotonic() > until_s:
                    return False
                time.sleep(0.01)
        else:
            return True


def _remove_if_stale(path: Path) -> bool:
    """Delete a file that is not locked. Return False if it is locked."""
    descriptor = _open(path)
    if descriptor is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another process may have replaced the file since it was opened.
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            path.unlink()
    except BlockingIOError:
        return False
    except FileNotFoundError:
        pass
    finally:
        os.close(descriptor)
    return True


def _holder(path: Path) -> tuple[int | None, str]:
    """Return id and facts of the process that locks the file; None: it is stale or unreadable."""
    try:
        descriptor = _open(path)
    except OSError:
        return None, ""
    if descriptor is None:
        return None, ""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        pid, _, facts = os.read(descriptor, TEXT_BYTES_MAX).decode(errors="replace").partition("\n")
        return (int(pid) if pid.isdecimal() else None), facts
    finally:
        os.close(descriptor)
    return None, ""


def _open(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
