"""Small files that only their user may reach, such as keys: read, watched, replaced as a whole.

They are written under a temporary name and renamed, so that a running process reads the old or the
new one, never half of one.
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
"""Longest file that is read: 10,000 keys fit."""

Signature = tuple[int, ...]
"""Changes when a file is written, replaced or given other rights; () while there is none."""


def signature(path: Path) -> Signature:
    """Return what changes when the file does."""
    try:
        facts = path.stat()
    except OSError:
        return ()
    return (facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)


def read(path: Path, *, not_allowed: int, remedy: str, missing: str = "") -> str:
    """Return a file's text, after checking the very file that was opened.

    Args:
        path: the file.
        not_allowed: rights that its mode must not have.
        remedy: the command that takes them away.
        missing: the sentence to say when there is no such file; "": the system's words.

    Raises:
        ConfigError: it cannot be read, or others can reach it.
    """
    try:
        # Not blocking: a pipe of this name would never end.
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
    """Refuse what belongs to another user, or has these rights. Raises ConfigError."""
    if facts.st_uid != os.geteuid():
        raise ConfigError(f"{path} belongs to another user: keys must be this user's own.")
    mode = stat.S_IMODE(facts.st_mode)
    if mode & not_allowed:
        raise ConfigError(
            f"{path} can be reached by other users (mode {mode:04o}): run `{remedy} {path}`."
        )


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make the folder if there is none, and keep other commands out of its files meanwhile.

    Raises:
        ConfigError: the folder cannot be used or written.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"Cannot use the folder {folder}: {error.strerror}.") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
        os.fsync(descriptor)  # the renames
    except OSError as error:
        raise ConfigError(f"Cannot write to the folder {folder}: {error.strerror}.") from None
    finally:
        os.close(descriptor)


def replace(path: Path, text: str) -> None:
    """Replace a file as a whole, mode 0600, on disk when this returns. Raises OSError."""
    # A link stays one: what it points to is replaced.
    path = path.resolve()
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            if sys.platform == "darwin":
                # There fsync leaves it in the drive's cache.
                fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            else:
                os.fsync(descriptor)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
