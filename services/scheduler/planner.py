"""The running batch: decodes, growth, preemption, and putting a step's plan together."""

from services.scheduler.cache.block_format import BlockFormat
from services.scheduler.cache.manager import BlockCache
from services.scheduler.prefill import Prefill
from services.scheduler.rows import RowBudget, Rows
from services.scheduler.running import RunningSequences
from services.scheduler.sequence import Sequence
from services.scheduler.step import PlannedStep, StepDraft
from services.scheduler.timing import StepTiming
from services.scheduler.waiting import WaitingQueue
from shared.errors import InvariantBroken
from shared.identifiers import Epoch, StepId
from shared.messages import StepPlan
from shared.settings import Config

_SPARSE_ROWS_MIN = 8
"""Below so many rows, holes cost less than moving a row."""


class Batch:
    """The running sequences and their rows."""

    def __init__(self, config: Config, waiting: WaitingQueue) -> None:
        scheduler = config.scheduler
        self.rows = Rows(scheduler.running_sequences_max, scheduler.row_tokens_step)
        self.cache = BlockCache(config.cache, self.rows)
        self.timing = StepTiming(scheduler.decode_stall_ms)
        self.preemptions = 0
        self._decode_stall_ms = scheduler.decode_stall_ms
        self._waiting = waiting
        self._running = RunningSequences(self.rows)
        self._prefill = Prefill(scheduler, self.rows, self._running, waiting, self.cache)

    def __len__(self) -> int:
        """Return how many sequences run."""
        return len(self._running)

    @property
    def running(self) -> list[Sequence]:
        """The running sequences, the longest-running first."""
        return list(self._running)

    @property
    def tokens_used(self) -> int:
        """Tokens in the rows of running sequences once all plans sent are computed."""
        return sum(sequence.planned for sequence in self._running)

    def start(self, budget: RowBudget, form: BlockFormat | None, epoch: Epoch) -> bool:
        """Begin an epoch with nothing running; True when blocks known before are of no more use."""
        if self._running:
            raise InvariantBroken("sequences run across epochs")
        self._running.clear()
        self.rows.start(budget)
        self.timing = StepTiming(self._decode_stall_ms)
        return self.cache.start_epoch(form, epoch)

    def requeue_all(self) -> None:
        """Put every running sequence back into the queue: its epoch has ended."""
        for sequence in self.running:
            self._requeue(sequence)
        self._running.clear()
        self.cache.end_epoch()

    def remove(self, sequence: Sequence) -> None:
        """Take an ended sequence off the batch; the next plan tells the ranks."""
        self._running.leave(sequence)
        self.cache.leave(sequence.blocks)

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended before it ran."""
        self.cache.forget(sequence.blocks)

    def look_ahead(self, now_s: float) -> None:
        """Look up who is next, while no plan can be sent."""
        self.cache.give_up_late(now_s)
        self._prefill.look_ahead(self.timing, now_s, may_evict=False)

    def next_step(self, epoch: Epoch, step_id: StepId, now_s: float) -> PlannedStep | None:
        """Plan one step, or return None when there is nothing to do."""
        draft = StepDraft(now_s)
        self.cache.begin_plan(now_s)
        self._keep_blocks()
        self._plan_decodes(draft)
        self._prefill.plan(draft, self.timing)
        self._keep_what_left()
        self._prefill.look_ahead(self.timing, now_s, may_evict=True)
        dropped = self._running.take_dropped()
        orders = self.cache.finish_plan(now_s)
        if not (draft.decodes or draft.chunks or draft.admitted or dropped or orders):
            return None
        draft.decodes.sort(key=_slot_of)
        position = draft.chunk_position
        plan = StepPlan(
            epoch=epoch,
            step_id=step_id,
            deadline_s=self.timing.deadline_s(draft.chunk_tokens, len(draft.decodes), position),
            keep_blocks=orders.keep_blocks,
            keep_checkpoints=orders.keep_checkpoints,
            adopted=orders.adopted,
            spill=orders.spill,
            dropped=dropped,
            evict_blocks=list(orders.evicted),
            moves=draft.moves,
            row_count=self.rows.row_count,
            row_tokens=self.rows.row_tokens,
            admitted=draft.admitted,
            prefill_chunks=draft.chunks,
            decodes=[sequence.sequence_id for sequence in draft.decodes],
            checkpoints=draft.checkpoints,
        )
        return PlannedStep(
            plan,
            draft.samples + draft.decodes,
            draft.admitted_first,
            draft.chunk_tokens,
            position,
            len(draft.decodes),
        )

    def check_invariants(self) -> None:
        """Raise InvariantBroken when slots, rows, sequences and blocks do not agree."""
        self._running.check_invariants()
        self.cache.check_invariants(
            [sequence.blocks for sequence in self._running],
            [sequence.blocks for sequence in self._waiting],
        )

    # --- blocks ------------------------------------------------------------------------------

    def _keep_blocks(self) -> None:
        """Keep what plans already sent have completed of those who run."""
        due = [one for one in self._running if one.planned >= one.blocks.border]
        due = [one for one in due if one.computed >= one.blocks.border]
        if (due or self._running.has_left) and self.cache.is_squeezed:
            self.rows.trim(slots=self.rows.rows_needed(), tokens=self._running.tokens_needed())
        for sequence in due:
            self.cache.keep(sequence.blocks, sequence.computed)

    def _keep_what_left(self) -> None:
        # After admissions: what these reuse is worth more than what somebody may reuse later.
        for sequence, computed in self._running.take_left():
            self.cache.keep(sequence.blocks, computed, ends=True)

    # --- decodes -----------------------------------------------------------------------------

    def _plan_decodes(self, draft: StepDraft) -> None:
        self._make_room_for_decodes(draft)
        if self.rows.rows_needed() >= _SPARSE_ROWS_MIN and (
            2 * self.rows.used <= self.rows.rows_needed()
        ):
            self._running.compact(draft)
        draft.decodes = [sequence for sequence in self._running if sequence.may_decode]
        for sequence in draft.decodes:
            sequence.planned += 1
            sequence.samples_in_flight += 1
        form = self.cache.form
        if form is not None and form.needs_checkpoints:
            draft.checkpoints += [
                sequence.sequence_id
                for sequence in draft.decodes
                if self.cache.set_aside(sequence.blocks, sequence.planned, is_decode=True)
            ]

    def _make_room_for_decodes(self, draft: StepDraft) -> None:
        """Grow the rows by what decodes need; preempt the youngest until that is possible."""
        while True:
            tokens = self._running.tokens_needed()
            if self.rows.resize(slots=self.rows.rows_needed(), tokens=tokens):
                return
            if self.rows.rows_needed() > self.rows.used:
                self._running.compact(draft)
                continue
            self._preempt_youngest()
            draft.preempted = True

    def _preempt_youngest(self) -> None:
        victim = min(
            self._running,
            key=lambda sequence: (sequence.request.priority, -sequence.admitted_order),
            default=None,
        )
        if victim is None or len(self._running) == 1:
            raise InvariantBroken(f"a single sequence does not fit {self.rows.budget}")
        self._requeue(victim)
        self.preemptions += 1

    def _requeue(self, sequence: Sequence) -> None:
        self.remove(sequence)
        sequence.preempt()
        self._waiting.add(sequence)


def _slot_of(sequence: Sequence) -> int:
    if sequence.slot is None:
        raise InvariantBroken(f"sequence {sequence.sequence_id} has no slot")
    return sequence.slot
