"""Which process is a role at the moment: a file in the run folder, locked for as long as it lives.

The kernel takes the lock away when the process ends, however it ends, so a file that stayed behind
is known as stale and a process id that was used again is never taken for the role's. A file appears
complete: it is written and locked under another name and linked to its own.
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
"""Somebody who looks whether a stale file is stale locks it for an instant; longer is a holder."""

TAKE_TRIES = 20
"""Who stood still meanwhile has not looked for so long: it tries at least so often."""


@dataclasses.dataclass(frozen=True, slots=True)
class RoleProcess:
    """A process that runs, and what it is."""

    name: str
    """The role, for a rank with its number: `scheduler`, `rank-0`. Whoever came second, or is any
    rank, has its process id behind it: `rank.4711`."""
    pid: int


class ProcessFile:
    """This process' own file."""

    def __init__(self, folder: Path, role: str, *, by_pid: bool = False) -> None:
        """Take it.

        Args:
            folder: the run folder, which exists.
            role: as what this process is found again.
            by_pid: many processes are this role: the id is part of the name. Otherwise it is only
                when another process holds the name: a second gateway may run, and is found too.

        Raises:
            OSError: the folder cannot be written.
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
        """Take the file away: the process is about to end."""
        self.path.unlink(missing_ok=True)
        os.close(self._descriptor)


def find_processes(folder: Path, role: str) -> list[RoleProcess]:
    """Return who is `role` in this run folder now, every rank for `rank`; nobody: []."""
    pattern = re.compile(rf"({re.escape(role)}(?:-\d+)?(?:\.\d+)?){re.escape(SUFFIX)}")
    found = []
    for path in _files(folder):
        match = pattern.fullmatch(path.name)
        pid = _holder(path) if match else None
        if match and pid:
            found.append(RoleProcess(match[1], pid))
    return sorted(found, key=lambda holder: (len(holder.name), holder.name))


def delete_stale_files(folder: Path) -> None:
    """Delete the files of processes that have ended without doing so."""
    for path in _files(folder):
        with contextlib.suppress(OSError):
            _remove_if_stale(path)


def _files(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.name.endswith(SUFFIX)]
    except OSError:
        return []


def _link(temporary: Path, path: Path) -> bool:
    """Give the file its name; False when a process that lives has it."""
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
    """Delete a file that nobody holds; False when somebody does."""
    descriptor = _open(path)
    if descriptor is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another may have deleted it and put its own there since it was opened.
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
    """Return the process that holds a file, or None when it is stale or none of ours."""
    try:
        descriptor = _open(path)
    except OSError:
        return None
    if descriptor is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.read(descriptor, 32).decode(errors="replace").strip()
        return int(text) if text.isdecimal() else None
    finally:
        os.close(descriptor)
    return None


def _open(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
