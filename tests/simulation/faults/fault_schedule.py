"""What goes wrong in a run, drawn from its seed: what, with whom, when, and for how long."""

import random
from collections.abc import Callable

from services.supervisor.children.stuck_processes import SILENT_S
from services.supervisor.supervisor import STOPPED_S
from shared.messages import OrderDrain, StepPlan
from tests.simulation.environment.disk import TROUBLES
from tests.simulation.environment.event_heap import START_S, Heap
from tests.simulation.environment.network import SimulatedSocket
from tests.simulation.processes.process import Process
from tests.simulation.processes.rank_process import RankProcess
from tests.simulation.processes.scheduler_process import SchedulerProcess
from tests.simulation.system import System

LAST_FAULT_S = 8.0
"""No fault begins later."""

OFTEN = 8
"""Faults of a run with one kind only."""
HARMLESS = {
    "_stop",
    "_cut",
    "_part_briefly",
    "_trouble_disk",
    "_leave",
    "_hold",
    "_repeat_receipt",
    "_send_stale_order",
}
"""What no epoch may end by."""


class Faults:
    """The faults of one run."""

    def __init__(self, heap: Heap, system: System, only: str = "") -> None:
        """Plan nothing yet; `only`: the name of the one kind that strikes, and strikes often."""
        self.ends_at_s = START_S
        """When the last fault is over."""
        self.count = 0
        self._heap = heap
        self._system = system
        self._chance = heap.chance("faults")
        self._only = only
        self._kinds: list[tuple[int, Callable[[], object]]] = [
            (10, self._kill_rank),
            (5, self._kill_scheduler),
            (4, self._kill_gateway),
            (5, self._die_while_sending),
            (4, self._stop),
            (4, self._stop_for_long),
            (4, self._wedge),
            (5, self._tamper),
            (4, self._cut),
            (3, self._hold_back_words),
            (3, self._partition),
            (3, self._part_briefly),
            (3, self._half_open),
            (4, self._trouble_disk),
            (10, self._leave),
            (3, self._stop_for_ever),
            (1, self._freeze_scheduler),
            (2, self._freeze),
            (2, self._drain),
            (2, self._hold),
            (2, self._hand_over),
            (2, self._repeat_receipt),
            (2, self._send_stale_order),
        ]

    def plan(self) -> None:
        """Draw this run's faults."""
        chance = self._chance
        if self._only:
            for number in range(OFTEN):
                self._heap.at(START_S + 1.5 + 0.6 * (number + chance.random()), self._strike)
            return
        at_s = 0.0
        for _ in range(chance.choice([0, 1, 2, 2, 3, 4, 6])):
            # Together, in recovery, or long after.
            if at_s == 0.0:
                at_s = 4.5 * chance.random() ** 0.7
            else:
                at_s += chance.choice([0.0, 0.01, 0.2, 0.5, 1.0, 2.0]) * chance.random()
            self._heap.at(START_S + min(at_s, LAST_FAULT_S), self._strike)

    def _strike(self) -> None:
        weights, kinds = zip(*self._kinds, strict=True)
        self.count += 1
        self._over_in(0.0)
        kind = self._chance.choices(kinds, weights)[0]
        if self._only:
            kind = getattr(self, self._only)
        if kind.__name__ not in HARMLESS:
            self._system.may_lose_world = True
        kind()

    def _over_in(self, seconds: float) -> None:
        self.ends_at_s = max(self.ends_at_s, self._heap.now_s + seconds)

    # --- processes ------------------------------------------------------------------------------

    def _kill_rank(self) -> None:
        self._kill(self._a_rank())

    def _kill_scheduler(self) -> None:
        self._kill(self._system.scheduler)

    def _kill_gateway(self) -> None:
        self._kill(self._chance.choice(self._system.gateways))

    def _kill(self, process: Process | None) -> None:
        if process is not None and process.is_alive:
            process.kill()

    def _die_while_sending(self) -> None:
        """Any process, at any of its next frames."""
        process = self._a_process()
        if process is not None:
            process.dies_after_sends = self._chance.randrange(12)
            self._heap.note(process.name, "dies after sends", process.dies_after_sends)

    def _stop(self) -> None:
        self._stop_for(self._a_process(), self._chance.uniform(0.05, 3.0))

    def _stop_for_long(self) -> None:
        self._stop_for(self._a_process(), self._chance.uniform(3.0, 25.0))

    def _stop_for(self, process: Process | None, seconds: float) -> None:
        if process is not None:
            process.stop()
            self._heap.after(seconds, process.go_on)
            self._over_in(seconds)

    def _wedge(self) -> None:
        rank = self._a_rank()
        if rank is not None:
            rank.is_wedged = True
            self._heap.note(rank.name, "is wedged")

    def _tamper(self) -> None:
        rank = self._a_rank()
        if rank is not None and self._system.shape.ranks > 1:
            rank.tampers = 1
            self._heap.note(rank.name, "will send a wrong receipt")

    def _drain(self) -> None:
        scheduler = self._a_scheduler()
        if scheduler is not None:
            self._heap.note(scheduler.name, "gets SIGTERM")
            self._system.has_drained = True
            scheduler.order_drain()
            self._over_in(5.0)

    def _stop_for_ever(self) -> None:
        process = self._chance.choice([self._a_rank(), self._a_process()])
        if process is not None:
            process.stop()
            self._over_in(STOPPED_S)

    def _freeze(self) -> None:
        """Swapped out, or on a machine that sleeps: nobody is told, and it comes back."""
        process = self._a_process()
        if process is not None:
            seconds = self._chance.uniform(8.0, 18.0)
            process.freeze()
            self._heap.after(seconds, process.go_on)
            self._over_in(seconds)

    def _freeze_scheduler(self) -> None:
        scheduler = self._a_scheduler()
        # One that has never spoken may still be starting: the supervisor does not kill it.
        if scheduler is not None and self._heap.now_s - scheduler.started_at_s > 1.0:
            scheduler.freeze()
            self._over_in(SILENT_S + 1.0)

    def _hold(self) -> None:
        """An operator takes no new requests for a while."""
        scheduler = self._a_scheduler()
        if scheduler is not None:
            self._heap.note(scheduler.name, "is ordered to take no new requests")
            scheduler.later(0.0, scheduler.shell.order, OrderDrain(is_on=True))
            scheduler.later(1.5, scheduler.shell.order, OrderDrain(is_on=False))
            self._over_in(1.5)

    def _hand_over(self) -> None:
        scheduler = self._a_scheduler()
        if scheduler is not None:
            scheduler.hand_over()

    # --- words that should not be ---------------------------------------------------------------

    def _repeat_receipt(self) -> None:
        rank = self._a_rank()
        if rank is not None and rank.last_receipt is not None:
            self._heap.note(rank.name, "repeats its receipt")
            rank.later(0.0, rank.link.send, rank.last_receipt)

    def _send_stale_order(self) -> None:
        """A rank hears a plan of an epoch that is not its own."""
        scheduler, rank = self._a_scheduler(), self._a_rank()
        if scheduler is not None and rank is not None:
            plan = StepPlan(
                epoch=rank.epoch + 1, step_id=1, deadline_s=5.0, row_count=0, row_tokens=0
            )
            self._heap.note(rank.name, "is sent a plan of another epoch")
            for peer in scheduler.shell.rank_peers:
                scheduler.later(0.0, scheduler.shell.send_to_rank, peer, plan)

    # --- links ----------------------------------------------------------------------------------

    def _cut(self) -> None:
        self._on_link("cut", self._system.wire.cut)

    def _partition(self) -> None:
        self._part(self._chance.choice([5.0, 16.0]) * self._chance.uniform(0.6, 1.0))

    def _part_briefly(self) -> None:
        self._part(self._chance.uniform(0.1, 2.0))

    def _part(self, seconds: float) -> None:
        direction = self._chance.choice(["in", "out"])
        breaks = self._chance.random() < 0.5

        def part(dialer: SimulatedSocket) -> None:
            self._system.wire.partition(dialer, direction, seconds, breaks=breaks)

        self._on_link(f"partition {direction} for {seconds:.2f} s", part)
        self._over_in(seconds)

    def _hold_back_words(self) -> None:
        """What a rank says comes late, and its epoch ends meanwhile."""
        rank = self._a_rank()
        if rank is not None and rank.sockets:
            seconds = self._chance.uniform(0.5, 3.0)
            self._heap.note(rank.name, f"is heard only {seconds:.2f} s later")
            rank.is_hindered = True
            self._system.wire.partition(rank.sockets[0], "out", seconds, breaks=False)
            self._over_in(seconds)
            self._heap.after(0.3 * self._chance.random(), self._kill_rank)

    def _half_open(self) -> None:
        knows = self._chance.random() < 0.5

        def open_half(dialer: SimulatedSocket) -> None:
            self._system.wire.half_open(dialer, dialer_knows=knows)

        self._on_link("half-open", open_half)
        self._over_in(25.0)

    def _on_link(self, what: str, do: Callable[[SimulatedSocket], object]) -> None:
        dialers = [
            process
            for process in self._system.processes
            if process is not self._system.scheduler and process.sockets
        ]
        if dialers:
            process = self._chance.choice(dialers)
            self._heap.note(process.name, what)
            # Two short cuts of one link may leave it without a connection for too long.
            self._system.may_lose_world |= process.is_hindered
            process.is_hindered = True
            do(process.sockets[0])

    # --- disks and clients ----------------------------------------------------------------------

    def _trouble_disk(self) -> None:
        disks = self._system.worlds.disks
        rank = self._chance.choice(list(disks))
        seconds = self._chance.uniform(0.5, 5.0)
        disk = disks[rank]
        disk.trouble = self._chance.choice(TROUBLES)
        self._heap.note(f"disk {rank}", disk.trouble)

        def heal() -> None:
            disk.trouble = ""

        self._heap.after(seconds, heal)
        self._over_in(seconds)

    def _leave(self) -> None:
        waiting = [client for client in self._system.clients if not client.outcome]
        if waiting:
            self._chance.choice(waiting).leave()

    # --- whom -----------------------------------------------------------------------------------

    def _a_rank(self) -> RankProcess | None:
        rank = self._chance.choice(self._system.ranks)
        return rank if rank is not None and rank.is_alive else None

    def _a_scheduler(self) -> SchedulerProcess | None:
        scheduler = self._system.scheduler
        return scheduler if scheduler is not None and scheduler.is_alive else None

    def _a_process(self) -> Process | None:
        return _any(self._chance, self._system.processes)


def _any(chance: random.Random, processes: list[Process]) -> Process | None:
    return chance.choice(processes) if processes else None
