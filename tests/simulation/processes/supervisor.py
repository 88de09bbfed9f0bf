"""The supervisor's eyes: who has been told to leave, is stopped, or silent for too long is killed.

Who ends is started again by `System`; here is what ends those who cannot end by themselves, by the
real supervisor's own rules.
"""

from typing import Protocol

from services.supervisor.children.stuck_processes import LingeringRanks, SchedulerLiveness
from services.supervisor.supervisor import RANK_STOPPED_S, STOPPED_S
from tests.simulation.checks import core_inspection
from tests.simulation.environment.event_heap import Heap, Violation
from tests.simulation.processes.process import Process
from tests.simulation.processes.rank_process import HOST, RankProcess
from tests.simulation.processes.scheduler_process import SchedulerProcess

LOOKS_EVERY_S = 0.25
HEARS_EVERY_S = 0.5


class Supervised(Protocol):
    """What the supervisor looks after."""

    heap: Heap
    ranks: list[RankProcess | None]

    @property
    def scheduler(self) -> SchedulerProcess | None:
        """The scheduler of the moment."""
        ...

    @property
    def processes(self) -> list[Process]:
        """Those that live now."""
        ...


class Supervisor:
    """Looks at every process, a few times a second."""

    def __init__(self, system: Supervised) -> None:
        self._system = system
        self._heap = system.heap
        self._lingering_ranks = LingeringRanks(HOST)
        self._scheduler_liveness = SchedulerLiveness()
        self._starts: dict[str, int] = {}
        """A number for each life of the scheduler."""
        self._heard_at_s = 0.0
        self._stopped_at_s: dict[str, float] = {}

    def start(self) -> None:
        """Begin to look."""
        self._heap.after(LOOKS_EVERY_S, self._look)

    def _look(self) -> None:
        self._heap.after(LOOKS_EVERY_S, self._look)
        now_s = self._heap.now_s
        scheduler = self._system.scheduler
        if scheduler is not None and scheduler.is_alive:
            self._look_at_scheduler(scheduler, now_s)
        due = self._lingering_ranks.due(now_s)
        for rank in self._system.ranks:
            if rank is not None and rank.is_alive and rank.pid in due:
                if not rank.is_hindered and not (scheduler is None or scheduler.is_hindered):
                    raise Violation(f"{rank.name} was dismissed, is heard, and does not leave")
                rank.kill("as dismissed")
        for process in self._system.processes:
            stopped_max_s = RANK_STOPPED_S if process in self._system.ranks else STOPPED_S
            if not process.is_visibly_stopped:
                self._stopped_at_s.pop(process.name, None)
            elif now_s - self._stopped_at_s.setdefault(process.name, now_s) >= stopped_max_s:
                process.kill("as stopped")

    def _look_at_scheduler(self, scheduler: SchedulerProcess, now_s: float) -> None:
        start = self._starts.setdefault(scheduler.name, len(self._starts) + 1)
        if not scheduler.is_stopped and now_s - self._heard_at_s >= HEARS_EVERY_S:
            self._heard_at_s = now_s
            self._scheduler_liveness.update(start, now_s)
            self._lingering_ranks.update(core_inspection.report(scheduler.core, now_s), now_s)
        if self._scheduler_liveness.expired(start, now_s):
            scheduler.kill("as silent")
