"""The scheduler's core: everything it decides, without I/O, time or chance.

`handle(event, now_s)` takes one event and returns the actions to perform, in order. Nothing else
changes the state. The shell in `main` receives, stamps the time, and performs.
"""

from collections import defaultdict

from services.scheduler import status_report
from services.scheduler.batch.running_batch import RunningBatch
from services.scheduler.cache.index.block_format import BlockFormat, make_block_format
from services.scheduler.events import (
    Action,
    DrainOrdered,
    Event,
    GatewayConnected,
    GatewayLost,
    GatewayTold,
    HandOver,
    RankConnected,
    RankLost,
    RankTold,
    Say,
    SendToGateway,
    Stop,
    TimePassed,
)
from services.scheduler.requests.drain import Drain
from services.scheduler.requests.request_table import RETRY_AFTER_S, Bounds, RequestTable
from services.scheduler.requests.sequence import Sequence, SequenceState
from services.scheduler.requests.waiting_queue import WaitingQueue
from services.scheduler.speculation.requirements import can_roll_back
from services.scheduler.stall_detector import StallDetector
from services.scheduler.step_pipeline import StepPipeline
from services.scheduler.world.world import World, WorldState
from shared import limits
from shared.configuration.settings import Config
from shared.errors import ConfigError
from shared.identifiers import PeerId
from shared.messages import (
    AbortRequest,
    BlocksRestored,
    BlocksSpilled,
    Heartbeat,
    OrderDrain,
    QueryStatus,
    RankFailed,
    RankHello,
    RankLoading,
    RankReady,
    StatusReported,
    StepFinished,
    SubmitRequest,
    ToScheduler,
)
from shared.messages.gateway_link import FailureCause

_STATUS_EVERY_S = 1.0

_OPERATOR = b"operator-"
"""How the identity of a peer begins that may give orders; over tcp its key must have that role."""


class SchedulerCore:
    """The state of the scheduler."""

    def __init__(self, config: Config, jaccl_devices: str = "", hostfile: str = "") -> None:
        """Begin with no gateways, no ranks and no requests."""
        self._config = config
        self._out: list[Action] = []
        self._waiting = WaitingQueue()
        self._requests = RequestTable(config.scheduler, self._waiting, self._out)
        self._batch = RunningBatch(config, self._waiting)
        self._world = World(config, jaccl_devices, self._out, hostfile)
        self._steps = StepPipeline(
            config.scheduler.plans_in_flight, self._batch, self._world, self._requests, self._out
        )
        self._lateness = StallDetector()
        self._counters: defaultdict[str, float] = self._requests.counters
        self._gateways: set[PeerId] = set()
        self._status_at_s = 0.0
        self._drain = Drain(config.scheduler.drain_s)
        self._context_tokens_max = 0
        self._is_over = False

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Take in one event; return what to do, in order. The list is the caller's.

        After `Stop` nothing is done any more.
        """
        if self._is_over:
            return []
        match event:
            case GatewayTold():
                self._gateway_told(event.gateway, event.message, now_s)
            case RankTold():
                self._rank_told(event.peer, event.message, now_s)
            case TimePassed():
                self._look_at_clock(now_s)
            case GatewayConnected():
                self._gateways.add(event.gateway)
                self._out.append(SendToGateway(event.gateway, self._report(now_s)))
            case GatewayLost():
                self._gateway_lost(event.gateway)
            case RankConnected():
                pass
            case RankLost():
                rank = self._world.rank_of(event.peer)
                if self._world.lost(event.peer, event.cause, now_s):
                    self._end_epoch(f"Rank {rank} is lost ({event.cause}).", now_s)
            case DrainOrdered():
                self._drain.stop(now_s)
                self._tell_gateways(now_s)
                self._finish_drain(now_s)
            case HandOver():
                self._hand_over(now_s)
        self._steps.send_plans(now_s)
        actions = list(self._out)
        self._out.clear()
        return actions

    @property
    def waits_until_s(self) -> float | None:
        """When the shell must call `handle`, whatever has happened; None: at its next tick."""
        return self._steps.waits_until_s

    def note_cpu(self, milliseconds: float) -> None:
        """Take in how long the shell took for an event, sending included."""
        self._counters["scheduler_cpu_ms_total"] += milliseconds

    def check_invariants(self) -> None:
        """Raise InvariantBroken when the state contradicts itself (I1, I7, I9)."""
        self._batch.check_invariants()
        for sequence in self._requests:
            running = sequence.state is SequenceState.RUNNING
            assert running or sequence.state is SequenceState.WAITING, sequence
            assert sequence.samples_in_flight >= 0, sequence
        waiting = sum(1 for sequence in self._requests if sequence.state is SequenceState.WAITING)
        assert waiting == len(self._waiting), (waiting, len(self._waiting))
        assert len(self._requests) == waiting + len(self._batch)
        assert len(self._steps.flights) <= self._config.scheduler.plans_in_flight

    # --- gateways ----------------------------------------------------------------------------

    def _gateway_told(self, gateway: PeerId, message: ToScheduler, now_s: float) -> None:
        match message:
            case SubmitRequest():
                self._submit(gateway, message, now_s)
            case AbortRequest():
                sequence = self._requests.find(gateway, message)
                if sequence is not None:
                    self._batch.take_off(sequence)
                    self._requests.finish(sequence, message.reason)
                    if message.reason == "stop":
                        self._steps.burst.ended(now_s)
            case QueryStatus():
                self._out.append(SendToGateway(gateway, self._report(now_s)))
            case OrderDrain() if gateway.startswith(_OPERATOR):
                self._hold(gateway, now_s, is_on=message.is_on)
            case _:
                self._refuse(gateway, message)

    def _submit(self, gateway: PeerId, message: SubmitRequest, now_s: float) -> None:
        reject = self._requests.reject
        if self._requests.has(gateway, message.request_id):
            return
        # One that runs goes on although an operator takes no new ones, whoever lost whom meanwhile.
        is_new = not message.generated
        if self._drain.is_stopping or (self._drain.is_on and is_new):
            reject(gateway, message.request_id, "draining", self._drain.explain(), RETRY_AFTER_S)
        elif self._world.state is WorldState.FAILED:
            reject(gateway, message.request_id, "not_ready", self._world.explain())
        elif not self._world.was_ready:
            detail = self._world.explain()
            reject(gateway, message.request_id, "not_ready", detail, RETRY_AFTER_S)
        else:
            bounds = Bounds(
                self._tokens_limit(), self._world.vocab_size(), self._batch.can_roll_back
            )
            self._requests.accept(gateway, message, now_s=now_s, bounds=bounds)
            if self._requests.has(gateway, message.request_id):
                self._steps.burst.arrived(
                    now_s, more_requests_expected=message.more_requests_expected
                )

    def _gateway_lost(self, gateway: PeerId) -> None:
        self._gateways.discard(gateway)
        for sequence in self._requests.of_gateway(gateway):
            self._batch.take_off(sequence)
            self._requests.forget(sequence)

    # --- ranks -------------------------------------------------------------------------------

    def _rank_told(self, peer: PeerId, message: ToScheduler, now_s: float) -> None:
        match message:
            case StepFinished():
                problem = self._steps.receive(peer, message, now_s)
                if problem is not None:
                    self._end_epoch(problem, now_s)
            case RankHello():
                replaced = self._world.hello(peer, message, now_s)
                if replaced is not None:
                    self._end_epoch(replaced, now_s)
            case RankLoading():
                self._world.loading(peer, message)
            case RankReady():
                self._rank_ready(peer, message, now_s)
            case BlocksRestored() | BlocksSpilled():
                self._blocks_reported(peer, message, now_s)
            case Heartbeat():
                pass
            case RankFailed() if self._world.knows(peer):
                rank = self._world.rank_of(peer)
                name = "A rank" if rank is None else f"Rank {rank}"
                if self._world.failed(peer, message, now_s):
                    self._end_epoch(f"{name} failed: {message.detail}", now_s)
            case _:
                self._refuse(peer, message)

    def _rank_ready(self, peer: PeerId, message: RankReady, now_s: float) -> None:
        before = self._world.state
        problem = self._world.ready(peer, message)
        if problem is not None:
            self._end_epoch(problem, now_s)
        elif before is not self._world.state:
            self._begin_epoch(now_s)

    def _begin_epoch(self, now_s: float) -> None:
        """All ranks are ready: steps begin, unless the configuration does not fit the model."""
        reports = self._world.reports()
        budget = self._world.budget()
        try:
            form = make_block_format(self._config.cache, reports, budget)
            may_draft = can_roll_back(self._config.speculation, reports)
        except ConfigError as error:
            self._world.recovery.give_up("configuration", str(error))
            self._end_epoch(str(error), now_s)
            return
        if self._batch.start(budget, form, self._world.epoch, can_roll_back=may_draft):
            self._out.append(Say("warning", "blocks_of_another_namespace", _namespace(form)))
        self._counters["epochs_total"] += 1
        self._tell_gateways(now_s)
        self._refit_requests()

    def _blocks_reported(
        self, peer: PeerId, message: BlocksRestored | BlocksSpilled, now_s: float
    ) -> None:
        rank = self._world.rank_of(peer)
        if rank is None or message.epoch != self._world.epoch:
            self._counters["stale_receipts_total"] += 1
        elif isinstance(message, BlocksRestored):
            self._batch.cache.restored(rank, message)
        else:
            self._batch.cache.spilled(rank, self._world.host_of(peer), message, now_s)

    def _refit_requests(self) -> None:
        """Fail what no longer fits: another epoch may hold less than the one before."""
        limit = self._tokens_limit()
        for sequence in self._requests:
            sequence.tokens_max = min(sequence.tokens_max, limit)
            if len(sequence.tokens) >= limit:
                self._batch.take_off(sequence)
                self._requests.fail(
                    sequence,
                    "failed",
                    f"After a restart only {limit} tokens fit, "
                    f"and this request has {len(sequence.tokens)} already.",
                )

    def _end_epoch(self, cause: str, now_s: float) -> None:
        """Every rank of this epoch goes; every unfinished sequence waits for the next one."""
        was_stuck = self._steps.are_stuck
        suspects = self._batch.running
        self._steps.forget()
        self._batch.requeue_all()
        self._world.end(cause, now_s, was_stuck=was_stuck)
        self._fail_suspects(suspects, cause)
        if self._world.state is WorldState.FAILED:
            self._fail_all("failed", self._world.explain())
        self._tell_gateways(now_s)

    def _fail_suspects(self, ran: list[Sequence], cause: str) -> None:
        """Fail whoever has brought down one epoch after the other, so that others get their turn.

        A kernel may crash on one prompt alone. Who got a token meanwhile is above suspicion. One
        epoch is left to show whether it was them, before all trying ends.
        """
        lost_max = max(1, self._config.scheduler.epochs_failed_max - 1)
        for sequence in ran:
            sequence.epochs_lost += 1
            if sequence.epochs_lost >= lost_max:
                detail = (
                    f"{lost_max} epochs in a row have failed while this request ran, and it got no "
                    f"token in any of them. The last one: {cause}"
                )
                self._batch.take_off(sequence)
                self._requests.fail(sequence, "failed", detail[:4_000])

    # --- time --------------------------------------------------------------------------------

    def _look_at_clock(self, now_s: float) -> None:
        held_up_s = self._lateness.held_up_s(now_s)
        if held_up_s:
            self._out.append(Say("warning", "held_up", {"seconds": round(held_up_s, 1)}))
            self._steps.flights.extend_deadlines(held_up_s, now_s)
            self._world.extend_deadlines(held_up_s, now_s)
        overdue = self._steps.flights.overdue(now_s) or self._world.overdue(now_s)
        if overdue is not None:
            self._end_epoch(overdue, now_s)
        for sequence, cause, detail in self._requests.overdue(now_s):
            self._batch.take_off(sequence)
            self._requests.fail(sequence, cause, detail)
        if now_s - self._status_at_s >= _STATUS_EVERY_S:
            self._tell_gateways(now_s)
        self._finish_drain(now_s)

    # --- ends --------------------------------------------------------------------------------

    def _hold(self, operator: PeerId, now_s: float, *, is_on: bool) -> None:
        self._drain.hold(is_on=is_on)
        fields = {"is_on": is_on, "by": operator.decode(errors="replace")}
        self._out.append(Say("info", "drain_ordered", fields))
        self._tell_gateways(now_s)
        if operator not in self._gateways:
            self._out.append(SendToGateway(operator, self._report(now_s)))

    def _finish_drain(self, now_s: float) -> None:
        unfinished = len(self._requests)
        is_writing = self._batch.cache.is_writing or len(self._steps.flights) > 0
        if not self._drain.is_over(now_s, open_requests=unfinished, is_writing=is_writing):
            return
        self._fail_all("stopping", "The server has stopped before this request finished.")
        exit_code = limits.EXIT_OK if not unfinished else limits.EXIT_UNAVAILABLE
        self._stop("The scheduler stops.", exit_code, now_s)

    def _hand_over(self, now_s: float) -> None:
        """Stop and end no request: gateways submit them again, with what they have of them."""
        self._out.append(Say("info", "handed_over", {"requests": len(self._requests)}))
        self._stop("The scheduler makes room for another.", limits.EXIT_OK, now_s)

    def _stop(self, cause: str, exit_code: int, now_s: float) -> None:
        self._steps.forget()
        self._batch.requeue_all()
        self._world.dismiss_all(cause, now_s)
        # The last word is who may not obey: nobody after this one knows of them.
        self._tell_gateways(now_s)
        self._out.append(Stop(exit_code))
        self._is_over = True

    def _fail_all(self, cause: FailureCause, detail: str) -> None:
        for sequence in self._requests:
            self._batch.take_off(sequence)
            self._requests.fail(sequence, cause, detail)

    # --- reports -----------------------------------------------------------------------------

    def _tokens_limit(self) -> int:
        # Between two epochs nobody reports a limit; the one before stands until the next is known.
        self._context_tokens_max = self._world.context_tokens_max() or self._context_tokens_max
        return min(self._context_tokens_max, self._batch.rows.longest())

    def _tell_gateways(self, now_s: float) -> None:
        self._status_at_s = now_s
        if self._gateways:
            report = self._report(now_s)
            self._out.extend(SendToGateway(gateway, report) for gateway in self._gateways)

    def _report(self, now_s: float) -> StatusReported:
        return status_report.report(
            config=self._config,
            world=self._world,
            batch=self._batch,
            flights=self._steps.flights,
            rates=self._steps.rates,
            counters=self._counters,
            waiting=len(self._waiting),
            tokens_limit=self._tokens_limit() if self._world.was_ready else 0,
            drain=self._drain,
            now_s=now_s,
        )

    def _refuse(self, peer: PeerId, message: ToScheduler) -> None:
        fields = {"peer": peer.decode(errors="replace"), "message": type(message).__name__}
        self._out.append(Say("warning", "message_refused", fields))


def _namespace(form: BlockFormat | None) -> dict[str, object]:
    return {"namespace": form.namespace if form is not None else ""}
