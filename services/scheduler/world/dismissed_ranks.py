"""Dismissed ranks. Owns the list of rank processes that should end but may still run. Pure.

A process that is suspended or blocked cannot obey LeaveWorld. Status reports name it, and the
supervisor on its host ends it.
"""

import dataclasses
from collections import deque
from collections.abc import Callable

from services.scheduler.world.members import RankProcess
from shared import limits
from shared.identifiers import PeerId
from shared.messages import DismissedRank, RankHello

REMEMBERED_S = 60.0
"""How long a process is listed; later its process id may belong to another process. A supervisor
acts within a second."""

COUNT_MAX = 2 * limits.RANKS_MAX
"""Most entries, two worlds of the largest size; the oldest are dropped."""

_ENDS = frozenset({"goodbye", "restarted"})
"""Causes of a lost link that prove that the process ends: it said goodbye, or it opened a new
session, after which a rank always ends. Silence proves nothing, since the process may be suspended.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    peer: PeerId
    hello: RankHello
    at_s: float


class DismissedRanks:
    """Rank processes that were told to leave but may still run, the oldest first.

    Status reports list them, so that the supervisor on their host ends them.
    """

    def __init__(self) -> None:
        self._entries: deque[_Entry] = deque(maxlen=COUNT_MAX)

    def add(self, member: RankProcess, now_s: float) -> None:
        """Add a process that should end.

        Args:
            member: the process.
            now_s: the time in seconds; it is listed for REMEMBERED_S seconds from then on.
        """
        self._entries.append(_Entry(member.peer, member.hello, now_s))

    def has(self, peer: PeerId) -> bool:
        """Tell whether this peer was dismissed and may still run."""
        return any(entry.peer == peer for entry in self._entries)

    def note_link_lost(self, peer: PeerId, cause: str) -> None:
        """Forget a process if its lost link proves that it ends.

        Args:
            peer: the process.
            cause: the transport's cause: "goodbye" and "restarted" prove it, silence does not.
        """
        if cause in _ENDS:
            self._retain(lambda entry: entry.peer != peer)

    def forget_replaced(self, hello: RankHello) -> None:
        """Forget processes that a new one on their host proves to have ended.

        Args:
            hello: the new process's message; it has their rank or process id.
        """
        self._retain(
            lambda entry: (
                entry.hello.host != hello.host
                or (entry.hello.pid != hello.pid and not entry.hello.rank == hello.rank >= 0)
            )
        )

    def report(self, now_s: float) -> list[DismissedRank]:
        """Return host and process id of those that may still run.

        Args:
            now_s: the time in seconds; processes dismissed more than REMEMBERED_S before are
                forgotten.
        """
        self._retain(lambda entry: now_s - entry.at_s <= REMEMBERED_S)
        return [DismissedRank(host=one.hello.host, pid=one.hello.pid) for one in self._entries]

    def _retain(self, stays: Callable[[_Entry], bool]) -> None:
        if self._entries and not all(stays(entry) for entry in self._entries):
            self._entries = deque(filter(stays, self._entries), maxlen=COUNT_MAX)
