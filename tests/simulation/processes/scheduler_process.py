"""The scheduler as a simulated process: the real shell and core, driven turn by turn.

`WatchedCore` stands between the two and holds the core to its promises at every event.
"""

from services.scheduler.core import SchedulerCore
from services.scheduler.events import (
    Action,
    DrainRequested,
    Event,
    GatewayConnected,
    GatewayLost,
    GatewayMessageReceived,
    HandOverRequested,
    RankConnected,
    RankLost,
    RankMessageReceived,
    SaveEvidence,
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
from tests.simulation.checks.protocol_checker import Ledger
from tests.simulation.environment.event_heap import Heap
from tests.simulation.environment.network import Wire
from tests.simulation.processes.process import Process

TICK_S = 0.1
"""How often the scheduler looks at the clock; a busy machine's may do so as rarely."""


class WatchedCore:
    """The real core, with its invariants checked and its words entered at every event."""

    def __init__(self, core: SchedulerCore, name: str, heap: Heap, ledger: Ledger) -> None:
        self.core = core
        self._name = name
        self._heap = heap
        self.ledger = ledger

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Let the core handle an event, and look at what it did."""
        self._note(event)
        finished = core_inspection.finished_steps(self.core)
        actions = self.core.handle(event, now_s)
        self.core.check_invariants()
        self.ledger.enter(event, actions, self.core, finished)
        for action in actions:
            if not isinstance(action, SendToRanks | SendToGateway):
                self._heap.note(self._name, "does", str(action)[:200])
            elif not isinstance(action.message, StatusReported):
                self._heap.note(self._name, "orders", type(action.message).__name__)
        return actions

    def add_cpu_time(self, milliseconds: float) -> None:
        """Forget real times: they differ from run to run."""

    def _note(self, event: Event) -> None:
        match event:
            case RankMessageReceived() | GatewayMessageReceived():
                peer = event.peer if isinstance(event, RankMessageReceived) else event.gateway
                self._heap.note(self._name, "hears", type(event.message).__name__, peer.decode())
            case RankLost() | RankConnected():
                self._heap.note(self._name, type(event).__name__, event.peer.decode())
            case GatewayLost() | GatewayConnected():
                self._heap.note(self._name, type(event).__name__, event.gateway.decode())
            case DrainRequested() | HandOverRequested():
                self._heap.note(self._name, type(event).__name__)
            case TimePassed():
                pass


class SimulatedShell(Shell):
    """The real shell without its loop and without files."""

    def watch(self, core: WatchedCore) -> None:
        """Put the watch before the core."""
        self._core = core  # type: ignore[assignment]

    @property
    def exit_code(self) -> int | None:
        """How the core has ended, None while it goes on."""
        return self._exit_code

    @property
    def unacknowledged(self) -> int:
        """Messages that are not acknowledged."""
        return self._ranks.unacknowledged + self._gateways.unacknowledged

    @property
    def sessions(self) -> int:
        """Peers on both links."""
        return len(self._ranks.peers) + len(self._gateways.peers)

    def turn(self, *, ticks: bool, drains: int) -> None:
        """Do what one round of `run` does."""
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
        """Rank processes that are connected."""
        return self._ranks.peers

    def order(self, message: OrderDrain) -> None:
        """Hear an operator, as if over a link of its own."""
        self._handle(GatewayMessageReceived(PeerId(b"operator-1"), message))

    def send_to_rank(self, peer: PeerId, message: StepPlan) -> None:
        """Send what the core has not ordered."""
        if peer in self._ranks.peers:
            self._ranks.send(peer, message, message.epoch)

    def close_turn(self) -> None:
        """Hear acknowledgements; whatever else comes, comes too late."""
        self._ranks.poll(0.0)
        self._gateways.poll(0.0)

    def shut(self) -> None:
        """Say goodbye and close."""
        self._ranks.close(0.0)
        self._gateways.close(0.0)

    def _keep(self, evidence: SaveEvidence) -> None:
        """Write no file."""


class SchedulerProcess(Process):
    """One life of the scheduler."""

    def __init__(self, name: str, heap: Heap, wire: Wire, config: Config, ledger: Ledger) -> None:
        super().__init__(name, heap, wire)
        with self.opens():
            self.shell = SimulatedShell(config)
        self.core = self.shell._core
        self.watched = WatchedCore(self.core, name, heap, ledger)
        self.shell.watch(self.watched)
        self._drains = 0
        self._ticked_at_s = 0.0
        self._closes_at_s: float | None = None
        self.wake()

    def order_drain(self) -> None:
        """SIGTERM."""
        self._drains += 1
        self.wake()

    def hand_over(self) -> None:
        """SIGUSR1."""
        self.shell.request_hand_over()
        self.wake()

    def turn(self) -> None:
        """Do what the shell's loop does, or close when the core has stopped."""
        if self.shell.exit_code is not None:
            self._close(self.shell.exit_code)
            return
        ticks = self.heap.now_s - self._ticked_at_s >= TICK_S
        if ticks:
            self._ticked_at_s = self.heap.now_s
        drains, self._drains = self._drains, 0
        self.shell.turn(ticks=ticks, drains=drains)

    def due_in_s(self) -> float:
        """Return how long until the next tick."""
        return max(0.0, self._ticked_at_s + TICK_S - self.heap.now_s) + 1e-6

    def _close(self, exit_code: int) -> None:
        if self._closes_at_s is None:
            self._closes_at_s = self.heap.now_s + limits.GOODBYE_S
        self.shell.close_turn()
        if not self.shell.unacknowledged or self.heap.now_s >= self._closes_at_s:
            self.shell.shut()
            self.exit(exit_code)
        else:
            self._ticked_at_s = self.heap.now_s
