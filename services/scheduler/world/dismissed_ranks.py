"""Rank processes that were told to leave, or no longer answer, and whose end nobody has seen. Pure.

A process that is stopped, or wedged with its bus thread, cannot obey LeaveWorld. Whoever started it
on its host is told of it in every report, and ends it.
"""

import dataclasses
from collections import deque
from collections.abc import Callable

from services.scheduler.world.members import RankProcess
from shared import limits
from shared.identifiers import PeerId
from shared.messages import DismissedRank, RankHello

REMEMBERED_S = 60.0
"""After that its number may belong to another process. A supervisor acts within a second."""

COUNT_MAX = 2 * limits.RANKS_MAX
"""Two worlds of the largest size; past it the oldest are forgotten."""

_ENDS = frozenset({"goodbye", "restarted"})
"""Causes of a lost link by which the process itself shows that it is ending: it says so, or it
comes back over a new session, which a rank in a world survives no more than its scheduler's end.
Silence shows nothing: a stopped process is silent."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    peer: PeerId
    hello: RankHello
    at_s: float


class DismissedRanks:
    """Entries, the oldest first."""

    def __init__(self) -> None:
        self._entries: deque[_Entry] = deque(maxlen=COUNT_MAX)

    def add(self, member: RankProcess, now_s: float) -> None:
        """Remember that a process shall be gone."""
        self._entries.append(_Entry(member.peer, member.hello, now_s))

    def has(self, peer: PeerId) -> bool:
        """Tell whether this peer was a rank until a moment ago."""
        return any(entry.peer == peer for entry in self._entries)

    def link_lost(self, peer: PeerId, cause: str) -> None:
        """Forget a process whose link shows that it ends; `cause` is the transport's."""
        if cause in _ENDS:
            self._keep(lambda entry: entry.peer != peer)

    def greeted(self, hello: RankHello) -> None:
        """Forget whom a new process proves to be gone: it has its place or its number."""
        self._keep(
            lambda entry: (
                entry.hello.host != hello.host
                or (entry.hello.pid != hello.pid and not entry.hello.rank == hello.rank >= 0)
            )
        )

    def report(self, now_s: float) -> list[DismissedRank]:
        """Return who may still be there."""
        self._keep(lambda entry: now_s - entry.at_s <= REMEMBERED_S)
        return [DismissedRank(host=one.hello.host, pid=one.hello.pid) for one in self._entries]

    def _keep(self, stays: Callable[[_Entry], bool]) -> None:
        if self._entries and not all(stays(entry) for entry in self._entries):
            self._entries = deque(filter(stays, self._entries), maxlen=COUNT_MAX)
