"""The running batch: decodes, growth, preemption, and putting a step's plan together."""

from services.scheduler.batch.plan_builder import PlanBuilder, PlannedStep, StepShape
from services.scheduler.batch.prefill_planner import PrefillPlanner
from services.scheduler.batch.running_sequences import RunningSequences
from services.scheduler.batch.speculation_planner import NO_DRAFTS, ChosenDrafts, SpeculationPlanner
from services.scheduler.batch.step_deadlines import StepDeadlines
from services.scheduler.batch.step_timing import StepTiming
from services.scheduler.cache.block_orders import PlannedBlockOrders
from services.scheduler.cache.index.block_format import BlockFormat
from services.scheduler.cache.kv_rows import RowBudget, Rows
from services.scheduler.cache.manager import BlockCache
from services.scheduler.requests.sequence import Sequence, SequenceState
from services.scheduler.requests.waiting_queue import WaitingQueue
from services.scheduler.speculation.speculator import PlannedDrafts
from shared.configuration.settings import Config
from shared.errors import InvariantBroken
from shared.identifiers import Epoch, StepId
from shared.messages import StepPlan

_SPARSE_ROWS_MIN = 8
"""Below so many rows, holes cost less than moving a row."""


class RunningBatch:
    """The running sequences and their rows."""

    def __init__(self, config: Config, waiting: WaitingQueue) -> None:
        scheduler = config.scheduler
        self.rows = Rows(scheduler.running_sequences_max, scheduler.kv_row_growth_tokens)
        self.cache = BlockCache(config.cache, self.rows)
        self.timing = StepTiming(scheduler.decode_stall_ms)
        self._deadlines = StepDeadlines(self.timing)
        self.preemptions = 0
        self._decode_stall_ms = scheduler.decode_stall_ms
        self._waiting = waiting
        self._running = RunningSequences(self.rows)
        self._verification = SpeculationPlanner(config)
        self._prefill = PrefillPlanner(scheduler, self.rows, self._running, waiting, self.cache)

    def __len__(self) -> int:
        """Return how many sequences run."""
        return len(self._running)

    @property
    def running(self) -> list[Sequence]:
        """The running sequences, the longest-running first."""
        return list(self._running)

    @property
    def can_roll_back(self) -> bool:
        """Tell whether rows of the present or the last epoch can be cut back."""
        return self._verification.can_roll_back

    @property
    def tokens_used(self) -> int:
        """Tokens in the rows of running sequences once all plans sent are computed."""
        return sum(sequence.planned for sequence in self._running)

    def start(
        self, budget: RowBudget, form: BlockFormat | None, epoch: Epoch, *, can_roll_back: bool
    ) -> bool:
        """Begin an epoch with nothing running; True when blocks known before are of no more use."""
        if self._running:
            raise InvariantBroken("sequences run across epochs")
        self._running.clear()
        self.rows.start(budget)
        self.timing = StepTiming(self._decode_stall_ms)
        self._deadlines = StepDeadlines(self.timing)
        self._verification.begin_epoch(can_roll_back=can_roll_back)
        return self.cache.start_epoch(form, epoch)

    def requeue_all(self) -> None:
        """Put every running sequence back into the queue: its epoch has ended."""
        for sequence in self.running:
            self._requeue(sequence)
        self._running.clear()
        self.cache.end_epoch()

    def take_off(self, sequence: Sequence) -> None:
        """Take a sequence that ends off batch or queue; the next plan tells the ranks."""
        if sequence.state is SequenceState.RUNNING:
            self._remove(sequence)
        else:
            self._waiting.remove(sequence)
            self.cache.forget(sequence.blocks)

    def learn(self, step: PlannedStep, busy_ms: float, idle_ms: float) -> None:
        """Take in what a step has cost."""
        shape = step.shape
        if shape.width == 1 and (shape.chunk_tokens or not shape.read_tokens):
            self.timing.learn(shape.chunk_tokens, shape.decodes, busy_ms, shape.chunk_position)
        self._deadlines.finished(shape)
        self._verification.finished(step, busy_ms, idle_ms)

    def verified(self, sequence: Sequence, proposed: int, emitted: int, taken: int) -> None:
        """See `SpeculationPlanner.verified`."""
        self._verification.verified(sequence, proposed, emitted, taken)

    def report_counters(self) -> dict[str, float]:
        """Return monotonic sums since start."""
        return {
            "preemptions_total": float(self.preemptions),
            **self.cache.report_counters(),
            **self._verification.report_counters(),
        }

    def look_ahead(self, now_s: float) -> None:
        """Look up who is next, while no plan can be sent."""
        self.cache.give_up_late(now_s)
        self._prefill.look_ahead(self.timing, now_s, may_evict=False)
        self._verification.look_ahead(self._running)

    def next_step(self, epoch: Epoch, step_id: StepId, now_s: float) -> PlannedStep | None:
        """Plan one step, or return None when there is nothing to do, or results must come first."""
        chosen = self._choose_drafts()
        if chosen is None:
            return None
        draft = PlanBuilder(now_s)
        self.cache.begin_plan(now_s)
        self._keep_blocks()
        self._plan_decodes(draft, chosen)
        self._prefill.plan(draft, self.timing)
        self._verification.read_prompts(draft, self._running, self.timing.prefill_token_ms)
        self._keep_what_left()
        self._prefill.look_ahead(self.timing, now_s, may_evict=True)
        dropped = self._running.take_dropped()
        orders = self.cache.finish_plan(now_s)
        self._running.draft_tokens = 0
        if not (draft.decodes or draft.chunks or draft.admitted or dropped or orders):
            return None
        return self._put_together(draft, dropped, orders, epoch=epoch, step_id=step_id)

    def _put_together(
        self,
        draft: PlanBuilder,
        dropped: list[int],
        orders: PlannedBlockOrders,
        *,
        epoch: Epoch,
        step_id: StepId,
    ) -> PlannedStep:
        draft.decodes.sort(key=_slot_of)
        made = _made(draft)
        width = made.shape(0 if draft.chunks else len(draft.decodes))
        shape = StepShape(
            chunk_tokens=draft.chunk_tokens,
            chunk_position=draft.chunk_position,
            decodes=len(draft.decodes),
            row_count=self.rows.row_count,
            row_tokens=self.rows.row_tokens,
            width=width.width,
            method=width.method,
            read_tokens=draft.read_tokens,
        )
        plan = StepPlan(
            epoch=epoch,
            step_id=step_id,
            deadline_s=self._deadlines.deadline_s(shape),
            rolled_back=self._verification.take_rolled_back(),
            keep_blocks=orders.keep_blocks,
            keep_checkpoints=orders.keep_checkpoints,
            adopted=orders.adopted,
            spill=orders.spill,
            dropped=dropped,
            evict_blocks=list(orders.evicted),
            moves=draft.moves,
            row_count=shape.row_count,
            row_tokens=shape.row_tokens,
            admitted=draft.admitted,
            prefill_chunks=draft.chunks,
            draft_chunks=draft.reads,
            decodes=[sequence.sequence_id for sequence in draft.decodes],
            drafts=made.drafts,
            draft_counts=made.counts,
            checkpoints=draft.checkpoints,
        )
        samples = draft.samples + draft.decodes
        was_held = self._verification.planned(made, draft.read_tokens)
        return PlannedStep(plan, samples, draft.admitted_first, shape, width, was_held)

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

    def _choose_drafts(self) -> ChosenDrafts | None:
        """Return what may be verified; None: results must come first."""
        if self._verification.is_idle(self._running):
            return NO_DRAFTS
        if any(one.is_verifying for one in self._running):
            return None
        return self._verification.choose([one for one in self._running if one.may_decode])

    def _plan_decodes(self, draft: PlanBuilder, chosen: ChosenDrafts) -> None:
        self._running.draft_tokens = chosen.longest
        if chosen.longest and not self._has_room_for_decodes():
            # Drafts save time, and are worth neither a row's growth nor anybody's place.
            self._running.draft_tokens, chosen = 0, NO_DRAFTS
        self._make_room_for_decodes(draft)
        if self.rows.rows_needed() >= _SPARSE_ROWS_MIN and (
            2 * self.rows.used <= self.rows.rows_needed()
        ):
            self._running.compact(draft)
        draft.decodes = [sequence for sequence in self._running if sequence.may_decode]
        for sequence in draft.decodes:
            self._verification.enter(draft, sequence, chosen)
        form = self.cache.form
        if form is not None and form.needs_checkpoints:
            draft.checkpoints += [
                sequence.sequence_id
                for sequence in draft.decodes
                if self.cache.set_aside(sequence.blocks, sequence.planned, is_decode=True)
            ]

    def _has_room_for_decodes(self) -> bool:
        return self.rows.resize(slots=self.rows.rows_needed(), tokens=self._running.tokens_needed())

    def _make_room_for_decodes(self, draft: PlanBuilder) -> None:
        """Grow the rows by what decodes need; preempt the youngest until that is possible."""
        while True:
            tokens = self._running.tokens_needed()
            if self.rows.resize(slots=self.rows.rows_needed(), tokens=tokens):
                return
            if self.rows.has_holes:
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

    def _remove(self, sequence: Sequence) -> None:
        self._running.leave(sequence)
        self.cache.leave(sequence.blocks)

    def _requeue(self, sequence: Sequence) -> None:
        self._remove(sequence)
        sequence.preempt()
        self._waiting.add(sequence)


def _slot_of(sequence: Sequence) -> int:
    if sequence.slot is None:
        raise InvariantBroken(f"sequence {sequence.sequence_id} has no slot")
    return sequence.slot


def _made(draft: PlanBuilder) -> PlannedDrafts:
    """Return a plan's drafts in the order of its decodes, which are known."""
    if not draft.counts and not draft.drafts:
        return PlannedDrafts([])
    names = [one.sequence_id for one in draft.decodes]
    if draft.counts:
        counts = [draft.counts.get(name, -1) for name in names]
        return PlannedDrafts([], counts=counts, method=draft.method)
    return PlannedDrafts([draft.drafts.get(name, []) for name in names])
