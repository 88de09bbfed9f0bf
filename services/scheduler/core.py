"""The scheduler's core: everything it decides, without I/O, time or chance.

`handle(event, now_s)` takes one event and returns the actions to perform, in order. Nothing else
changes the state. The shell in `main` receives, stamps the time, and performs.
"""

from collections import defaultdict

from services.scheduler import status
from services.scheduler.cache.block_format import BlockFormat, block_format
from services.scheduler.drain import Drain
from services.scheduler.events import (
    Action,
    DrainOrdered,
    Event,
    GatewayConnected,
    GatewayLost,
    GatewayTold,
    KeepEvidence,
    RankConnected,
    RankLost,
    RankTold,
    Say,
    SendToGateway,
    SendToRanks,
    Stop,
    TimePassed,
)
from services.scheduler.flights import Flight, Flights, disagreement
from services.scheduler.planner import Batch
from services.scheduler.requests import RETRY_AFTER_S, Bounds, RequestTable
from services.scheduler.results import evidence, take_tokens, tokens_message
from services.scheduler.sequence import Sequence, State
from services.scheduler.waiting import WaitingQueue
from services.scheduler.world import World, WorldState
from shared import limits
from shared.errors import ConfigError
from shared.identifiers import PeerId
from shared.messages import (
    AbortRequest,
    BlocksRestored,
    BlocksSpilled,
    Heartbeat,
    QueryStatus,
    RankFailed,
    RankHello,
    RankLoading,
    RankReady,
    StatusReported,
    StepFinished,
    SubmitRequest,
    TokenLogprobs,
    ToScheduler,
)
from shared.settings import Config

_STATUS_EVERY_S = 1.0


class SchedulerCore:
    """The state of the scheduler."""

    def __init__(self, config: Config, jaccl_devices: str = "") -> None:
        """Begin with no gateways, no ranks and no requests."""
        self._config = config
        self._out: list[Action] = []
        self._waiting = WaitingQueue()
        self._requests = RequestTable(config.scheduler, self._waiting, self._out)
        self._batch = Batch(config, self._waiting)
        self._world = World(config, jaccl_devices, self._out)
        self._flights = Flights()
        self._rates = status.Rates()
        self._counters: defaultdict[str, float] = self._requests.counters
        self._gateways: set[PeerId] = set()
        self._status_at_s = 0.0
        self._drain = Drain(config.scheduler.drain_s)
        self._context_tokens_max = 0
        self._work_was_left = False
        """Requests were open when the last step ended."""

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Take in one event; return what to do, in order. The list is the caller's."""
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
                if self._world.lost(event.peer):
                    self._end_epoch(f"Rank {rank} is lost ({event.cause}).", now_s)
            case DrainOrdered():
                self._order_drain(now_s)
        self._send_plans(now_s)
        actions = list(self._out)
        self._out.clear()
        return actions

    def note_cpu(self, milliseconds: float) -> None:
        """Take in how long the shell took for an event, sending included."""
        self._counters["scheduler_cpu_ms_total"] += milliseconds

    def check_invariants(self) -> None:
        """Raise InvariantBroken when the state contradicts itself (I1, I7, I9)."""
        self._batch.check_invariants()
        for sequence in self._requests:
            running = sequence.state is State.RUNNING
            assert running or sequence.state is State.WAITING, sequence
            assert sequence.samples_in_flight >= 0, sequence
        waiting = sum(1 for sequence in self._requests if sequence.state is State.WAITING)
        assert waiting == len(self._waiting), (waiting, len(self._waiting))
        assert len(self._requests) == waiting + len(self._batch)
        assert len(self._flights) <= self._config.scheduler.plans_in_flight

    # --- gateways ----------------------------------------------------------------------------

    def _gateway_told(self, gateway: PeerId, message: ToScheduler, now_s: float) -> None:
        match message:
            case SubmitRequest():
                self._submit(gateway, message, now_s)
            case AbortRequest():
                sequence = self._requests.find(gateway, message)
                if sequence is not None:
                    self._take_off(sequence)
                    self._requests.finish(sequence, message.reason)
            case QueryStatus():
                self._out.append(SendToGateway(gateway, self._report(now_s)))
            case _:
                self._refuse(gateway, message)

    def _submit(self, gateway: PeerId, message: SubmitRequest, now_s: float) -> None:
        reject = self._requests.reject
        if self._drain.is_on:
            detail = "The server is stopping and takes no new requests."
            reject(gateway, message.request_id, "draining", detail, RETRY_AFTER_S)
        elif self._world.state is WorldState.FAILED or not self._world.was_ready:
            detail = self._world.explain()
            reject(gateway, message.request_id, "not_ready", detail, RETRY_AFTER_S)
        else:
            bounds = Bounds(self._tokens_limit(), self._world.vocab_size())
            self._requests.accept(gateway, message, now_s=now_s, bounds=bounds)

    def _gateway_lost(self, gateway: PeerId) -> None:
        self._gateways.discard(gateway)
        for sequence in self._requests.of_gateway(gateway):
            self._take_off(sequence)
            self._requests.finish(sequence, "abort")

    def _take_off(self, sequence: Sequence) -> None:
        """Take a sequence off batch or queue before it ends."""
        if sequence.state is State.RUNNING:
            self._batch.remove(sequence)
        else:
            self._waiting.remove(sequence)
            self._batch.forget(sequence)

    # --- ranks -------------------------------------------------------------------------------

    def _rank_told(self, peer: PeerId, message: ToScheduler, now_s: float) -> None:
        match message:
            case StepFinished():
                self._receipt(peer, message, now_s)
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
            case RankFailed():
                if self._world.failed(peer, message):
                    self._end_epoch(f"Rank {message.rank} failed: {message.detail}", now_s)
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
        budget = self._world.budget()
        try:
            form = block_format(self._config.cache, self._world.reports(), budget)
        except ConfigError as error:
            self._world.give_up(str(error))
            self._end_epoch(str(error), now_s)
            return
        if self._batch.start(budget, form, self._world.epoch):
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
                self._take_off(sequence)
                self._requests.fail(
                    sequence,
                    "failed",
                    f"After a restart only {limit} tokens fit, "
                    f"and this request has {len(sequence.tokens)} already.",
                )

    def _receipt(self, peer: PeerId, message: StepFinished, now_s: float) -> None:
        rank = self._world.rank_of(peer)
        if rank is None or message.epoch != self._world.epoch:
            self._counters["stale_receipts_total"] += 1
            return
        problem = self._flights.receive(rank, message)
        if problem is not None:
            self._end_epoch(problem, now_s)
            return
        self._world.note_memory(peer, message.memory_bytes)
        while (flight := self._flights.pop_finished(self._world.size, now_s)) is not None:
            difference = disagreement(flight)
            if difference is not None:
                self._counters["receipts_mismatched_total"] += 1
                self._out.append(KeepEvidence("receipts", evidence(flight, difference)))
                self._end_epoch(difference, now_s)
                return
            self._finish_step(flight, now_s)

    def _end_epoch(self, cause: str, now_s: float) -> None:
        """Every rank of this epoch goes; every unfinished sequence waits for the next one."""
        self._flights = Flights()
        for sequence in self._requests:
            sequence.forget_flights()
        self._batch.requeue_all()
        self._world.end(cause, now_s)
        if self._world.state is WorldState.FAILED:
            for sequence in self._requests:
                self._take_off(sequence)
                self._requests.fail(sequence, "failed", self._world.failure)
        self._tell_gateways(now_s)

    # --- steps -------------------------------------------------------------------------------

    def _send_plans(self, now_s: float) -> None:
        if self._world.state is not WorldState.READY:
            return
        while len(self._flights) < self._config.scheduler.plans_in_flight:
            step = self._batch.next_step(self._world.epoch, self._flights.next_step_id, now_s)
            if step is None:
                break
            self._flights.launch(step, now_s)
            self._out.append(SendToRanks(self._world.peers, step.plan, self._world.epoch))
            for sequence in step.admitted_first:
                self._requests.admitted(sequence)
        self._batch.look_ahead(now_s)
        for restore in self._batch.cache.take_restores():
            self._out.append(SendToRanks(self._world.peers, restore, self._world.epoch))

    def _finish_step(self, flight: Flight, now_s: float) -> None:
        """The receipts agree: tokens may leave."""
        step, receipt = flight.step, flight.receipts[0]
        self._count_step(flight, receipt)
        self._batch.timing.learn(
            step.chunk_tokens, step.decodes, receipt.busy_ms, step.chunk_position
        )
        columns: dict[PeerId, list[tuple[Sequence, int, list[int], list[TokenLogprobs]]]]
        columns = defaultdict(list)
        ended: list[tuple[Sequence, str]] = []
        for index, sequence in enumerate(step.samples):
            sequence.samples_in_flight -= 1
            if sequence.state is State.ENDED:
                # It ended while this step was in flight: the token is nobody's.
                self._counters["tokens_discarded_total"] += len(receipt.tokens[index])
                continue
            position = sequence.completion_tokens
            taken, reason = take_tokens(sequence, receipt.tokens[index])
            logprobs = receipt.logprobs[index][: len(taken)] if receipt.logprobs else []
            columns[sequence.gateway].append((sequence, position, taken, logprobs))
            self._counters["generation_tokens_total"] += len(taken)
            if reason is not None:
                ended.append((sequence, reason))
        for gateway, entries in columns.items():
            self._out.append(SendToGateway(gateway, tokens_message(entries)))
        for sequence, reason in ended:
            self._take_off(sequence)
            self._requests.finish(sequence, "stop" if reason == "stop" else "length")
            self._requests.learn_duration(now_s - sequence.admitted_at_s)
        self._work_was_left = len(self._requests) > 0
        self._rates.note(now_s, sum(len(entry[2]) for e in columns.values() for entry in e))

    def _count_step(self, flight: Flight, receipt: StepFinished) -> None:
        self._counters["steps_total"] += 1
        self._counters["step_busy_ms_total"] += receipt.busy_ms
        if self._work_was_left:
            # Without work a device rests as it should; only a rest in spite of work is a cost.
            self._counters["step_idle_ms_total"] += receipt.idle_ms
        self._counters["prefill_tokens_total"] += flight.step.chunk_tokens
        self._counters["decode_rows_total"] += flight.step.decodes

    # --- time --------------------------------------------------------------------------------

    def _look_at_clock(self, now_s: float) -> None:
        overdue = self._flights.overdue(now_s) or self._world.overdue(now_s)
        if overdue is not None:
            self._end_epoch(overdue, now_s)
        for sequence in self._requests:
            if now_s > sequence.deadline_at_s:
                self._take_off(sequence)
                waited_s = sequence.request.deadline_s
                detail = f"Not finished within {waited_s:.0f} s."
                self._requests.fail(sequence, "deadline", detail)
        if now_s - self._status_at_s >= _STATUS_EVERY_S:
            self._tell_gateways(now_s)
        self._finish_drain(now_s)

    def _order_drain(self, now_s: float) -> None:
        is_first = not self._drain.is_on
        self._drain.order(now_s)
        if is_first:
            self._tell_gateways(now_s)
        self._finish_drain(now_s)

    def _finish_drain(self, now_s: float) -> None:
        unfinished = len(self._requests)
        is_writing = self._batch.cache.is_writing or len(self._flights) > 0
        if not self._drain.is_over(now_s, open_requests=unfinished, is_writing=is_writing):
            return
        for sequence in self._requests:
            self._take_off(sequence)
            detail = "The server has stopped before this request finished."
            self._requests.fail(sequence, "stopping", detail)
        self._flights = Flights()
        self._world.end("The scheduler stops.", now_s)
        self._out.append(Stop(limits.EXIT_OK if not unfinished else limits.EXIT_UNAVAILABLE))

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
        return status.report(
            config=self._config,
            world=self._world,
            batch=self._batch,
            flights=self._flights,
            rates=self._rates,
            counters=self._counters,
            waiting=len(self._waiting),
            tokens_limit=self._tokens_limit() if self._world.was_ready else 0,
            draining=self._drain.is_on,
            now_s=now_s,
        )

    def _refuse(self, peer: PeerId, message: ToScheduler) -> None:
        fields = {"peer": peer.decode(errors="replace"), "message": type(message).__name__}
        self._out.append(Say("warning", "message_refused", fields))


def _namespace(form: BlockFormat | None) -> dict[str, object]:
    return {"namespace": form.namespace if form is not None else ""}
