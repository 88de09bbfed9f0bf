"""The state of processes that a test did not start itself."""

from collections.abc import Collection, Sequence
from pathlib import Path

import psutil

from shared.os import process_file
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


def waits_as_spare(pid: int, words: Sequence[str]) -> bool:
    """Tell whether a process is a spare of a rank that has not got its place.

    Args:
        pid: the process.
        words: its command line, which stays the same when it gets the place.
    """
    if "--spare" not in words:
        return False
    folder = Path(words[words.index("--config") + 1]).parent
    return pid not in {rank.pid for rank in process_file.find_processes(folder, "rank")}
