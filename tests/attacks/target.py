"""The Lockstep under attack, with API keys for the attacker, an accomplice and the victim."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import psutil

from services.supervisor.status.service_queries import ask_status
from shared.configuration.loading import load_config
from tests.end_to_end.running_lockstep import RunningLockstep

ATTACKER_KEY = "attacker-key-of-the-attack-set"
ACCOMPLICE_KEY = "accomplice-key-of-the-attack-set"
VICTIM_KEY = "victim-key-of-the-attack-set"
HOST = "127.0.0.1"
ANSWER_DEADLINE_S = 30.0
DOCUMENT_BYTES = 96 * 1024 * 1024
"""Disk space for stored responses, little enough to fill it within seconds."""
DEPARTURE_S = 1.0
"""Time in which the scheduler must know that a client has left."""


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """Resident memory of the processes that hold parts of requests, in bytes."""

    gateway: int = 0
    scheduler: int = 0
    store: int = 0
    rank: int = 0

    def largest(self, other: "Memory") -> "Memory":
        """Return the larger number for each process."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Memory(*map(max, pairs))


class Target:
    """One running Lockstep of the demo model with one rank."""

    def __init__(self, running: RunningLockstep) -> None:
        self._running = running
        self._config = load_config(str(running.config_file))
        self.port = running.port

    def memory(self) -> Memory:
        """Return the present resident memory; 0 for a process that is being started again."""
        children = self._running.children()
        return Memory(
            gateway=_resident_bytes(children.get("gateway")),
            scheduler=_resident_bytes(children.get("scheduler")),
            store=_resident_bytes(children.get("cache-store")),
            rank=_resident_bytes(children.get("rank-worker 0")),
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
    """Start Lockstep with all keys, wait until it is ready, and end it after the block.

    Args:
        folder: an empty folder.
    """
    keys = f"attacker={ATTACKER_KEY},accomplice={ACCOMPLICE_KEY},victim={VICTIM_KEY}"
    settings = {
        "LOCKSTEP_API_KEYS": keys,
        "LOCKSTEP_CACHE_RESPONSES_BYTES_MAX": str(DOCUMENT_BYTES),
    }
    with mock.patch.dict(os.environ, settings):
        running = RunningLockstep(folder)
    with contextlib.closing(running):
        running.wait_until_ready()
        yield Target(running)


def _resident_bytes(pid: int | None) -> int:
    try:
        return 0 if pid is None else int(psutil.Process(pid).memory_info().rss)
    except psutil.NoSuchProcess:
        return 0
