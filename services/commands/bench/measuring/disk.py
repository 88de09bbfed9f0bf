"""Files of stored blocks: their bytes, page cache, read rate and file system. Writes nothing."""

import contextlib
import os
import sys
import time
from pathlib import Path

import psutil

from shared.clock import Clock, SystemClock
from shared.errors import UnavailableError

READ_BYTES = 8 * 1024 * 1024
_POLL_S = 0.1
UNCHANGED_S = 1.0
"""Seconds without a change after which a folder counts as completely written."""


def folder_bytes(folder: Path) -> int:
    """Return the total bytes of all files below a folder; a file that disappears counts 0."""
    total = 0
    for path in _files(folder):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def wait_until_unchanged(folder: Path, timeout_s: float = 120.0, clock: Clock | None = None) -> int:
    """Wait until a folder's total bytes have not changed for UNCHANGED_S; return these bytes.

    Args:
        folder: folder whose files another process is writing.
        timeout_s: longest wait in seconds.
        clock: source of the time; None: the system's.

    Raises:
        UnavailableError: when they still change after `timeout_s`.
    """
    clock = clock or SystemClock()
    began_s = changed_s = clock.now()
    size = folder_bytes(folder)
    while clock.now() - changed_s < UNCHANGED_S:
        time.sleep(_POLL_S)
        now = folder_bytes(folder)
        if now != size:
            size, changed_s = now, clock.now()
        if clock.now() - began_s > timeout_s:
            raise UnavailableError(f"Blocks were still being written after {timeout_s:.0f} s.")
    return size


def drop_page_cache(folder: Path) -> bool:
    """Remove the files of a folder from the page cache, so that the next reads use the disk.

    Returns:
        True when they were removed; False on systems other than Linux, which have no such call
        and where the next reads may use memory.
    """
    if sys.platform != "linux":
        return False
    for path in _files(folder):
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                # Linux keeps pages that are not on the disk yet.
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
    return True


def measure_read_rate(folder: Path) -> float:
    """Read all files below a folder one after the other; return the rate in bytes per second.

    Raises:
        UnavailableError: when the folder holds no bytes.
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
    """Return the type of the file system that holds a folder, such as "ext4"; "" when unknown."""
    try:
        mounts = psutil.disk_partitions(all=True)
    except (OSError, psutil.Error):
        return ""
    resolved = folder.resolve()
    holding = [mount for mount in mounts if resolved.is_relative_to(mount.mountpoint)]
    if not holding:
        return ""
    name: str = max(holding, key=lambda mount: len(mount.mountpoint)).fstype
    return name


def _files(folder: Path) -> list[Path]:
    found = []
    for path in sorted(folder.rglob("*")):
        with contextlib.suppress(OSError):
            if path.is_file():
                found.append(path)
    return found
