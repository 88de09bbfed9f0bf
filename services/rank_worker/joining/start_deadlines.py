"""Deadlines of a rank's start, after which its process says what took too long and ends."""

import functools
from contextlib import AbstractContextManager

from services.rank_worker.peers import watchdog
from services.rank_worker.scheduler_link import SchedulerLink
from shared import limits
from shared.log import Log
from shared.messages import JoinWorld, RankFailed

_log = Log("rank_worker")


class StartDeadlines:
    """Ends the process of a rank that joins or loads for too long."""

    def __init__(self, order: JoinWorld, link: SchedulerLink) -> None:
        """Remember the deadlines.

        Args:
            order: the scheduler's order to join.
            link: tells the scheduler why the process ends.
        """
        self._order = order
        self._link = link

    def loading(self) -> AbstractContextManager[None]:
        """Return a context in which a part of loading must end within its deadline."""
        remedy = "raise scheduler.load_deadline_s, or use a faster disk"
        return self.within("Loading", self._order.load_deadline_s, remedy)

    def within(self, what: str, seconds: float, remedy: str) -> AbstractContextManager[None]:
        """Return a context that ends this process, with a sentence, after too long a time.

        Args:
            what: subject of the sentence: the work that must end in time.
            seconds: its longest time.
            remedy: the end of the sentence.
        """
        detail = f"{what} took longer than {seconds:.0f} s: {remedy}."
        return watchdog.hard_deadline(seconds, functools.partial(self._end_late, detail))

    def _end_late(self, detail: str) -> None:
        _log.error("rank_failed", detail=detail)
        watchdog.write_stacks()
        order = self._order
        failed = RankFailed(rank=order.rank, epoch=order.epoch, detail=detail, permanent=False)
        self._link.send(failed)
        self._link.exit(limits.EXIT_DEADLINE)
