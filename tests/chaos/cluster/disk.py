"""Faults of the disk of a stack's cache."""

import contextlib
import os
import resource
from collections.abc import Iterator

from tests.chaos.cluster import processes
from tests.chaos.cluster.stack import Stack

FILE_BYTES_MAX = 4_096


@contextlib.contextmanager
def full_disk(stack: Stack) -> Iterator[None]:
    """Fill the cache's disk; without a small disk, limit the file size of store and ranks."""
    if os.path.ismount(stack.disk):
        filler = stack.disk / "filler"
        stack.log.note("the disk is filled")
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(2**20))
        try:
            yield
        finally:
            filler.unlink()
        return
    pids = [pid for role, pid in stack.pids().items() if role == "store" or "rank" in role]
    for pid in pids:
        _limit_file_size(pid, FILE_BYTES_MAX)
    try:
        yield
    finally:
        for pid in processes.pids_alive(pids):
            _limit_file_size(pid, resource.RLIM_INFINITY)


def _limit_file_size(pid: int, file_bytes_max: int) -> None:
    """Limit the size of files that a process writes (Linux)."""
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (file_bytes_max, resource.RLIM_INFINITY))
