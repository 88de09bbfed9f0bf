"""Dismissed ranks. Owns the list of rank processes that should end but may still run. Pure.

A process that is suspended or blocked cannot obey LeaveWorld. Status reports name it, and the
supervisor on its host ends it.
"""

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


class DismissedRanks:
    """Rank processes that were told to leave but may still run, the oldest first.

    Status reports list them, so that the supervisor on their host ends them.
    """

    def __init__(self) -> None:
        self._entries: deque[tuple[RankProcess, float]] = deque(maxlen=COUNT_MAX)
        """Each process, and when it was dismissed."""

    def add(self, member: RankProcess, now_s: float) -> None:
        """Add a process that should end.

        Args:
            member: the process.
            now_s: the monotonic time in seconds; it is listed for REMEMBERED_S seconds from then
                on.
        """
        self._entries.append((member, now_s))

    def has(self, peer: PeerId) -> bool:
        """Tell whether this peer was dismissed and may still run."""
        return any(member.peer == peer for member, _ in self._entries)

    def note_link_lost(self, peer: PeerId, cause: str) -> None:
        """Forget a process if its lost link proves that it ends.

        Args:
            peer: the process.
            cause: the transport's cause: "goodbye" and "restarted" prove it, silence does not.
        """
        if cause in _ENDS:
            self._retain(lambda member, _: member.peer != peer)

    def forget_replaced(self, hello: RankHello) -> None:
        """Forget processes that a new one on their host proves to have ended.

        Args:
            hello: the new process's message; it has their rank or process id.
        """
        self._retain(
            lambda member, _: (
                member.hello.host != hello.host
                or (member.hello.pid != hello.pid and not member.hello.rank == hello.rank >= 0)
            )
        )

    def report(self, now_s: float) -> list[DismissedRank]:
        """Return host and process id of those that may still run.

        Args: now_s: the monotonic time in seconds; processes dismissed more than REMEMBERED_S
            before are
                forgotten.
        """
        self._retain(lambda _, at_s: now_s - at_s <= REMEMBERED_S)
        return [DismissedRank(host=one.hello.host, pid=one.hello.pid) for one, _ in self._entries]

    def _retain(self, stays: Callable[[RankProcess, float], bool]) -> None:
        self._entries = deque((one for one in self._entries if stays(*one)), maxlen=COUNT_MAX)
