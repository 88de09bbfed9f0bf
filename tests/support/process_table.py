"""The state of processes that a test did not start itself."""

from collections.abc import Collection

import psutil

from tests.support.waiting import wait_until


def is_running(pid: int) -> bool:
    """Tell whether a process runs or is stopped; a zombie does neither."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_until_ended(pids: Collection[int], deadline_s: float) -> None:
    """Wait until none of the processes runs.

    Raises:
        AssertionError: one of them still runs after `deadline_s` seconds.
    """
    wait_until(
        lambda: not any(map(is_running, pids)),
        deadline_s,
        poll_s=0.05,
        failure=lambda: f"processes {list(filter(is_running, pids))} still run",
    )
