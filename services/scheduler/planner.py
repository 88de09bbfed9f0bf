"""Which sequences get which tokens in the next step: admission, chunks, decodes, preemption."""

import dataclasses

from services.scheduler.rows import RowBudget, Rows
from services.scheduler.sequence import Sequence, State
from services.scheduler.timing import StepTiming
from services.scheduler.waiting import WaitingQueue
from shared.config import SchedulerConfig
from shared.errors import InvariantBroken
from shared.identifiers import Epoch, SequenceId, Slot, StepId
from shared.messages import AdmittedSequence, PrefillChunk, SlotMove, StepPlan

_SPARSE_ROWS_MIN = 8
"""Below so many rows, holes cost less than moving a row."""

_SCRAP_PART = 8
"""An eighth of the step's budget is a scrap; so much longer may a step take than asked for."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedStep:
    """A plan and what the scheduler must remember until its receipts are back."""

    plan: StepPlan
    samples: list[Sequence]
    """Who samples a token, in the order of StepFinished.tokens: sampling chunks, then decodes."""
    chunk_tokens: int
    chunk_position: int
    """Where its chunks begin in their prompts, on average over their tokens."""
    decodes: int


@dataclasses.dataclass(slots=True)
class _Draft:
    """A plan in the making."""

    now_s: float
    moves: list[SlotMove] = dataclasses.field(default_factory=list)
    admitted: list[AdmittedSequence] = dataclasses.field(default_factory=list)
    chunks: list[PrefillChunk] = dataclasses.field(default_factory=list)
    decodes: list[Sequence] = dataclasses.field(default_factory=list)
    samples: list[Sequence] = dataclasses.field(default_factory=list)
    chunk_tokens: int = 0
    preempted: bool = False


class Batch:
    """The running sequences and their rows."""

    def __init__(self, config: SchedulerConfig, waiting: WaitingQueue) -> None:
        self.rows = Rows(config.running_sequences_max, config.row_tokens_step)
        self.timing = StepTiming(config.decode_stall_ms)
        self.preemptions = 0
        self._config = config
        self._waiting = waiting
        self._running: dict[SequenceId, Sequence] = {}
        self._dropped: list[int] = []
        self._admissions = 0

    def __len__(self) -> int:
        """Return how many sequences run."""
        return len(self._running)

    @property
    def running(self) -> list[Sequence]:
        """The running sequences, the longest-running first."""
        return list(self._running.values())

    @property
    def tokens_used(self) -> int:
        """Tokens in the rows of running sequences once all plans sent are computed."""
        return sum(sequence.planned for sequence in self._running.values())

    def start(self, budget: RowBudget) -> None:
        """Begin an epoch with nothing running."""
        if self._running:
            raise InvariantBroken("sequences run across epochs")
        self._dropped.clear()
        self.rows.start(budget)
        self.timing = StepTiming(self._config.decode_stall_ms)

    def requeue_all(self) -> None:
        """Put every running sequence back into the queue: its epoch has ended."""
        for sequence in self.running:
            self._leave(sequence)
            sequence.preempt()
            self._waiting.add(sequence)
        self._dropped.clear()

    def remove(self, sequence: Sequence) -> None:
        """Take an ended sequence off the batch; the next plan tells the ranks."""
        self._leave(sequence)

    def next_step(self, epoch: Epoch, step_id: StepId, now_s: float) -> PlannedStep | None:
        """Plan one step, or return None when there is nothing to do."""
        draft = _Draft(now_s)
        self._plan_decodes(draft)
        self._plan_prefill(draft)
        if not (draft.decodes or draft.chunks or self._dropped):
            return None
        draft.decodes.sort(key=_slot_of)
        plan = StepPlan(
            epoch=epoch,
            step_id=step_id,
            deadline_s=self.timing.deadline_s(
                draft.chunk_tokens, len(draft.decodes), _mean_position(draft.chunks)
            ),
            dropped=self._dropped,
            moves=draft.moves,
            row_count=self.rows.row_count,
            row_tokens=self.rows.row_tokens,
            admitted=draft.admitted,
            prefill_chunks=draft.chunks,
            decodes=[sequence.sequence_id for sequence in draft.decodes],
        )
        self._dropped = []
        return PlannedStep(
            plan,
            draft.samples + draft.decodes,
            draft.chunk_tokens,
            _mean_position(draft.chunks),
            len(draft.decodes),
        )

    def check_invariants(self) -> None:
        """Raise InvariantBroken when slots, rows and sequences do not agree."""
        held: dict[Slot, SequenceId] = {}
        for sequence in self._running.values():
            if sequence.slot is None or sequence.state is not State.RUNNING:
                raise InvariantBroken(f"sequence {sequence.sequence_id} runs without a slot")
            if sequence.planned > self.rows.row_tokens:
                raise InvariantBroken(f"sequence {sequence.sequence_id} outgrew its row")
            held[sequence.slot] = sequence.sequence_id
        self.rows.check_invariants(held)

    # --- decodes -----------------------------------------------------------------------------

    def _plan_decodes(self, draft: _Draft) -> None:
        self._make_room_for_decodes(draft)
        if self.rows.rows_needed() >= _SPARSE_ROWS_MIN and (
            2 * self.rows.used <= self.rows.rows_needed()
        ):
            self._compact(draft)
        draft.decodes = [sequence for sequence in self._running.values() if sequence.may_decode]
        for sequence in draft.decodes:
            sequence.planned += 1
            sequence.samples_in_flight += 1

    def _make_room_for_decodes(self, draft: _Draft) -> None:
        """Grow the rows by what decodes need; preempt the youngest until that is possible."""
        while True:
            tokens = max(map(_tokens_needed, self._running.values()), default=0)
            if self.rows.resize(slots=self.rows.rows_needed(), tokens=tokens):
                return
            if self.rows.rows_needed() > self.rows.used:
                self._compact(draft)
                continue
            self._preempt_youngest()
            draft.preempted = True

    def _preempt_youngest(self) -> None:
        victim = min(
            self._running.values(),
            key=lambda sequence: (sequence.request.priority, -sequence.admitted_order),
            default=None,
        )
        if victim is None or len(self._running) == 1:
            raise InvariantBroken(f"a single sequence does not fit {self.rows.budget}")
        self._leave(victim)
        victim.preempt()
        self._waiting.add(victim)
        self.preemptions += 1

    def _compact(self, draft: _Draft) -> None:
        if draft.admitted:
            raise InvariantBroken("rows move before anybody is admitted")
        for move in self.rows.compact():
            self._running[SequenceId(move.sequence_id)].slot = Slot(move.slot)
            draft.moves.append(move)

    # --- prefill -----------------------------------------------------------------------------

    def _plan_prefill(self, draft: _Draft) -> None:
        whole = min(
            self._config.step_tokens_max,
            self.timing.chunk_tokens(
                decoding=bool(draft.decodes), position=self._prefill_position()
            ),
        )
        # A forward has a fixed cost, so no chunk shorter than this is cut off a prompt: a rest of
        # that size is taken along, and a start of that size waits for the next step.
        scrap = whole // _SCRAP_PART
        budget = whole
        for sequence in self._running.values():
            if not sequence.is_decoding:
                if _would_be_scrap(sequence, budget, scrap):
                    return
                budget -= self._plan_chunk(draft, sequence, budget, scrap)
        while not draft.preempted:
            waiting = self._waiting.first()
            if waiting is None or _would_be_scrap(waiting, budget, scrap):
                return
            admitted = self._admit(draft)
            if admitted is None:
                return
            budget -= self._plan_chunk(draft, admitted, budget, scrap)

    def _prefill_position(self) -> int:
        """Return where the next prefill goes on: in the first undone prompt, or in a new one."""
        undone = (s.planned for s in self._running.values() if not s.is_decoding)
        return next(undone, 0)

    def _plan_chunk(self, draft: _Draft, sequence: Sequence, budget: int, scrap: int) -> int:
        length = len(sequence.tokens) - sequence.planned
        if length > budget + scrap:
            length = budget
        samples = sequence.planned + length == len(sequence.tokens)
        draft.chunks.append(
            PrefillChunk(
                sequence_id=sequence.sequence_id,
                start=sequence.planned,
                length=length,
                samples=samples,
            )
        )
        sequence.planned += length
        draft.chunk_tokens += length
        if samples:
            sequence.is_decoding = True
            sequence.samples_in_flight += 1
            draft.samples.append(sequence)
        return length

    def _admit(self, draft: _Draft) -> Sequence | None:
        """Admit who is next, or return None when it must wait."""
        sequence = self._waiting.first()
        if sequence is None or not self.rows.has_free_slot or sequence.samples_in_flight:
            return None
        if not self._make_room_for(sequence, draft):
            return None
        self._waiting.remove(sequence)
        sequence.slot = self.rows.take(sequence.sequence_id)
        sequence.state = State.RUNNING
        sequence.admitted_at_s = draft.now_s
        sequence.admitted_order = self._admissions
        self._admissions += 1
        self._running[sequence.sequence_id] = sequence
        draft.admitted.append(
            AdmittedSequence(
                sequence_id=sequence.sequence_id,
                slot=sequence.slot,
                tokens=list(sequence.tokens),
                prompt_tokens=sequence.prompt_tokens,
                sampling=sequence.request.sampling,
            )
        )
        return sequence

    def _make_room_for(self, sequence: Sequence, draft: _Draft) -> bool:
        # Room for a first stretch of completion, so that a row does not grow right after it was
        # filled.
        ahead = min(sequence.tokens_max, len(sequence.tokens) + self._config.row_tokens_step)
        tokens = max([ahead, *map(_tokens_needed, self._running.values())])
        slots = max(self.rows.rows_needed(), self.rows.lowest_free() + 1)
        if self.rows.resize(slots=slots, tokens=tokens):
            return True
        if not draft.admitted and self.rows.rows_needed() > self.rows.used:
            self._compact(draft)
            slots = self.rows.used + 1
            return self.rows.resize(slots=slots, tokens=tokens)
        return False

    def _leave(self, sequence: Sequence) -> None:
        if sequence.slot is None:
            raise InvariantBroken(f"sequence {sequence.sequence_id} leaves without a slot")
        self.rows.give_back(sequence.slot, sequence.sequence_id)
        del self._running[sequence.sequence_id]
        self._dropped.append(sequence.sequence_id)
        sequence.slot = None


def _mean_position(chunks: list[PrefillChunk]) -> int:
    tokens = sum(chunk.length for chunk in chunks)
    return sum(chunk.start * chunk.length for chunk in chunks) // tokens if tokens else 0


def _would_be_scrap(sequence: Sequence, budget: int, scrap: int) -> bool:
    """Tell whether what is left of the budget would cut off a prompt less than a scrap."""
    return budget <= scrap and len(sequence.tokens) - sequence.planned > budget + scrap


def _slot_of(sequence: Sequence) -> int:
    if sequence.slot is None:
        raise InvariantBroken(f"sequence {sequence.sequence_id} has no slot")
    return sequence.slot


def _tokens_needed(sequence: Sequence) -> int:
    """Return how long a row the sequence needs in the next step, its whole known text included."""
    return max(sequence.planned + (1 if sequence.may_decode else 0), len(sequence.tokens))
