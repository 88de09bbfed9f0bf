"""Simulated scheduler: the real shell and core, with the core's promises checked at every event."""

from services.scheduler.core import SchedulerCore
from services.scheduler.events import (
    Action,
    DrainRequested,
    Event,
    GatewayConnected,
    GatewayLost,
    GatewayMessageReceived,
    HandOverRequested,
    RankLost,
    RankMessageReceived,
    SaveEvidence,
    SaveWorldFacts,
    SendToGateway,
    SendToRanks,
    TimePassed,
)
from services.scheduler.main import Shell
from shared import limits
from shared.configuration.settings import Config
from shared.identifiers import PeerId
from shared.messages import OrderDrain, StatusReported, StepPlan
from tests.simulation.checks import core_inspection
from tests.simulation.checks.protocol_checker import ProtocolChecker
from tests.simulation.environment.event_heap import EventHeap
from tests.simulation.environment.network import Network
from tests.simulation.processes.process import Process

TICK_S = 0.1
"""Longest time between two looks at the clock, as on a busy machine."""


class CheckedCore:
    """The real core, with invariants and messages checked at every event."""

    def __init__(
        self, core: SchedulerCore, name: str, heap: EventHeap, checker: ProtocolChecker
    ) -> None:
        self.core = core
        self._name = name
        self._heap = heap
        self.checker = checker

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Handle an event with the real core and check its actions.

        Raises:
            Violation: an action breaks a promise.
        """
        self._note(event)
        finished = core_inspection.last_finished_step(self.core)
        actions = self.core.handle(event, now_s)
        self.core.check_invariants()
        self.checker.check_event(event, actions, self.core, finished)
        for action in actions:
            if not isinstance(action, SendToRanks | SendToGateway):
                self._heap.record(self._name, "does", str(action)[:200])
            elif not isinstance(action.message, StatusReported):
                self._heap.record(self._name, "orders", type(action.message).__name__)
        return actions

    def add_cpu_time(self, milliseconds: float) -> None:
        """Ignore CPU times: they differ from run to run."""

    def _note(self, event: Event) -> None:
        match event:
            case RankMessageReceived() | GatewayMessageReceived():
                peer = event.peer if isinstance(event, RankMessageReceived) else event.gateway
                self._heap.record(self._name, "hears", type(event.message).__name__, peer.decode())
            case RankLost():
                self._heap.record(self._name, type(event).__name__, event.peer.decode())
            case GatewayLost() | GatewayConnected():
                self._heap.record(self._name, type(event).__name__, event.gateway.decode())
            case DrainRequested() | HandOverRequested():
                self._heap.record(self._name, type(event).__name__)
            case TimePassed():
                pass


class SimulatedShell(Shell):
    """The real shell without its loop and without files."""

    def use_core(self, core: CheckedCore) -> None:
        """Replace the core by one that checks it."""
        self._core = core  # type: ignore[assignment]

    @property
    def exit_code(self) -> int | None:
        """Exit code of the core; None while it runs."""
        return self._exit_code

    @property
    def unacknowledged(self) -> int:
        """Number of messages that peers have not acknowledged."""
        return self._ranks.unacknowledged + self._gateways.unacknowledged

    @property
    def sessions(self) -> int:
        """Number of peers on both links."""
        return len(self._ranks.peers) + len(self._gateways.peers)

    def turn(self, *, ticks: bool, drains: int) -> None:
        """Do one round of `run`."""
        if ticks or self._ranks.socket.inbox:  # type: ignore[attr-defined]
            self._take_ranks(self._ranks.poll(0.0))
        if ticks or self._gateways.socket.inbox:  # type: ignore[attr-defined]
            self._take_gateways(self._gateways.poll(0.0))
        if ticks:
            self._handle(TimePassed())
        for _ in range(drains):
            self._handle(DrainRequested())
        if self._hand_over_requested and self._exit_code is None:
            self._handle(HandOverRequested())

    @property
    def rank_peers(self) -> list[PeerId]:
        """Connected rank processes."""
        return self._ranks.peers

    def receive_drain_order(self, message: OrderDrain) -> None:
        """Receive an operator's order, as over a link of its own."""
        self._handle(GatewayMessageReceived(PeerId(b"operator-1"), message))

    def send_to_rank(self, peer: PeerId, message: StepPlan) -> None:
        """Send a plan that the core has not ordered."""
        if peer in self._ranks.peers:
            self._ranks.send(peer, message, message.epoch)

    def poll_acknowledgements(self) -> None:
        """Read acknowledgements while the links close; other messages are ignored."""
        self._ranks.poll(0.0)
        self._gateways.poll(0.0)

    def close_links(self) -> None:
        """Close both links with a goodbye."""
        self._ranks.close(0.0)
        self._gateways.close(0.0)

    def _save_evidence(self, evidence: SaveEvidence) -> None:
        """Write no file."""

    def _read_world_facts(self) -> None:
        """Read no file."""

    def _save_world_facts(self, action: SaveWorldFacts) -> None:
        """Write no file."""


class SchedulerProcess(Process):
    """One life of the scheduler."""

    def __init__(
        self, name: str, heap: EventHeap, network: Network, config: Config, checker: ProtocolChecker
    ) -> None:
        super().__init__(name, heap, network)
        with self.owning_sockets():
            self.shell = SimulatedShell(config)
        self.core = self.shell._core
        self.checked_core = CheckedCore(self.core, name, heap, checker)
        self.shell.use_core(self.checked_core)
        self._drains = 0
        self._ticked_at_s = 0.0
        self._closes_at_s: float | None = None
        self.wake()

    def request_drain(self) -> None:
        """Handle SIGTERM."""
        self._drains += 1
        self.wake()

    def request_hand_over(self) -> None:
        """Handle SIGUSR1."""
        self.shell.request_hand_over()
        self.wake()

    def turn(self) -> None:
        """Run the shell once, or close when the core has stopped."""
        if self.shell.exit_code is not None:
            self._close(self.shell.exit_code)
            return
        ticks = self.heap.now_s - self._ticked_at_s >= TICK_S
        if ticks:
            self._ticked_at_s = self.heap.now_s
        drains, self._drains = self._drains, 0
        self.shell.turn(ticks=ticks, drains=drains)

    def due_in_s(self) -> float:
        """Return the seconds until the next tick."""
        return max(0.0, self._ticked_at_s + TICK_S - self.heap.now_s) + 1e-6

    def _close(self, exit_code: int) -> None:
        if self._closes_at_s is None:
            self._closes_at_s = self.heap.now_s + limits.GOODBYE_S
        self.shell.poll_acknowledgements()
        if not self.shell.unacknowledged or self.heap.now_s >= self._closes_at_s:
            self.shell.close_links()
            self.exit(exit_code)
        else:
            self._ticked_at_s = self.heap.now_s
