"""Step pipeline of an epoch. Owns sending plans, collecting receipts and emitting tokens. Pure.

A step's tokens leave only when the receipts of all ranks agree (invariant I6).
"""

from services.scheduler.batch.in_flight_steps import InFlightStep, InFlightSteps, find_disagreement
from services.scheduler.batch.plan_builder import PlannedStep
from services.scheduler.batch.running_batch import RunningBatch
from services.scheduler.events import Action, SaveEvidence, SendToGateway, SendToRanks
from services.scheduler.requests.burst import Burst
from services.scheduler.requests.request_table import RequestTable
from services.scheduler.requests.sequence import Sequence, SequenceState
from services.scheduler.telemetry.telemetry import Telemetry
from services.scheduler.telemetry.token_rates import TokenRates
from services.scheduler.world.world import World, WorldState
from shared.identifiers import PeerId, Slot
from shared.messages import StepFinished, TokensGenerated
from shared.messages.gateway_link import FinishReason


class StepPipeline:
    """Sends plans to the ranks, and the tokens of receipts that agree to the gateways."""

    def __init__(
        self,
        plans_in_flight: int,
        batch: RunningBatch,
        world: World,
        requests: RequestTable,
        telemetry: Telemetry,
        actions: list[Action],
    ) -> None:
        self.in_flight = InFlightSteps()
        self.rates = TokenRates()
        self._plans_in_flight = plans_in_flight
        self._batch = batch
        self._world = world
        self._requests = requests
        self._telemetry = telemetry
        self._turns = requests.turns
        self._counters = requests.counters
        self._actions = actions
        self._had_open_requests = False
        """Requests were open when the last step finished."""
        self._has_produced_tokens = False
        """A step of this epoch has produced tokens."""
        self.burst = Burst()
        self.wake_at_s: float | None = None
        """When the wait for the rest of a burst ends; None: no plan waits."""

    @property
    def is_stuck(self) -> bool:
        """Tell whether this epoch has running sequences but has produced no token yet."""
        return len(self._batch) > 0 and not self._has_produced_tokens

    def discard_in_flight(self) -> None:
        """Forget all plans in flight: their epoch has ended, so their receipts no longer count."""
        self.in_flight = InFlightSteps()
        self._has_produced_tokens = False
        for sequence in self._requests:
            sequence.forget_in_flight()

    def send_plans(self, now_s: float) -> None:
        """Send plans up to the limit of plans in flight; an idle batch first waits for a burst.

        A burst is several requests that arrive at nearly the same time, to run in one batch.

        Args:
            now_s: the monotonic time in seconds. If it waits, `wake_at_s` is when to call this
                again.
        """
        self.wake_at_s = None
        if self._world.state is not WorldState.READY:
            return
        if not len(self._batch):
            self.wake_at_s = self.burst.wait_until_s(now_s)
        if self.wake_at_s is None:
            self.burst.finish_wait(now_s)
        while len(self.in_flight) < self._plans_in_flight and self.wake_at_s is None:
            step = self._batch.next_step(self._world.epoch, self.in_flight.next_step_id, now_s)
            if step is None:
                break
            step = self._telemetry.begin_step(step, now_s)
            self.in_flight.add(step, now_s)
            self._actions.append(SendToRanks(self._world.peers, step.plan, self._world.epoch))
            for sequence in step.first_admitted:
                place = step.plan.epoch, step.plan.step_id
                self._requests.report_admitted(sequence, place, now_s)
                self._telemetry.durations.observe("queue", now_s - sequence.accepted_at_s)
        self._batch.look_ahead(now_s)
        for restore in self._batch.cache.restorer.take_outbox():
            self._actions.append(SendToRanks(self._world.peers, restore, self._world.epoch))

    def receive(self, peer: PeerId, receipt: StepFinished, now_s: float) -> str | None:
        """Add one rank's receipt to its step; emit the tokens of steps whose receipts all agree.

        A repeated receipt, and one of another epoch or of an unknown peer, is only counted.

        Args:
            peer: the rank process that sent it.
            receipt: the receipt.
            now_s: when it arrived, in seconds; the deadline of the next step counts from then.

        Returns:
            Why the epoch must end, one sentence, or None.
        """
        member = self._world.find(peer)
        rank = member.rank if member is not None else None
        if member is None or rank is None or receipt.epoch != self._world.epoch:
            self._counters["stale_receipts_total"] += 1
            return None
        if self.in_flight.has_receipt(rank, receipt):
            self._counters["repeated_receipts_total"] += 1
            return None
        problem = self.in_flight.add_receipt(rank, receipt)
        if problem is not None:
            return problem
        member.memory_bytes = receipt.memory_bytes
        has_requests = self._had_open_requests
        self._telemetry.add_receipt(rank, receipt, now_s, has_requests=has_requests)
        while (step := self.in_flight.pop_finished(self._world.size, now_s)) is not None:
            disagreement = find_disagreement(step, self._world.model.vocab_size)
            if disagreement is not None:
                self._counters["receipts_mismatched_total"] += 1
                evidence = _evidence(step, disagreement)
                self._actions.append(SaveEvidence(evidence))
                return disagreement
            self._finish(step, now_s)
        return None

    def _finish(self, step: InFlightStep, now_s: float) -> None:
        """Emit the tokens of a step whose receipts agree."""
        planned, receipt = step.planned, step.receipts[0]
        self._count(step, receipt)
        self._telemetry.finish_step(planned, receipt, now_s)
        # Idle time of the device is a cost only while requests are open.
        idle_ms = receipt.idle_ms if self._had_open_requests else 0.0
        self._batch.record_step(planned, receipt.busy_ms, idle_ms)
        messages, ended = self._take(planned, receipt, now_s)
        generated = 0
        for gateway, message in messages.items():
            generated += sum(map(len, message.tokens))
            self._actions.append(SendToGateway(gateway, message))
        self._counters["generation_tokens_total"] += generated
        if messages:
            self._has_produced_tokens = True
            self._world.recovery.note_progress()
        for sequence, reason in ended:
            self._batch.remove(sequence)
            self._requests.finish(sequence, reason)
            self.burst.record_end(now_s)
            self._requests.record_duration(now_s - sequence.admitted_at_s)
            self._telemetry.durations.observe("decode", now_s - sequence.first_token_at_s)
        self._had_open_requests = len(self._requests) > 0
        self.rates.record(now_s, generated)

    def _take(
        self, planned: PlannedStep, receipt: StepFinished, now_s: float
    ) -> tuple[dict[PeerId, TokensGenerated], list[tuple[Sequence, FinishReason]]]:
        """Append a step's tokens to its sequences.

        A sequence that has ended meanwhile gets none, nor does one whose grammar they do not match.

        Returns:
            The message with the new tokens for each gateway, and the sequences that end with them,
            each with the reason.
        """
        failures = {one.sequence_id: one.detail for one in receipt.grammar_failures}
        has_drafts, is_shared = planned.has_drafts, len(self._turns) > 1
        sampled, logprobs = receipt.tokens, receipt.logprobs
        has_ended = SequenceState.ENDED  # Python finds a member of an enumeration in 0.2 us.
        messages: dict[PeerId, TokensGenerated] = {}
        ended: list[tuple[Sequence, FinishReason]] = []
        for index, sequence in enumerate(planned.samples):
            tokens = sampled[index]
            sequence.samples_in_flight -= 1
            if sequence.state is has_ended:
                # The request ended while this step was in flight, so its tokens are dropped.
                self._counters["tokens_discarded_total"] += len(tokens)
                continue
            if failures and sequence.sequence_id in failures:
                # Its tokens of this step do not match its grammar.
                self._counters["tokens_discarded_total"] += len(tokens)
                self._batch.remove(sequence)
                self._requests.fail(sequence, "grammar", failures[sequence.sequence_id])
                continue
            if (message := messages.get(sequence.gateway)) is None:
                message = messages[sequence.gateway] = empty_tokens_message(receipt)
            message.request_ids.append(sequence.request.request_id)
            known = len(sequence.tokens)
            message.positions.append(known - sequence.prompt_tokens)
            taken = tokens
            if (reason := take_tokens(sequence, tokens)) is not None:
                taken = tokens[: len(sequence.tokens) - known]
                ended.append((sequence, reason))
            message.tokens.append(taken)
            sequence.epochs_without_token = 0
            if has_drafts and (drafts := planned.drafts_of(index)):
                emitted = len(tokens)
                self._batch.speculation.record_verification(sequence, drafts, emitted, len(taken))
            if logprobs:
                message.logprobs.append(logprobs[index][: len(taken)])
            if is_shared:
                self._turns.charge(sequence.tenant, len(taken))
            if not sequence.first_token_at_s:
                sequence.first_token_at_s = now_s
                self._telemetry.durations.observe("prefill", now_s - sequence.admitted_at_s)
        for message in messages.values():
            if not any(message.logprobs):
                message.logprobs.clear()
        return messages, ended

    def _count(self, step: InFlightStep, receipt: StepFinished) -> None:
        self._counters["steps_total"] += 1
        self._counters["step_busy_ms_total"] += receipt.busy_ms
        if self._had_open_requests:
            self._counters["step_idle_ms_total"] += receipt.idle_ms
        self._counters["prefill_tokens_total"] += step.planned.work.chunk_tokens
        self._counters["decode_rows_total"] += step.planned.work.decodes


def take_tokens(sequence: Sequence, tokens: list[int]) -> FinishReason | None:
    """Append sampled tokens to a sequence up to its end: a stop token, or its longest length.

    Returns:
        Why the last appended token ends the completion; None: it goes on, with all these tokens.
    """
    own = sequence.tokens
    for token in tokens:
        own.append(token)
        if token in sequence.stop_ids:
            return "stop"
        if len(own) >= sequence.tokens_max:
            return "length"
    return None


def empty_tokens_message(receipt: StepFinished) -> TokensGenerated:
    """Return a message for one gateway to which the tokens of a step are added."""
    return TokensGenerated(
        request_ids=[], positions=[], tokens=[], epoch=receipt.epoch, step_id=receipt.step_id
    )


def _evidence(step: InFlightStep, disagreement: str) -> dict[str, object]:
    """Return a step's plan, receipts and slots, to be saved for an investigation."""
    return {
        "difference": disagreement,
        "plan": step.planned.plan,
        "receipts": {str(rank): receipt for rank, receipt in step.receipts.items()},
        "slots": {
            str(one.sequence_id): Slot(one.slot) if one.slot is not None else None
            for one in step.planned.samples
        },
    }
