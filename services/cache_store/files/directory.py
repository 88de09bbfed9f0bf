"""The store's directory: made and owned by one process, checked, probed, opened.

Nothing is ever synced to the disk: a record that is not whole after a crash is a miss.
"""

import contextlib
import errno
import fcntl
import os
import stat
import time
from pathlib import Path

from services.cache_store import file_names
from services.cache_store.events import DirectoryOpened
from services.cache_store.files.scan import scan
from shared.errors import ConfigError

FREE_BYTES_MIN = 16 * 1024 * 1024
"""A disk with less is full: others need room too, and a rank's next file may have as much."""

FREE_BYTES_AGAIN = 2 * FREE_BYTES_MIN
"""So much must be free before the store begins, or it would go on and off at the edge."""

DEFAULT_BYTES_MAX = 100 * 2**30
DEFAULT_SHARE = 4
"""Without a limit the store takes this part of what is free, its own files counted as free."""

_PROBE_BYTES = 1024 * 1024


class DirectoryHeld(ConfigError):
    """Another process owns the directory."""

    def __init__(self, path: Path, pid: str, address: str) -> None:
        super().__init__(
            f"Another cache store (process {pid or 'unknown'}) owns {path}: stop it, or choose "
            "another cache.directory."
        )
        self.address = address
        """Where it listens; "" if it does not."""


class Directory:
    """One process's claim on a directory."""

    def __init__(self, path: Path, bytes_max: int, address: str) -> None:
        """Nothing is touched yet.

        Args:
            path: where blocks are kept.
            bytes_max: the limit; 0: a share of what is free when it is opened.
            address: where this process listens; written into the lock for whoever finds it held.
        """
        self.path = Path(os.path.abspath(path))  # noqa: PTH100 - `resolve` would follow links
        self._bytes_max = bytes_max
        self._address = address
        self._lock = -1
        self._was_claimed = False

    def claim(self) -> None:
        """Make the directory with mode 0700 and lock it for as long as this process lives.

        Raises:
            DirectoryHeld: another process has locked it.
            ConfigError: it belongs to somebody else, or is no folder.
            OSError: the disk does not let us: full, read-only, broken.
        """
        if self._holds_lock():
            return
        self.release()
        self._make()
        lock = os.open(
            self.path / file_names.LOCK,
            os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC,
            0o600,
        )
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lines = os.pread(lock, 4_096, 0).decode(errors="replace").splitlines()
            os.close(lock)
            raise DirectoryHeld(self.path, *[*lines, "", ""][:2]) from None
        except OSError:
            os.close(lock)
            raise
        self._lock = lock
        self._was_claimed = True
        # Cut off behind what is written: a file cut to nothing first is flushed when it is closed.
        text = f"{os.getpid()}\n{self._address}\n".encode()
        os.pwrite(lock, text, 0)
        os.ftruncate(lock, len(text))

    def release(self) -> None:
        """Give the lock back."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def open(self) -> DirectoryOpened:
        """Claim the directory, see that it can be written, and read what lies in it.

        What ranks have left half-written is deleted.

        Raises:
            ConfigError: as `claim`.
            OSError: the disk does not let us.
        """
        started_s = time.monotonic()
        self.claim()
        self._check_writing()
        found = scan(str(self.path))
        for path in found.partials:
            with contextlib.suppress(FileNotFoundError):
                Path(path).unlink()
        held = sum(file.size_bytes for file in found.files)
        return DirectoryOpened(
            files=tuple(found.files),
            bad_files=tuple(found.bad_files),
            quarantined=tuple(found.quarantined),
            foreign_files=len(found.foreign),
            foreign_example=min(found.foreign, default=""),
            bytes_max=self._bytes_max or default_bytes_max(self._free_bytes() + held),
            took_s=time.monotonic() - started_s,
        )

    def probe(self) -> None:
        """Look whether the directory is still ours and writable; cheap, and writes nothing.

        Raises:
            OSError: it is not.
        """
        if not self._holds_lock():
            raise OSError(errno.ENOENT, "It was deleted or replaced")
        disk = os.statvfs(self.path)
        if disk.f_flag & os.ST_RDONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        if disk.f_bavail * disk.f_frsize < FREE_BYTES_MIN:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if not os.access(self.path, os.R_OK | os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    def _holds_lock(self) -> bool:
        if self._lock < 0:
            return False
        try:
            there = (self.path / file_names.LOCK).lstat()
        except OSError:
            return False
        return os.path.samestat(os.fstat(self._lock), there)

    def _make(self) -> None:
        try:
            # Later only the folder itself is made again: where a disk was taken away, nothing
            # must be written in the place where it was.
            self.path.mkdir(mode=0o700, parents=not self._was_claimed, exist_ok=True)
            facts = self.path.stat()
        except (FileExistsError, NotADirectoryError):
            raise ConfigError(
                f"{self.path} is no folder, or a part of it is none: choose another "
                "cache.directory."
            ) from None
        except PermissionError:
            raise ConfigError(
                f"This user may not make {self.path}: choose another cache.directory."
            ) from None
        if facts.st_uid != os.getuid():
            raise ConfigError(
                f"The folder {self.path} belongs to another user: choose another cache.directory."
            )
        mode = stat.S_IMODE(facts.st_mode)
        if mode & 0o077 and not (self.path / file_names.LOCK).exists() and any(self.path.iterdir()):
            raise ConfigError(
                f"The folder {self.path} is open to others and holds files that are not ours: "
                "choose an empty cache.directory."
            )
        if mode != 0o700:
            self.path.chmod(0o700)

    def _check_writing(self) -> None:
        """Write a little and delete it: only that tells of quotas and of a disk that fails."""
        if self._free_bytes() < FREE_BYTES_AGAIN:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        path = self.path / file_names.PROBE
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            left = _PROBE_BYTES
            while left:
                # A full disk takes a part and says nothing; only the next write raises.
                left -= os.write(descriptor, bytes(left))
        finally:
            os.close(descriptor)
            path.unlink(missing_ok=True)

    def _free_bytes(self) -> int:
        disk = os.statvfs(self.path)
        return disk.f_bavail * disk.f_frsize


def default_bytes_max(free_bytes: int) -> int:
    """Return the limit where none is set."""
    return min(free_bytes // DEFAULT_SHARE, DEFAULT_BYTES_MAX)
