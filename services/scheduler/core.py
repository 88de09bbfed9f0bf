"""Scheduler core. Owns all decisions of the scheduler; does no I/O and reads no clock.

`handle(event, now_s)` takes one event and returns the actions to perform, in order. Nothing else
changes the state. The shell in `main` receives events, reads the clock and performs actions.
"""

from collections import defaultdict

from services.scheduler.batch.running_batch import RunningBatch
from services.scheduler.cache.index.block_format import make_block_format
from services.scheduler.events import (
    Action,
    DrainRequested,
    Event,
    GatewayConnected,
    GatewayLost,
    GatewayMessageReceived,
    HandOverRequested,
    PeerSilent,
    RankLost,
    RankMessageReceived,
    SendToGateway,
    Stop,
    TimePassed,
    WriteLog,
)
from services.scheduler.rank_reports import RankReports
from services.scheduler.requests.drain import Drain
from services.scheduler.requests.request_table import RETRY_AFTER_S, RequestLimits, RequestTable
from services.scheduler.requests.sequence import Sequence
from services.scheduler.requests.waiting_limits import WaitingLimits
from services.scheduler.requests.waiting_queue import WaitingQueue
from services.scheduler.speculation.methods import check_roll_back
from services.scheduler.stall_detector import StallDetector
from services.scheduler.status_report import StatusReporter
from services.scheduler.step_pipeline import StepPipeline
from services.scheduler.telemetry.queries import Query, TelemetryQueries
from services.scheduler.telemetry.telemetry import Telemetry
from services.scheduler.world.members import explain_failure
from services.scheduler.world.world import World, WorldState
from services.scheduler.world.world_change import WorldChange, WorldFacts
from shared import limits
from shared.configuration.settings import Config
from shared.errors import ConfigError
from shared.identifiers import PeerId
from shared.messages import (
    AbortRequest,
    BlocksRestored,
    BlocksSpilled,
    GrammarCompiled,
    Heartbeat,
    OrderDrain,
    OrderProfile,
    PlaceTaken,
    QueryStatus,
    RankFailed,
    RankHello,
    RankLoading,
    RankReady,
    StatusReported,
    StepFinished,
    StepsMeasured,
    SubmitRequest,
    ToScheduler,
)
from shared.messages.gateway_link import FailureCause

_STATUS_EVERY_S = 1.0

_OPERATOR = b"operator-"
"""Prefix of the identity of peers that may start a drain; over TCP their key needs that role."""


class SchedulerCore:
    """Takes every decision of the scheduler, one event at a time."""

    def __init__(
        self,
        config: Config,
        jaccl_devices: str = "",
        hostfile: str = "",
        before: WorldFacts | None = None,
    ) -> None:
        """Start without gateways, ranks and requests.

        Args:
            config: the whole configuration.
            jaccl_devices: content of the device matrix; "" with another backend.
            hostfile: content of MLX's hostfile; "": ranks report their addresses.
            before: the world of the last start; None: unknown.
        """
        self._config = config
        self._actions: list[Action] = []
        self._waiting = WaitingQueue(WaitingLimits(config.scheduler, config.tenants.share))
        self._requests = RequestTable(config.scheduler, self._waiting, self._actions)
        self._batch = RunningBatch(config, self._waiting, self._requests.turns)
        self._world = World(config, jaccl_devices, self._actions, hostfile)
        self._change = WorldChange(config, before, self._actions)
        self._telemetry = Telemetry(config.scheduler.profile_every_steps, config.sharding)
        self._pipeline = StepPipeline(
            config.scheduler.plans_in_flight,
            self._batch,
            self._world,
            self._requests,
            self._telemetry,
            self._actions,
        )
        self._reports = RankReports(self._world, self._batch, self._requests, self._telemetry)
        self._stall_detector = StallDetector()
        self._counters: defaultdict[str, float] = self._requests.counters
        self._gateways: set[PeerId] = set()
        known = (self._telemetry, self._requests, self._waiting, self._world)
        self._queries = TelemetryQueries(config, *known, self._gateways, self._actions)
        self._status_at_s = 0.0
        self._drain = Drain(config.scheduler.drain_s)
        self._status = StatusReporter(
            config,
            self._world,
            self._change,
            self._batch,
            self._pipeline,
            self._telemetry,
            self._requests,
            self._waiting,
            self._drain,
        )
        self._has_stopped = False

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Handle one event at the time `now_s`; return the actions to perform, in order.

        The caller owns the list. After `Stop`, events are ignored.
        """
        if self._has_stopped:
            return []
        self._requests.history.now_s = now_s
        match event:
            case RankMessageReceived():
                self._handle_rank_message(event.peer, event.message, now_s)
            case GatewayMessageReceived():
                self._handle_gateway_message(event.gateway, event.message, now_s)
            case TimePassed():
                self._check_deadlines(now_s)
            case GatewayConnected():
                self._gateways.add(event.gateway)
                self._actions.append(SendToGateway(event.gateway, self._report(now_s)))
            case GatewayLost():
                self._handle_gateway_lost(event.gateway)
            case RankLost():
                lost = self._world.explain_loss(event.peer, event.cause)
                if self._world.handle_lost(event.peer, event.cause, now_s):
                    is_silent = event.cause.startswith("silent")
                    self._end_epoch("rank_lost", lost, now_s, is_symptom=is_silent)
            case PeerSilent():
                self._counters["peer_silences_total"] += 1
            case DrainRequested():
                self._drain.begin_stop(now_s)
                self._report_to_gateways(now_s)
                self._stop_if_drained(now_s)
            case HandOverRequested():
                self._stop_for_hand_over(now_s)
        self._pipeline.send_plans(now_s)
        actions = list(self._actions)
        self._telemetry.events.note(actions, now_s)
        self._actions.clear()
        return actions

    @property
    def wake_at_s(self) -> float | None:
        """When the shell must handle TimePassed if no event comes; None: at its next tick."""
        return self._pipeline.wake_at_s

    def add_cpu_time(self, milliseconds: float) -> None:
        """Count the time in which the shell handled an event and performed its actions."""
        self._counters["scheduler_cpu_ms_total"] += milliseconds

    def check_invariants(self) -> None:
        """Raise InvariantBroken or AssertionError if slots or blocks conflict (I1, I7, I9)."""
        self._batch.check_invariants()
        self._requests.check_invariants()
        assert len(self._requests) == len(self._waiting) + len(self._batch)
        assert len(self._pipeline.in_flight) <= self._config.scheduler.plans_in_flight

    # --- gateways ----------------------------------------------------------------------------

    def _handle_gateway_message(self, gateway: PeerId, message: ToScheduler, now_s: float) -> None:
        match message:
            case SubmitRequest():
                self._handle_submit(gateway, message, now_s)
            case AbortRequest():
                if sequence := self._requests.find(gateway, message.request_id):
                    self._batch.remove(sequence)
                    self._requests.finish(sequence, message.reason)
                    if message.reason == "stop":
                        self._pipeline.burst.record_end(now_s)
            case QueryStatus():
                self._actions.append(SendToGateway(gateway, self._report(now_s)))
            case OrderDrain() if gateway.startswith(_OPERATOR):
                self._set_operator_drain(gateway, now_s, is_on=message.is_on)
            case OrderProfile() if gateway.startswith(_OPERATOR):
                self._telemetry.profiles.order(message)
            case _ if isinstance(message, Query):
                self._queries.handle(gateway, message, now_s)
            case _:
                self._log_refused_message(gateway, message)

    def _handle_submit(self, gateway: PeerId, message: SubmitRequest, now_s: float) -> None:
        reject = self._requests.reject
        if self._requests.find(gateway, message.request_id) is not None:
            return
        # A resumed request is accepted during an operator's drain, because it ran before.
        is_new = not message.generated
        if self._drain.is_stopping or (self._drain.is_on and is_new):
            reject(gateway, message.request_id, "draining", self._drain.explain(), RETRY_AFTER_S)
        elif self._world.state is WorldState.FAILED or not self._world.was_ready:
            retry_after_s = None if self._world.state is WorldState.FAILED else RETRY_AFTER_S
            reject(gateway, message.request_id, "not_ready", self._world.explain(), retry_after_s)
        else:
            bounds = RequestLimits(
                self._tokens_limit(),
                self._world.model.vocab_size,
                self._batch.speculation.can_roll_back,
            )
            self._requests.accept(gateway, message, now_s=now_s, bounds=bounds)
            if self._requests.find(gateway, message.request_id) is not None:
                self._pipeline.burst.record_arrival(
                    now_s, more_requests_expected=message.more_requests_expected
                )

    def _handle_gateway_lost(self, gateway: PeerId) -> None:
        self._gateways.discard(gateway)
        for sequence in self._requests.of_gateway(gateway):
            self._batch.remove(sequence)
            self._requests.discard(sequence)

    # --- ranks -------------------------------------------------------------------------------

    def _handle_rank_message(self, peer: PeerId, message: ToScheduler, now_s: float) -> None:
        if (rank := self._world.rank_of(peer)) is not None:
            self._telemetry.hear(rank, now_s)
        match message:
            case StepFinished():
                if problem := self._pipeline.receive(peer, message, now_s):
                    self._world.passed_canary.forget()
                    self._end_epoch("receipts", problem, now_s)
            case RankHello() | PlaceTaken():
                if replaced := self._world.handle_process(peer, message, now_s):
                    self._end_epoch("replaced", replaced, now_s)
            case RankLoading():
                self._world.handle_loading(peer, message)
            case RankReady():
                self._handle_rank_ready(peer, message, now_s)
            case BlocksRestored() | BlocksSpilled() | GrammarCompiled() | StepsMeasured():
                self._reports.handle(peer, message, now_s)
            case Heartbeat():
                pass
            case RankFailed() if self._world.knows(peer):
                cause = explain_failure(self._world.rank_of(peer), message)
                if self._world.handle_failed(peer, message, now_s):
                    self._end_epoch("rank_failed", cause, now_s, is_symptom=message.cause == "peer")
            case _:
                self._log_refused_message(peer, message)

    def _handle_rank_ready(self, peer: PeerId, message: RankReady, now_s: float) -> None:
        before = self._world.state
        if problem := self._world.handle_ready(peer, message, now_s):
            self._end_epoch("load", problem, now_s)
        elif before is not self._world.state:
            self._begin_epoch(now_s)

    def _begin_epoch(self, now_s: float) -> None:
        """Begin steps with ready ranks, or end the epoch if the settings do not fit the model."""
        reports = self._world.reports()
        budget = self._world.model.kv_budget()
        try:
            form = make_block_format(self._config, reports, budget)
            may_draft = check_roll_back(self._config.speculation, reports)
        except ConfigError as error:
            self._world.recovery.abandon_start("configuration", str(error))
            self._end_epoch("configuration", str(error), now_s)
            return
        self._batch.start(budget, form, self._world.epoch, can_roll_back=may_draft)
        self._batch.timing.assume_prefill(*self._world.model.prefill_time())
        self._change.note_ready(self._world.statuses(), form.namespace if form else "", now_s)
        self._counters["epochs_total"] += 1
        self._report_to_gateways(now_s)
        self._refit_requests()

    def _refit_requests(self) -> None:
        """Fail requests that no longer fit, because the new epoch may hold fewer tokens."""
        limit = self._tokens_limit()
        for sequence in self._requests:
            sequence.tokens_max = min(sequence.tokens_max, limit)
            if len(sequence.tokens) >= limit:
                self._fail(
                    sequence,
                    "failed",
                    f"After a restart only {limit} tokens fit, "
                    f"and this request has {len(sequence.tokens)} already.",
                )

    def _end_epoch(self, kind: str, cause: str, now_s: float, *, is_symptom: bool = False) -> None:
        """End the epoch: its sequences wait for the next, which a spare world begins at once."""
        self._counters[f"epochs_ended_{kind}_total"] += 1
        was_stuck = self._pipeline.is_stuck
        suspects = self._batch.running
        self._pipeline.discard_in_flight()
        self._batch.requeue_running()
        self._world.end_epoch(cause, now_s, was_stuck=was_stuck, is_symptom=is_symptom)
        for sequence, detail in list(self._requests.suspects(suspects, cause)):
            self._fail(sequence, "failed", detail)
        if self._world.state is WorldState.FAILED:
            self._fail_all("failed", self._world.explain())
        elif self._world.state is WorldState.READY:
            self._begin_epoch(now_s)
        self._report_to_gateways(now_s)

    # --- time --------------------------------------------------------------------------------

    def _check_deadlines(self, now_s: float) -> None:
        in_flight = self._pipeline.in_flight
        stalled_s = self._stall_detector.stalled_for_s(now_s)
        if stalled_s:
            seconds = round(stalled_s, 1)
            self._actions.append(WriteLog("warning", "scheduler_stalled", {"seconds": seconds}))
            in_flight.extend_deadlines(stalled_s, now_s)
            self._world.extend_deadlines(stalled_s, now_s)
        if late := in_flight.newly_late_step(now_s):
            self._counters["steps_late_total"] += 1
            self._actions.append(WriteLog("warning", "step_late", late))
        if overdue := in_flight.overdue_reason(now_s) or self._world.overdue_reason(now_s):
            self._end_epoch("late", overdue, now_s, is_symptom=True)
        for sequence, cause, detail in self._requests.expired(now_s):
            self._fail(sequence, cause, detail)
        self._reports.end_late_grammars(now_s)
        self._queries.traces.answer_late(now_s)
        if now_s - self._status_at_s >= _STATUS_EVERY_S:
            self._report_to_gateways(now_s)
        self._stop_if_drained(now_s)

    # --- ends --------------------------------------------------------------------------------

    def _set_operator_drain(self, operator: PeerId, now_s: float, *, is_on: bool) -> None:
        self._drain.set_operator_drain(is_on=is_on)
        fields = {"is_on": is_on, "by": operator.decode(errors="replace")}
        self._actions.append(WriteLog("info", "drain_ordered", fields))
        self._report_to_gateways(now_s)
        if operator not in self._gateways:
            self._actions.append(SendToGateway(operator, self._report(now_s)))

    def _stop_if_drained(self, now_s: float) -> None:
        unfinished = len(self._requests)
        is_writing = self._batch.cache.spiller.is_busy or len(self._pipeline.in_flight) > 0
        if not self._drain.may_stop(now_s, open_requests=unfinished, is_writing=is_writing):
            return
        self._fail_all("stopping", "The server has stopped before this request finished.")
        exit_code = limits.EXIT_OK if not unfinished else limits.EXIT_UNAVAILABLE
        self._stop("The scheduler stops.", exit_code, now_s)

    def _stop_for_hand_over(self, now_s: float) -> None:
        """Stop without ending requests, which gateways submit again with their tokens so far."""
        self._actions.append(WriteLog("info", "handed_over", {"requests": len(self._requests)}))
        self._stop("The scheduler hands over to another scheduler.", limits.EXIT_OK, now_s)

    def _stop(self, cause: str, exit_code: int, now_s: float) -> None:
        self._pipeline.discard_in_flight()
        self._batch.requeue_running()
        self._world.dismiss_ranks(cause, now_s)
        # The last report names dismissed ranks, which the next scheduler will not know.
        self._report_to_gateways(now_s)
        self._actions.append(Stop(exit_code))
        self._has_stopped = True

    def _fail_all(self, cause: FailureCause, detail: str) -> None:
        for sequence in self._requests:
            self._fail(sequence, cause, detail)

    def _fail(self, sequence: Sequence, cause: FailureCause, detail: str) -> None:
        self._batch.remove(sequence)
        self._requests.fail(sequence, cause, detail)

    # --- reports -----------------------------------------------------------------------------

    def _tokens_limit(self) -> int:
        model, rows = self._world.model, self._batch.rows
        return min(model.context_tokens_max, rows.longest_sequence_tokens())

    def _report_to_gateways(self, now_s: float) -> None:
        self._status_at_s = now_s
        if self._gateways:
            report = self._report(now_s)
            self._actions.extend(SendToGateway(gateway, report) for gateway in self._gateways)

    def _report(self, now_s: float) -> StatusReported:
        tokens_limit = self._tokens_limit() if self._world.was_ready else 0
        return self._status.report(tokens_limit, now_s)

    def _log_refused_message(self, peer: PeerId, message: ToScheduler) -> None:
        fields = {"peer": peer.decode(errors="replace"), "message": type(message).__name__}
        self._actions.append(WriteLog("warning", "message_refused", fields))
