"""Files in the run folder that name the process of each role. Owns their locks and stale detection.

A file is locked while its process runs. The kernel drops the lock at the process's end, however it
ends, so a leftover file is recognised as stale and a reused process id is never mistaken for the
role's. A file is written and locked under a temporary name and then linked to its own, so that a
reader never sees an incomplete one.

The locks are flock calls instead of `filelock`: readers probe with a shared lock so that they do
not hinder each other, and must not create files. `filelock` only takes exclusive locks on files
that it creates, and its import costs every role 0.1 s of start time.
"""

import contextlib
import dataclasses
import fcntl
import os
import re
import secrets
import time
from pathlib import Path

SUFFIX = ".pid"

TAKE_S = 0.2
"""Seconds to retry taking a name. A reader's probe holds a stale file's lock only for an
instant."""

TAKE_TRIES = 20
"""Attempts to take a name at least, in case this process was not scheduled during TAKE_S."""


@dataclasses.dataclass(frozen=True, slots=True)
class RoleProcess:
    """A running process and its role."""

    name: str
    """The role, with the number of a rank: `scheduler`, `rank-0`. A second process of a role and an
    unnumbered rank have their process id appended: `rank.4711`."""
    pid: int


class ProcessFile:
    """The locked file by which commands find this process under its role."""

    def __init__(self, folder: Path, role: str, *, by_pid: bool = False) -> None:
        """Create and lock this process's file, with its process id as content.

        Args:
            folder: the run folder, which exists.
            role: name under which this process can be found.
            by_pid: append the process id to the name always. False: only if another process has the
                name, for example a second gateway.

        Raises:
            OSError: when the folder cannot be written.
        """
        self._role = role
        own = folder / f"{role}.{os.getpid()}{SUFFIX}"
        temporary = folder / f".{role}.{secrets.token_hex(8)}{SUFFIX}"
        self._descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(self._descriptor, f"{os.getpid()}\n".encode())
            self.path = folder / f"{role}{SUFFIX}"
            if by_pid or not _link(temporary, self.path):
                self.path = own
                if not _link(temporary, own):
                    raise BlockingIOError(f"{own} is held by another process")
        except BaseException:
            os.close(self._descriptor)
            raise
        finally:
            temporary.unlink(missing_ok=True)

    def release(self) -> None:
        """Delete the file. Call it right before the process ends."""
        self.path.unlink(missing_ok=True)
        os.close(self._descriptor)


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
        pid = _holder(path) if match else None
        if match and pid:
            found.append(RoleProcess(match[1], pid))
    return sorted(found, key=lambda holder: (len(holder.name), holder.name))


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


def _holder(path: Path) -> int | None:
    """Return the id of the process that locks the file, None if the file is stale or unreadable."""
    try:
        descriptor = _open(path)
    except OSError:
        return None
    if descriptor is None:
        return None
    return lock_owner(descriptor)


def lock_owner(descriptor: int) -> int | None:
    """Return the process id in a file that another process locks, and close the descriptor.

    Args:
        descriptor: the open file, whose text is the id of the process that locked it.

    Returns:
        The id; None if the file is not locked or holds no id.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.read(descriptor, 32).decode(errors="replace").strip()
        return int(text) if text.isdecimal() else None
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    return None


def _open(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
