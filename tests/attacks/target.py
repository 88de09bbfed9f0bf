"""The Lockstep under attack, with two API keys: one for the attacker and one for the victim."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from services.supervisor.status.service_queries import ask_status
from shared.configuration.loading import load_config
from tests.end_to_end.running_lockstep import RunningLockstep

ATTACKER_KEY = "attacker-key-of-the-attack-set"
VICTIM_KEY = "victim-key-of-the-attack-set"
HOST = "127.0.0.1"
ANSWER_DEADLINE_S = 30.0
DEPARTURE_S = 1.0
"""Time in which the scheduler must know that a client has left."""


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """Resident memory of the processes that hold requests, in bytes."""

    gateway: int
    scheduler: int


class Target:
    """One running Lockstep of the demo model with one rank."""

    def __init__(self, running: RunningLockstep) -> None:
        self._running = running
        self._config = load_config(str(running.config_file))
        self.port = running.port

    def memory(self) -> Memory:
        """Return the present resident memory of gateway and scheduler."""
        children = self._running.children()
        return Memory(
            gateway=psutil.Process(children["gateway"]).memory_info().rss,
            scheduler=psutil.Process(children["scheduler"]).memory_info().rss,
        )

    def log_lines(self) -> int:
        """Return the number of log lines so far."""
        return len(self._running.lines)

    def traceback_lines(self, since: int) -> list[str]:
        """Return the log lines that contain a traceback.

        Args:
            since: number of first lines to skip.
        """
        return [line for line in self._running.lines[since:] if "Traceback" in line]

    def log_bytes(self, since: int) -> int:
        """Return the length of the log after its first `since` lines, in characters."""
        return sum(map(len, self._running.lines[since:]))

    def open_requests(self) -> int:
        """Return the number of running and waiting requests, as the scheduler itself says."""
        status = ask_status(self._config, ANSWER_DEADLINE_S)
        return status.running + status.waiting

    def departure_s(self, allowed_requests: int, timeout_s: float = 30.0) -> float:
        """Wait until only the victim's requests are open; return the seconds that took.

        Args:
            allowed_requests: most requests that the victim may have open.
            timeout_s: longest wait; it is also the result if more requests stay open.
        """
        began_s = time.monotonic()
        while self.open_requests() > allowed_requests:
            if time.monotonic() - began_s > timeout_s:
                return timeout_s
            time.sleep(0.02)
        return time.monotonic() - began_s


@contextlib.contextmanager
def running_target(folder: Path) -> Iterator[Target]:
    """Start Lockstep with both keys, wait until it is ready, and end it after the block.

    Args:
        folder: an empty folder.
    """
    variable = "LOCKSTEP_API_KEYS"
    before = os.environ.get(variable)
    os.environ[variable] = f"attacker={ATTACKER_KEY},victim={VICTIM_KEY}"
    try:
        running = RunningLockstep(folder)
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before
    with contextlib.closing(running):
        running.wait_until_ready()
        yield Target(running)
