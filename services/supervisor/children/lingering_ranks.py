"""Rank processes of ended epochs that are still there: whom the supervisor kills, and when. Pure.

A rank that was told to leave ends by itself within milliseconds. One that is stopped, or is inside
a system call, cannot, and the next epoch waits for its successor.
"""

from shared.messages import StatusReported

GRACE_S = 0.5
"""A dismissed rank gets so long to end by itself. All of an epoch are to be gone within 1 s."""


class LingeringRanks:
    """The dismissed ranks of this host, and since when each is known."""

    def __init__(self, host: str) -> None:
        """Begin with none; `host` is what this host's ranks call it."""
        self._host = host
        self._since_s: dict[int, float] = {}

    def take(self, status: StatusReported, now_s: float) -> None:
        """Take in whom the scheduler still misses the end of."""
        present = {rank.pid for rank in status.ranks if rank.host == self._host}
        listed = {rank.pid for rank in status.dismissed if rank.host == self._host}
        # A process id may be used again: whoever belongs to the present world is somebody else.
        self._since_s = {pid: self._since_s.get(pid, now_s) for pid in listed - present}

    def due(self, now_s: float) -> set[int]:
        """Return the process ids whose time is over."""
        return {pid for pid, since_s in self._since_s.items() if now_s - since_s >= GRACE_S}
