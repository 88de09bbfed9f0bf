"""Simulated supervisor. Kills dismissed, stopped and silent processes by the real supervisor's
rules; `System` restarts them."""

from typing import Protocol

from services.supervisor.children.stuck_processes import LingeringRanks, SchedulerLiveness
from shared import limits
from tests.simulation.checks import core_inspection
from tests.simulation.environment.event_heap import EventHeap, Violation
from tests.simulation.processes.process import Process
from tests.simulation.processes.rank_process import HOST, RankProcess
from tests.simulation.processes.scheduler_process import SchedulerProcess

CHECK_EVERY_S = 0.25
STATUS_EVERY_S = 0.5


class Supervised(Protocol):
    """The system as the supervisor sees it."""

    heap: EventHeap
    ranks: list[RankProcess | None]
    spares: list[RankProcess | None]

    @property
    def scheduler(self) -> SchedulerProcess | None:
        """The current scheduler process."""
        ...

    @property
    def processes(self) -> list[Process]:
        """Processes that are alive."""
        ...


class Supervisor:
    """Checks every process a few times a second."""

    def __init__(self, system: Supervised) -> None:
        self._system = system
        self._heap = system.heap
        self._lingering_ranks = LingeringRanks(HOST)
        self._scheduler_liveness = SchedulerLiveness(limits.PEER_SILENCE_S)
        self._starts: dict[str, int] = {}
        """A number for each life of the scheduler."""
        self._status_at_s = 0.0
        self._stopped_at_s: dict[str, float] = {}

    def start(self) -> None:
        """Schedule the first check."""
        self._heap.call_after(CHECK_EVERY_S, self._check_processes)

    def _check_processes(self) -> None:
        self._heap.call_after(CHECK_EVERY_S, self._check_processes)
        now_s = self._heap.now_s
        scheduler = self._system.scheduler
        if scheduler is not None and scheduler.is_alive:
            self._check_scheduler(scheduler, now_s)
        due = self._lingering_ranks.due(now_s)
        for rank in [*self._system.ranks, *self._system.spares]:
            if rank is not None and rank.is_alive and rank.pid in due:
                if not rank.is_impaired and not (scheduler is None or scheduler.is_impaired):
                    raise Violation(f"{rank.name} was dismissed, is connected, and does not leave")
                rank.kill("as dismissed")
        for process in self._system.processes:
            stopped_max_s = (
                limits.STEP_DEADLINE_MIN_S
                if process in self._system.ranks
                else limits.PEER_SILENCE_S
            )
            if not process.is_visibly_stopped:
                self._stopped_at_s.pop(process.name, None)
            elif now_s - self._stopped_at_s.setdefault(process.name, now_s) >= stopped_max_s:
                process.kill("as stopped")

    def _check_scheduler(self, scheduler: SchedulerProcess, now_s: float) -> None:
        start = self._starts.setdefault(scheduler.name, len(self._starts) + 1)
        if not scheduler.is_stopped and now_s - self._status_at_s >= STATUS_EVERY_S:
            self._status_at_s = now_s
            self._scheduler_liveness.update(start, now_s)
            self._lingering_ranks.update(
                core_inspection.status_report(scheduler.core, now_s), now_s
            )
        if self._scheduler_liveness.expired(start, now_s):
            scheduler.kill("as silent")
