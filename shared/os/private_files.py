"""Small files that others must not write or read, such as keys. Owns checks and replacement.

Files are written under a temporary name and renamed, so that a reader sees the old or the new
content, never a part.
"""

import contextlib
import fcntl
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from shared.errors import ConfigError

FILE_BYTES_MAX = 1 << 20
"""Longest file that is read. 10,000 keys fit."""

SECRET_FOLDERS = (Path("/run/secrets"), Path("/var/run/secrets"))
"""Where container runtimes mount secrets, often readable for all users of the container."""

_ROOT = 0
_NAME_KEPT = 100
"""Characters of a file's name that its temporary file's name repeats: a name has at most 255."""

Signature = tuple[int, ...]
"""Facts that change when a file is written, replaced or given other permissions; () without a
file."""


def signature(path: Path) -> Signature:
    """Return a file's inode, size and times of the last changes; () without a file.

    Two different signatures of one path mean that the file was changed or replaced.
    """
    try:
        facts = path.stat()
    except OSError:
        return ()
    return (facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)


def read(path: Path, *, not_allowed: int, remedy: str, missing: str = "") -> str:
    """Return a file's text, if other users cannot write or needlessly read it (`check_owner`).

    Args:
        path: the file.
        not_allowed: mode bits that a file of this user must not have, for example 0o077.
        remedy: command that removes these bits, for example "chmod 600", for the error.
        missing: the error's text if the file does not exist; "": the system's text.

    Raises:
        ConfigError: when the file cannot be read, or other users can access it.
    """
    try:
        # O_NONBLOCK: opening a named pipe would block otherwise.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as stream:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode):
                raise ConfigError(f"{path} is not a regular file.")
            check_owner(path, facts, not_allowed=not_allowed, remedy=remedy)
            data = stream.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        if missing and isinstance(error, FileNotFoundError):
            raise ConfigError(missing) from None
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from None
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(f"{path} is longer than {FILE_BYTES_MAX:,} bytes.")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text.") from None


def check_owner(path: Path, facts: os.stat_result, *, not_allowed: int, remedy: str) -> None:
    """Check that other users cannot write a file, nor use it where this user could prevent that.

    A file of this user has no mode bit of `not_allowed`. A file of root may be readable for others,
    because this user cannot change that. So may secrets that a container runtime mounts, below
    SECRET_FOLDERS or read-only elsewhere, which may have any owner.

    Args:
        path: the file, for the error.
        facts: its `stat`.
        not_allowed: mode bits that a file of this user must not have, for example 0o077.
        remedy: command that removes these bits, for the error.

    Raises:
        ConfigError: when another user could have written it, or can use it without need.
    """
    if _is_read_only(path):
        return
    is_secret = any(path.resolve().is_relative_to(folder) for folder in SECRET_FOLDERS)
    is_own = facts.st_uid == os.geteuid()
    if not (is_own or is_secret or facts.st_uid == _ROOT):
        raise ConfigError(
            f"{path} belongs to another user: it must belong to the user who runs Lockstep or to "
            "root, or be on a read-only mount."
        )
    mode = stat.S_IMODE(facts.st_mode)
    if is_own and not is_secret and mode & not_allowed:
        raise ConfigError(
            f"Other users can access {path} (mode {mode:04o}): run `{remedy} {path}`."
        )
    if mode & 0o022:
        raise ConfigError(
            f"Other users can write {path} (mode {mode:04o}): its owner must run `chmod go-w "
            f"{path}`."
        )


def _is_read_only(path: Path) -> bool:
    """Tell whether a file is on a read-only mount, where neither content nor mode can change."""
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create the folder if needed, wait for an exclusive lock on it, and fsync it on success.

    The lock is held inside the `with` block, on the folder itself: no lock file is created.

    Raises:
        ConfigError: when the folder cannot be created or written.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"Cannot use the folder {folder}: {error.strerror}.") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
        os.fsync(descriptor)  # makes renames in the folder durable
    except OSError as error:
        raise ConfigError(f"Cannot write to the folder {folder}: {error.strerror}.") from None
    finally:
        os.close(descriptor)


def replace(path: Path, content: str | bytes) -> None:
    """Replace a file atomically, with mode 0600, and flush it to disk. Raises OSError."""
    # Of a symbolic link the target is replaced.
    path = path.resolve()
    temporary = path.with_name(f".{path.name[:_NAME_KEPT]}-{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
            stream.flush()
            if sys.platform == "darwin":
                # On macOS fsync leaves data in the drive's cache.
                fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            else:
                os.fsync(descriptor)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
