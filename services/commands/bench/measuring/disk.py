"""Files of stored blocks as the operating system sees them: how many bytes, how fast to read."""

import contextlib
import os
import sys
import time
from pathlib import Path

from shared.clock import Clock, SystemClock
from shared.errors import UnavailableError

READ_BYTES = 8 * 1024 * 1024
_LOOK_S = 0.1
UNCHANGED_S = 1.0
"""A folder that has not changed for so long has been written."""


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder; files may come and go meanwhile."""
    total = 0
    for path in _files(folder):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def wait_until_unchanged(folder: Path, timeout_s: float = 120.0, clock: Clock | None = None) -> int:
    """Wait until a folder's bytes do not change any more; return how many there are.

    Raises:
        UnavailableError: they change for longer than `timeout_s`.
    """
    clock = clock or SystemClock()
    began_s = changed_s = clock.now()
    size = folder_bytes(folder)
    while clock.now() - changed_s < UNCHANGED_S:
        time.sleep(_LOOK_S)
        now = folder_bytes(folder)
        if now != size:
            size, changed_s = now, clock.now()
        if clock.now() - began_s > timeout_s:
            raise UnavailableError(f"Blocks were still being written after {timeout_s:.0f} s.")
    return size


def drop_page_cache(folder: Path) -> bool:
    """Have the system forget a folder's contents, so that they are read from the disk again.

    Returns:
        False where there is no such call (macOS): reads come from memory then.
    """
    if sys.platform != "linux":
        return False
    for path in _files(folder):
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                # What is not on the disk yet cannot be forgotten.
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
    return True


def measure_read_rate(folder: Path) -> float:
    """Read all files of a folder from end to end, one after the other; return bytes per second.

    Raises:
        UnavailableError: there is nothing to read.
    """
    buffer = bytearray(READ_BYTES)
    total = 0
    began_s = time.perf_counter()
    for path in _files(folder):
        with contextlib.suppress(FileNotFoundError), path.open("rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                total += count
    if not total:
        raise UnavailableError("There are no stored blocks to read.")
    return total / (time.perf_counter() - began_s)


def file_system_type(folder: Path) -> str:
    """Return the kind of file system that a folder is on; "" where the system does not tell."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return ""
    there = folder.resolve()
    over = [mount for mount in mounts if there.is_relative_to(mount[1])]
    return max(over, key=lambda mount: len(mount[1]))[2] if over else ""


def _files(folder: Path) -> list[Path]:
    found = []
    for path in sorted(folder.rglob("*")):
        with contextlib.suppress(OSError):
            if path.is_file():
                found.append(path)
    return found
