"""CPU affinity for test workers that compute with MLX in their own process.

MLX hands each small operation from the main thread to a second thread and wakes it. If the two
threads are on different cores, this takes twice the processor time, which slows down the other
workers.
"""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def pinned_to_one_core() -> Iterator[None]:
    """Pin all threads of this pytest-xdist worker to one core while the block runs.

    Threads and processes that start in the block inherit the affinity. Does nothing without
    pytest-xdist and on other systems than Linux.
    """
    number = re.fullmatch(r"gw(\d+)", os.environ.get("PYTEST_XDIST_WORKER", ""))
    if number is None or sys.platform != "linux":
        yield
        return
    cores = os.sched_getaffinity(0)
    _set_affinity({sorted(cores)[int(number[1]) % len(cores)]})
    try:
        yield
    finally:
        _set_affinity(cores)


def _set_affinity(cores: set[int]) -> None:
    if sys.platform != "linux":
        return
    for task in Path("/proc/self/task").iterdir():
        # A thread may end between the listing and the call.
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), cores)
