"""Schedule of a run's faults, drawn from its seed: kind, target, time and duration."""

import random
from collections.abc import Callable

from services.supervisor.children.stuck_processes import SILENCES
from shared import limits
from shared.messages import OrderDrain, StepPlan
from tests.simulation.environment.disk import DISK_FAULTS
from tests.simulation.environment.event_heap import START_S, EventHeap
from tests.simulation.environment.network import SimulatedSocket
from tests.simulation.processes.process import Process
from tests.simulation.processes.rank_process import RankProcess
from tests.simulation.processes.scheduler_process import SchedulerProcess
from tests.simulation.system import System

LAST_FAULT_S = 8.0
"""Latest start of a fault."""

FAULTS_OF_ONE_KIND = 8
"""Number of faults in a run with one kind only."""
EPOCH_PRESERVING = {
    "_stop",
    "_cut",
    "_partition_briefly",
    "_fail_disk",
    "_disconnect_client",
    "_drain_by_operator",
    "_repeat_receipt",
    "_send_stale_order",
}
"""Faults that must not end an epoch."""


class FaultSchedule:
    """The faults of one run."""

    def __init__(self, heap: EventHeap, system: System, only_kind: str = "") -> None:
        """Schedule no fault yet; `only_kind` names the only kind; "" allows all."""
        self.ends_at_s = START_S
        """End of the last fault."""
        self.count = 0
        self._heap = heap
        self._system = system
        self._rng = heap.random_stream("faults")
        self._only_kind = only_kind
        self._kinds: list[tuple[int, Callable[[], object]]] = [
            (10, self._kill_rank),
            (5, self._kill_scheduler),
            (4, self._kill_gateway),
            (5, self._die_while_sending),
            (4, self._stop),
            (4, self._stop_for_long),
            (4, self._hang_rank),
            (5, self._corrupt_receipt),
            (4, self._cut),
            (3, self._delay_rank_messages),
            (3, self._partition),
            (3, self._partition_briefly),
            (3, self._half_open),
            (4, self._fail_disk),
            (10, self._disconnect_client),
            (3, self._stop_forever),
            (1, self._freeze_scheduler),
            (2, self._freeze),
            (2, self._drain),
            (2, self._drain_by_operator),
            (2, self._hand_over),
            (2, self._repeat_receipt),
            (2, self._send_stale_order),
        ]

    def plan(self) -> None:
        """Draw the faults of this run and put them on the heap."""
        rng = self._rng
        if self._only_kind:
            for number in range(FAULTS_OF_ONE_KIND):
                self._heap.call_at(START_S + 1.5 + 0.6 * (number + rng.random()), self._inject)
            return
        at_s = 0.0
        for _ in range(rng.choice([0, 1, 2, 2, 3, 4, 6])):
            # The next fault comes together with this one, during recovery, or long after it.
            if at_s == 0.0:
                at_s = 4.5 * rng.random() ** 0.7
            else:
                at_s += rng.choice([0.0, 0.01, 0.2, 0.5, 1.0, 2.0]) * rng.random()
            self._heap.call_at(START_S + min(at_s, LAST_FAULT_S), self._inject)

    def _inject(self) -> None:
        weights, kinds = zip(*self._kinds, strict=True)
        self.count += 1
        self._extend_to(0.0)
        kind = self._rng.choices(kinds, weights)[0]
        if self._only_kind:
            kind = getattr(self, self._only_kind)
        if kind.__name__ not in EPOCH_PRESERVING:
            self._system.may_end_epoch = True
        kind()

    def _extend_to(self, seconds: float) -> None:
        self.ends_at_s = max(self.ends_at_s, self._heap.now_s + seconds)

    # --- processes --------------------------------------------------------------------------------

    def _kill_rank(self) -> None:
        self._kill(self._pick_rank())

    def _kill_scheduler(self) -> None:
        self._kill(self._system.scheduler)

    def _kill_gateway(self) -> None:
        self._kill(self._rng.choice(self._system.gateways))

    def _kill(self, process: Process | None) -> None:
        if process is not None and process.is_alive:
            process.kill()

    def _die_while_sending(self) -> None:
        """Kill some process at one of its next frames."""
        process = self._pick_process()
        if process is not None:
            process.dies_after_sends = self._rng.randrange(12)
            self._heap.record(process.name, "dies after sends", process.dies_after_sends)

    def _stop(self) -> None:
        self._stop_for(self._pick_process(), self._rng.uniform(0.05, 3.0))

    def _stop_for_long(self) -> None:
        self._stop_for(self._pick_process(), self._rng.uniform(3.0, 25.0))

    def _stop_for(self, process: Process | None, seconds: float) -> None:
        if process is not None:
            process.stop()
            self._heap.call_after(seconds, process.resume)
            self._extend_to(seconds)

    def _hang_rank(self) -> None:
        rank = self._pick_rank()
        if rank is not None:
            rank.is_hung = True
            self._heap.record(rank.name, "is hung")

    def _corrupt_receipt(self) -> None:
        rank = self._pick_rank()
        if rank is not None and self._system.plan.ranks > 1:
            rank.corrupt_receipts_left = 1
            self._heap.record(rank.name, "will send a wrong receipt")

    def _drain(self) -> None:
        scheduler = self._running_scheduler()
        if scheduler is not None:
            self._heap.record(scheduler.name, "gets SIGTERM")
            self._system.has_drained = True
            scheduler.request_drain()
            self._extend_to(5.0)

    def _stop_forever(self) -> None:
        process = self._rng.choice([self._pick_rank(), self._pick_process()])
        if process is not None:
            process.stop()
            self._extend_to(limits.PEER_SILENCE_S)

    def _freeze(self) -> None:
        """Stop a process that was swapped out, or whose machine sleeps, without a report; it
        resumes."""
        process = self._pick_process()
        if process is not None:
            seconds = self._rng.uniform(8.0, 18.0)
            process.freeze()
            self._heap.call_after(seconds, process.resume)
            self._extend_to(seconds)

    def _freeze_scheduler(self) -> None:
        scheduler = self._running_scheduler()
        # A scheduler that has sent nothing may still be starting: the supervisor does not kill it.
        if scheduler is not None and self._heap.now_s - scheduler.started_at_s > 1.0:
            scheduler.freeze()
            self._extend_to(SILENCES * limits.PEER_SILENCE_S + 1.0)

    def _drain_by_operator(self) -> None:
        """Let an operator refuse new requests for a while."""
        scheduler = self._running_scheduler()
        if scheduler is not None:
            self._heap.record(scheduler.name, "is ordered to take no new requests")
            scheduler.call_later(0.0, scheduler.shell.receive_drain_order, OrderDrain(is_on=True))
            scheduler.call_later(1.5, scheduler.shell.receive_drain_order, OrderDrain(is_on=False))
            self._extend_to(1.5)

    def _hand_over(self) -> None:
        scheduler = self._running_scheduler()
        if scheduler is not None:
            scheduler.request_hand_over()

    # --- messages that must be refused ------------------------------------------------------------

    def _repeat_receipt(self) -> None:
        rank = self._pick_rank()
        if rank is not None and rank.last_receipt is not None:
            self._heap.record(rank.name, "repeats its receipt")
            rank.call_later(0.0, rank.link.send, rank.last_receipt)

    def _send_stale_order(self) -> None:
        """Send ranks a plan of another epoch."""
        scheduler, rank = self._running_scheduler(), self._pick_rank()
        if scheduler is not None and rank is not None:
            plan = StepPlan(
                epoch=rank.epoch + 1_000, step_id=1, deadline_s=5.0, row_count=0, row_tokens=0
            )
            self._heap.record(rank.name, "is sent a plan of another epoch")
            for peer in scheduler.shell.rank_peers:
                scheduler.call_later(0.0, scheduler.shell.send_to_rank, peer, plan)

    # --- links ------------------------------------------------------------------------------------

    def _cut(self) -> None:
        self._disturb_link("cut", self._system.network.cut)

    def _partition(self) -> None:
        self._partition_for(self._rng.choice([5.0, 16.0]) * self._rng.uniform(0.6, 1.0))

    def _partition_briefly(self) -> None:
        self._partition_for(self._rng.uniform(0.1, 2.0))

    def _partition_for(self, seconds: float) -> None:
        direction = self._rng.choice(["in", "out"])
        breaks = self._rng.random() < 0.5

        def partition(dialer: SimulatedSocket) -> None:
            self._system.network.partition(dialer, direction, seconds, breaks=breaks)

        self._disturb_link(f"partition {direction} for {seconds:.2f} s", partition)
        self._extend_to(seconds)

    def _delay_rank_messages(self) -> None:
        """Delay the messages of a rank, and kill a rank meanwhile."""
        rank = self._pick_rank()
        if rank is not None and rank.sockets:
            seconds = self._rng.uniform(0.5, 3.0)
            self._heap.record(rank.name, f"messages arrive {seconds:.2f} s late")
            rank.is_impaired = True
            self._system.network.partition(rank.sockets[0], "out", seconds, breaks=False)
            self._extend_to(seconds)
            self._heap.call_after(0.3 * self._rng.random(), self._kill_rank)

    def _half_open(self) -> None:
        knows = self._rng.random() < 0.5

        def open_half(dialer: SimulatedSocket) -> None:
            self._system.network.half_open(dialer, dialer_knows=knows)

        self._disturb_link("half-open", open_half)
        self._extend_to(25.0)

    def _disturb_link(self, fault: str, callback: Callable[[SimulatedSocket], object]) -> None:
        dialers = [
            process
            for process in self._system.processes
            if process is not self._system.scheduler and process.sockets
        ]
        if dialers:
            process = self._rng.choice(dialers)
            self._heap.record(process.name, fault)
            # Two short interruptions of one link together can exceed the silence limit.
            self._system.may_end_epoch |= process.is_impaired
            process.is_impaired = True
            callback(process.sockets[0])

    # --- disks and clients ------------------------------------------------------------------------

    def _fail_disk(self) -> None:
        disks = self._system.rank_environment.disks
        rank = self._rng.choice(list(disks))
        seconds = self._rng.uniform(0.5, 5.0)
        disk = disks[rank]
        disk.fault = self._rng.choice(DISK_FAULTS)
        self._heap.record(f"disk {rank}", disk.fault)

        def heal() -> None:
            disk.fault = ""

        self._heap.call_after(seconds, heal)
        self._extend_to(seconds)

    def _disconnect_client(self) -> None:
        waiting = [client for client in self._system.clients if not client.outcome]
        if waiting:
            self._rng.choice(waiting).leave()

    # --- choice of targets ------------------------------------------------------------------------

    def _pick_rank(self) -> RankProcess | None:
        rank = self._rng.choice(self._system.ranks)
        return rank if rank is not None and rank.is_alive else None

    def _running_scheduler(self) -> SchedulerProcess | None:
        scheduler = self._system.scheduler
        return scheduler if scheduler is not None and scheduler.is_alive else None

    def _pick_process(self) -> Process | None:
        return _choose_process(self._rng, self._system.processes)


def _choose_process(rng: random.Random, processes: list[Process]) -> Process | None:
    return rng.choice(processes) if processes else None
