"""The processes of this machine, as `ps` lists them."""

import subprocess
from collections.abc import Iterable

from tests.waiting import wait_until


def running_processes() -> list[tuple[int, int, list[str]]]:
    """Return (pid, parent pid, words of the command) of every process except zombies."""
    listed = subprocess.run(
        ["ps", "-axwwo", "pid=,ppid=,stat=,command="], check=True, capture_output=True, text=True
    )
    entries = (line.split() for line in listed.stdout.splitlines())
    return [
        (int(entry[0]), int(entry[1]), entry[3:])
        for entry in entries
        if len(entry) > 3 and not entry[2].startswith("Z")
    ]


def is_running(pid: int) -> bool:
    """Tell whether a process runs or is stopped; a zombie does neither."""
    return any(pid == one for one, _, _ in running_processes())


def wait_until_ended(pids: Iterable[int], deadline_s: float) -> None:
    """Wait until none of the processes runs.

    Raises:
        AssertionError: one of them still runs after `deadline_s` seconds.
    """
    expected = set(pids)

    def still_running() -> list[int]:
        return sorted(expected & {pid for pid, _, _ in running_processes()})

    wait_until(
        lambda: not still_running(),
        deadline_s,
        poll_s=0.05,
        failure=lambda: f"processes {still_running()} still run",
    )
