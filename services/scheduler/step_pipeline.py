"""The steps of an epoch: plans out, receipts in, tokens out once all receipts agree (I6). Pure."""

from collections import defaultdict

from services.scheduler.batch.in_flight_steps import InFlightStep, InFlightSteps, disagreement
from services.scheduler.batch.running_batch import RunningBatch
from services.scheduler.batch.step_results import evidence, take_tokens, tokens_message
from services.scheduler.events import Action, KeepEvidence, SendToGateway, SendToRanks
from services.scheduler.requests.burst import Burst
from services.scheduler.requests.request_table import RequestTable
from services.scheduler.requests.sequence import Sequence, SequenceState
from services.scheduler.status_report import TokenRates
from services.scheduler.world.world import World, WorldState
from shared.identifiers import PeerId
from shared.messages import StepFinished, TokenLogprobs


class StepPipeline:
    """Keeps the ranks supplied with plans, and turns their receipts into tokens."""

    def __init__(
        self,
        plans_in_flight: int,
        batch: RunningBatch,
        world: World,
        requests: RequestTable,
        out: list[Action],
    ) -> None:
        self.flights = InFlightSteps()
        self.rates = TokenRates()
        self._plans_in_flight = plans_in_flight
        self._batch = batch
        self._world = world
        self._requests = requests
        self._counters = requests.counters
        self._out = out
        self._work_was_left = False
        """Requests were open when the last step ended."""
        self._has_served = False
        """Tokens have left in this epoch."""
        self.burst = Burst()
        self.waits_until_s: float | None = None
        """Until when no plan is sent for requests that are about to come; None: none waits."""

    @property
    def are_stuck(self) -> bool:
        """Tell whether there is work in this epoch, and none of it has given anybody a token."""
        return len(self._batch) > 0 and not self._has_served

    def forget(self) -> None:
        """Whatever is in flight is void: its epoch has ended."""
        self.flights = InFlightSteps()
        self._has_served = False
        for sequence in self._requests:
            sequence.forget_flights()

    def send_plans(self, now_s: float) -> None:
        """Plan as far ahead as may be; where nobody runs, when all of a burst have come."""
        self.waits_until_s = None
        if self._world.state is not WorldState.READY:
            return
        if not len(self._batch):
            self.waits_until_s = self.burst.waits_until_s(now_s)
        if self.waits_until_s is None:
            self.burst.over(now_s)
        while len(self.flights) < self._plans_in_flight and self.waits_until_s is None:
            step = self._batch.next_step(self._world.epoch, self.flights.next_step_id, now_s)
            if step is None:
                break
            self.flights.launch(step, now_s)
            self._out.append(SendToRanks(self._world.peers, step.plan, self._world.epoch))
            for sequence in step.admitted_first:
                self._requests.admitted(sequence)
        self._batch.look_ahead(now_s)
        for restore in self._batch.cache.take_restores():
            self._out.append(SendToRanks(self._world.peers, restore, self._world.epoch))

    def receive(self, peer: PeerId, receipt: StepFinished, now_s: float) -> str | None:
        """Take in a receipt; return why the epoch cannot go on, or None.

        One of another epoch, of a stranger, or that has come before changes nothing and is counted.
        """
        rank = self._world.rank_of(peer)
        if rank is None or receipt.epoch != self._world.epoch:
            self._counters["stale_receipts_total"] += 1
            return None
        if self.flights.has(rank, receipt):
            self._counters["repeated_receipts_total"] += 1
            return None
        problem = self.flights.receive(rank, receipt)
        if problem is not None:
            return problem
        self._world.note_memory(peer, receipt.memory_bytes)
        while (flight := self.flights.pop_finished(self._world.size, now_s)) is not None:
            difference = disagreement(flight, self._world.vocab_size())
            if difference is not None:
                self._counters["receipts_mismatched_total"] += 1
                self._out.append(KeepEvidence("receipts", evidence(flight, difference)))
                return difference
            self._finish(flight, now_s)
        return None

    def _finish(self, flight: InFlightStep, now_s: float) -> None:
        """The receipts agree: tokens may leave."""
        step, receipt = flight.step, flight.receipts[0]
        self._count(flight, receipt)
        # Without work a device rests as it should; only a rest in spite of work is a cost.
        self._batch.learn(step, receipt.busy_ms, receipt.idle_ms if self._work_was_left else 0.0)
        columns: dict[PeerId, list[tuple[Sequence, int, list[int], list[TokenLogprobs]]]]
        columns = defaultdict(list)
        ended: list[tuple[Sequence, str]] = []
        has_drafts = step.has_drafts
        generated = 0
        for index, sequence in enumerate(step.samples):
            sequence.samples_in_flight -= 1
            if sequence.state is SequenceState.ENDED:
                # It ended while this step was in flight: the token is nobody's.
                self._counters["tokens_discarded_total"] += len(receipt.tokens[index])
                continue
            position = sequence.completion_tokens
            sequence.epochs_lost = 0
            taken, reason = take_tokens(sequence, receipt.tokens[index])
            if has_drafts and (drafts := step.drafts_of(index)):
                self._batch.verified(sequence, drafts, len(receipt.tokens[index]), len(taken))
            logprobs = receipt.logprobs[index][: len(taken)] if receipt.logprobs else []
            columns[sequence.gateway].append((sequence, position, taken, logprobs))
            generated += len(taken)
            if reason is not None:
                ended.append((sequence, reason))
        self._counters["generation_tokens_total"] += generated
        if columns:
            self._has_served = True
            self._world.recovery.served()
        for gateway, entries in columns.items():
            self._out.append(SendToGateway(gateway, tokens_message(entries)))
        for sequence, reason in ended:
            self._batch.take_off(sequence)
            self._requests.finish(sequence, "stop" if reason == "stop" else "length")
            self.burst.ended(now_s)
            self._requests.learn_duration(now_s - sequence.admitted_at_s)
        self._work_was_left = len(self._requests) > 0
        self.rates.note(now_s, generated)

    def _count(self, flight: InFlightStep, receipt: StepFinished) -> None:
        self._counters["steps_total"] += 1
        self._counters["step_busy_ms_total"] += receipt.busy_ms
        if self._work_was_left:
            # Without work a device rests as it should; only a rest in spite of work is a cost.
            self._counters["step_idle_ms_total"] += receipt.idle_ms
        self._counters["prefill_tokens_total"] += flight.step.shape.chunk_tokens
        self._counters["decode_rows_total"] += flight.step.shape.decodes
