"""The store's directory. Owns its lock, its checks and its size limit.

No file is synced to the disk: a record that is torn after a crash is a miss.
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
from shared import limits
from shared.errors import ConfigError

FREE_BYTES_MIN = 16 * 1024 * 1024
"""With less free space the disk counts as full: a rank's next file may be this large."""

FREE_BYTES_AGAIN = 2 * FREE_BYTES_MIN
"""Free space needed to turn on, so that the store does not turn on and off repeatedly."""

DEFAULT_SHARE = 4
"""Without a configured limit: the divisor of the free space, which includes the store's files."""

_PROBE_BYTES = 1024 * 1024


class DirectoryHeld(ConfigError):
    """Raised when another process has locked the directory."""

    def __init__(self, path: Path, pid: str, address: str) -> None:
        super().__init__(
            f"Another cache store (process {pid or 'unknown'}) uses {path}: stop it, or choose "
            "another cache.directory."
        )
        self.address = address
        """The address that it listens on; "" when it does not listen."""


class Directory:
    """The directory of one cache store process: locks it, scans it and checks that it is usable."""

    def __init__(self, path: Path, bytes_max: int, address: str) -> None:
        """Set up without touching the disk.

        Args:
            path: the directory.
            bytes_max: the size limit in bytes; 0: a share of the free space when it is opened.
            address: the address that this process listens on, which is written into the lock file.
        """
        self.path = Path(os.path.abspath(path))  # noqa: PTH100 - `resolve` would follow links
        self._bytes_max = bytes_max
        self._address = address
        self._lock = -1
        self._was_claimed = False

    def claim(self) -> None:
        """Create the directory with mode 0700 and lock it until this process ends.

        Does nothing while this process holds the lock.

        Raises:
            DirectoryHeld: another process has locked it.
            ConfigError: it belongs to another user, is open to others, or is not a folder.
            OSError: the disk is full, read-only or broken.
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
        # Truncated after writing: a file truncated to 0 first is flushed when it is closed.
        text = f"{os.getpid()}\n{self._address}\n".encode()
        os.pwrite(lock, text, 0)
        os.ftruncate(lock, len(text))

    def release(self) -> None:
        """Release the lock, so that another process can claim the directory."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def open(self) -> DirectoryOpened:
        """Claim the directory, check that it is writable, delete partial files, and scan it.

        Returns:
            Its record files and other files, and the size limit.

        Raises:
            ConfigError: as `claim`.
            OSError: the disk is full, read-only or broken.
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
            documents=tuple(found.documents),
        )

    def probe(self) -> None:
        """Check without writing that the directory is still locked, writable and has space.

        Raises:
            OSError: the lock file is not the locked one any more, the disk is read-only or has less
                than FREE_BYTES_MIN left, or this user has no permission.
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
            # Parents are created only the first time: after a disk was unmounted, no file must be
            # written below its mount point.
            self.path.mkdir(mode=0o700, parents=not self._was_claimed, exist_ok=True)
            facts = self.path.stat()
        except (FileExistsError, NotADirectoryError):
            raise ConfigError(
                f"{self.path} is not a folder, or its parent is not: choose another "
                "cache.directory."
            ) from None
        except PermissionError:
            raise ConfigError(
                f"This user may not create {self.path}: choose another cache.directory."
            ) from None
        if facts.st_uid != os.getuid():
            raise ConfigError(
                f"The folder {self.path} belongs to another user: choose another cache.directory."
            )
        mode = stat.S_IMODE(facts.st_mode)
        if mode & 0o077 and not (self.path / file_names.LOCK).exists() and any(self.path.iterdir()):
            raise ConfigError(
                f"The folder {self.path} is open to other users and holds foreign files: "
                "choose an empty cache.directory."
            )
        if mode != 0o700:
            self.path.chmod(0o700)

    def _check_writing(self) -> None:
        """Write and delete a probe file; only a write shows quotas and failing disks."""
        if self._free_bytes() < FREE_BYTES_AGAIN:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        path = self.path / file_names.PROBE
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            left = _PROBE_BYTES
            while left:
                # A full disk writes a part without an error; only the next write raises.
                left -= os.write(descriptor, bytes(left))
        finally:
            os.close(descriptor)
            path.unlink(missing_ok=True)

    def _free_bytes(self) -> int:
        disk = os.statvfs(self.path)
        return disk.f_bavail * disk.f_frsize


def default_bytes_max(free_bytes: int) -> int:
    """Return the size limit if none is configured: a quarter of the space, at most 100 GiB.

    Args:
        free_bytes: free space of the disk plus the space of the store's own files.
    """
    return min(free_bytes // DEFAULT_SHARE, limits.STORE_BYTES_DEFAULT_MAX)
