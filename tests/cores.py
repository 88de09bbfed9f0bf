"""A core for each worker whose tests compute in its own process.

MLX hands each small operation from the main thread to another one, and wakes it. Across two cores
that takes twice the processor time of what both compute, and workers that run side by side pay for
it with each other's time.
"""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def pinned_to_one_core() -> Iterator[None]:
    """Keep all threads of this worker of pytest-xdist on one core; without workers, on any.

    What a test starts meanwhile stays there too.
    """
    number = re.fullmatch(r"gw(\d+)", os.environ.get("PYTEST_XDIST_WORKER", ""))
    if number is None or sys.platform != "linux":
        yield
        return
    cores = os.sched_getaffinity(0)
    _keep_on({sorted(cores)[int(number[1]) % len(cores)]})
    try:
        yield
    finally:
        _keep_on(cores)


def _keep_on(cores: set[int]) -> None:
    if sys.platform != "linux":
        return
    for task in Path("/proc/self/task").iterdir():
        # A thread may end meanwhile.
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), cores)
