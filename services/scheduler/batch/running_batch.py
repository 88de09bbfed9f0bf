"""Running batch. Owns planning decodes, growing rows, preemption and assembling step plans."""

from services.scheduler.batch import preemption
from services.scheduler.batch.chunk_grid import FIXED_CELL
from services.scheduler.batch.grammar_waits import GrammarWaits
from services.scheduler.batch.plan_builder import (
    NO_DRAFTS,
    ChosenDrafts,
    PlanBuilder,
    PlannedStep,
    StepWork,
)
from services.scheduler.batch.prefill_planner import PrefillPlanner
from services.scheduler.batch.running_sequences import RunningSequences
from services.scheduler.batch.speculation_planner import SpeculationPlanner
from services.scheduler.batch.step_deadlines import StepDeadlines
from services.scheduler.batch.step_timing import StepTiming
from services.scheduler.cache.cache_state import PlannedBlockOrders
from services.scheduler.cache.index.block_format import BlockFormat
from services.scheduler.cache.kv_rows import RowBudget, Rows
from services.scheduler.cache.manager import BlockCache
from services.scheduler.requests.sequence import Sequence, SequenceState
from services.scheduler.requests.tenant_turns import TenantTurns
from services.scheduler.requests.waiting_queue import WaitingQueue
from shared.configuration.settings import Config
from shared.errors import InvariantBroken
from shared.identifiers import Epoch, StepId
from shared.messages import StepPlan

_SPARSE_ROWS_MIN = 8
"""With fewer rows, unused slots cost less than moving a row."""


class RunningBatch:
    """Plans the steps of the running sequences; owns their slots, KV rows and cache blocks."""

    def __init__(self, config: Config, waiting: WaitingQueue, turns: TenantTurns) -> None:
        scheduler = config.scheduler
        self.rows = Rows(scheduler.running_sequences_max, scheduler.kv_row_growth_tokens)
        self.timing = StepTiming(scheduler.decode_stall_ms)
        # Equal results need equal prefill chunks, also behind a reused prefix.
        grid_tokens = FIXED_CELL if config.rank_worker.batch_invariant else 1
        token_ms = self.timing.prefill_token_ms
        self.cache = BlockCache(config.cache, self.rows, token_ms, grid_tokens=grid_tokens)
        self._config = scheduler
        self._deadlines = StepDeadlines(self.timing, scheduler)
        self.preemptions = 0
        self._preemptions_for_fairness = 0
        self._waiting = waiting
        self._turns = turns
        self._running = RunningSequences(self.rows)
        self.speculation = SpeculationPlanner(config, self.timing.prefill_token_ms)
        self.grammars = GrammarWaits()
        self._prefill = PrefillPlanner(
            config,
            self.rows,
            self._running,
            waiting,
            self.cache,
            self.timing,
            turns,
            self.grammars,
        )

    def __len__(self) -> int:
        """Return the number of running sequences."""
        return len(self._running)

    @property
    def running(self) -> list[Sequence]:
        """The running sequences, the longest-running first."""
        return list(self._running)

    @property
    def tokens_used(self) -> int:
        """Tokens in the rows of running sequences once all plans in flight are computed."""
        return sum(sequence.planned_tokens for sequence in self._running)

    def start(
        self, budget: RowBudget, form: BlockFormat | None, epoch: Epoch, *, can_roll_back: bool
    ) -> None:
        """Begin an epoch: no slot is used, and measured step times start anew.

        Args:
            budget: memory of each rank for KV rows and cache blocks.
            form: format of cache blocks; None: the cache is off.
            epoch: number of the epoch.
            can_roll_back: rows can be rolled back, so drafts can be verified.

        Raises:
            InvariantBroken: when sequences are running.
        """
        if self._running:
            raise InvariantBroken("sequences run across epochs")
        self._running.departed.clear()
        self.rows.start(budget)
        self.timing.begin_epoch()
        self._deadlines = StepDeadlines(self.timing, self._config)
        self.speculation.begin_epoch(can_roll_back=can_roll_back)
        self.cache.state.start_epoch(form, epoch)

    def requeue_running(self) -> None:
        """Move all running sequences to the waiting queue because their epoch has ended."""
        for sequence in self.running:
            self._requeue(sequence)
        self._running.departed.clear()
        self.cache.end_epoch()

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that ends from the batch or the queue; the next plan drops its row."""
        if sequence.state is SequenceState.RUNNING:
            self._remove(sequence)
        else:
            self._waiting.remove(sequence)
            self.cache.cancel_wait(sequence.blocks)

    def record_step(self, step: PlannedStep, busy_ms: float, idle_ms: float) -> None:
        """Record a finished step's times, from which chunk sizes, deadlines and draft costs follow.

        Args:
            step: the step.
            busy_ms: StepFinished.busy_ms of its receipt.
            idle_ms: StepFinished.idle_ms if requests were open all the time, else 0.
        """
        if step.plan.profile:
            # It waited at every boundary between its parts.
            return
        work = step.work
        if work.width == 1 and (work.chunk_tokens or not work.read_tokens):
            self.timing.record_step(work.chunk_tokens, work.decodes, busy_ms, work.chunk_position)
        self._deadlines.record_step(work)
        self.speculation.record_step(step, busy_ms, idle_ms)

    def report_counters(self) -> dict[str, float]:
        """Return the counters of preemptions, cache and drafts since start, by name."""
        return {
            "preemptions_total": float(self.preemptions),
            "preemptions_for_fairness_total": float(self._preemptions_for_fairness),
            **self.cache.state.counters,
            **self.speculation.counters.totals,
        }

    def look_ahead(self, now_s: float) -> None:
        """Prepare later plans: request restores for waiting sequences, and index prompts.

        Restores of cache blocks are requested for the first waiting sequences, before these can be
        admitted. Prompts still being prefilled are added, a part per call, to their sequences'
        n-gram indexes, from which drafts are copied.

        Args:
            now_s: the monotonic time in seconds; a restore whose deadline has passed by then is no
                longer awaited.
        """
        self.cache.restorer.expire(now_s)
        self._prefill.look_ahead(now_s, may_evict=False)
        self.speculation.look_ahead(self._running.prefilling)

    def next_step(self, epoch: Epoch, step_id: StepId, now_s: float) -> PlannedStep | None:
        """Plan one step; None if there is nothing to do or drafts wait for earlier results.

        Args:
            epoch: the current epoch.
            step_id: number of the step in its epoch.
            now_s: the monotonic time in seconds, for admissions and restores.
        """
        chosen = self._choose_drafts()
        if chosen is None:
            return None
        plan_builder = PlanBuilder(step_id, now_s, chosen)
        self.cache.begin_plan(now_s)
        self._keep_blocks()
        self._make_room_for_locked_out(plan_builder)
        self._plan_decodes(plan_builder)
        self._prefill.plan(plan_builder)
        self.speculation.read_prompts(plan_builder, self._running)
        departed = self._running.take_departed()
        # After admissions: blocks that these reuse are worth more than blocks kept for later.
        for sequence, computed in departed:
            self.cache.keep(sequence.blocks, computed, ends=True)
        self._prefill.look_ahead(now_s, may_evict=True)
        dropped: list[int] = [sequence.sequence_id for sequence, _ in departed]
        orders = self.cache.finish_plan(now_s)
        self._running.draft_room_tokens = 0
        if not (
            plan_builder.decodes
            or plan_builder.chunks
            or plan_builder.admitted
            or dropped
            or orders
        ):
            return None
        return self._assemble(plan_builder, dropped, orders, epoch=epoch, step_id=step_id)

    def _assemble(
        self,
        plan_builder: PlanBuilder,
        dropped: list[int],
        orders: PlannedBlockOrders,
        *,
        epoch: Epoch,
        step_id: StepId,
    ) -> PlannedStep:
        plan_builder.decodes.sort(key=_slot_of)
        drafts = plan_builder.chosen.of(plan_builder.decodes)
        decode_work = drafts.decode_work(0 if plan_builder.chunks else len(plan_builder.decodes))
        work = StepWork(
            chunk_tokens=plan_builder.chunk_tokens,
            chunk_position=plan_builder.chunk_position,
            decodes=len(plan_builder.decodes),
            row_count=self.rows.row_count,
            row_tokens=self.rows.row_tokens,
            width=decode_work.width,
            method=decode_work.method,
            read_tokens=plan_builder.read_tokens,
        )
        plan = StepPlan(
            epoch=epoch,
            step_id=step_id,
            deadline_s=self._deadlines.deadline_s(work),
            rolled_back=self.speculation.take_rolled_back(),
            keep_blocks=orders.keep_blocks,
            keep_checkpoints=orders.keep_checkpoints,
            adopted=orders.adopted,
            spill=orders.spill,
            dropped=dropped,
            evict_blocks=list(orders.evicted),
            moves=plan_builder.moves,
            row_count=work.row_count,
            row_tokens=work.row_tokens,
            admitted=plan_builder.admitted,
            prefill_chunks=plan_builder.chunks,
            draft_chunks=plan_builder.draft_reads,
            decodes=[sequence.sequence_id for sequence in plan_builder.decodes],
            drafts=drafts.drafts,
            draft_counts=drafts.counts,
            checkpoints=plan_builder.checkpoints,
        )
        samples = plan_builder.samples + plan_builder.decodes
        was_held = self.speculation.record_plan(drafts, work.read_tokens)
        return PlannedStep(plan, samples, plan_builder.first_admitted, work, decode_work, was_held)

    def check_invariants(self) -> None:
        """Raise InvariantBroken when slots, rows, sequences and blocks do not agree."""
        self._running.check_invariants()
        self.cache.check_invariants(
            [sequence.blocks for sequence in self._running],
            [sequence.blocks for sequence in self._waiting],
        )

    # --- blocks ------------------------------------------------------------------------------

    def _keep_blocks(self) -> None:
        """Keep the blocks that plans in flight complete for running sequences."""
        # `planned_tokens` is at least `computed_tokens`, and cheaper to read for every row.
        due = [one for one in self._running if one.planned_tokens >= one.blocks.next_boundary]
        due = [one for one in due if one.computed_tokens >= one.blocks.next_boundary]
        if (due or self._running.departed) and self.cache.state.is_memory_low:
            self.rows.trim(slots=self.rows.rows_needed(), tokens=self._running.row_tokens_needed())
        for sequence in due:
            self.cache.keep(sequence.blocks, sequence.computed_tokens)

    # --- decodes -----------------------------------------------------------------------------

    def _choose_drafts(self) -> ChosenDrafts | None:
        """Return the drafts for the next plan; None: it must wait for earlier results."""
        if self.speculation.is_idle(self._running):
            return NO_DRAFTS
        if any(one.is_verifying for one in self._running):
            return None
        return self.speculation.choose(self._running.decodable())

    def _plan_decodes(self, plan_builder: PlanBuilder) -> None:
        self._running.draft_room_tokens = longest = plan_builder.chosen.longest
        if longest and not self._has_room_for_decodes():
            # Drafts only save time, so no row grows and no sequence is preempted for them.
            self._running.draft_room_tokens, plan_builder.chosen = 0, NO_DRAFTS
        self._make_room_for_decodes(plan_builder)
        rows_needed = self.rows.rows_needed()
        if rows_needed >= _SPARSE_ROWS_MIN and 2 * self.rows.slots_used <= rows_needed:
            self._running.compact(plan_builder)
        plan_builder.decodes = self._running.decodable()
        self.speculation.add_decodes(plan_builder)
        form = self.cache.block_format
        if form is not None and form.needs_checkpoints:
            plan_builder.checkpoints += [
                sequence.sequence_id
                for sequence in plan_builder.decodes
                if self.cache.snapshot_state(
                    sequence.blocks, sequence.planned_tokens, is_decode=True
                )
            ]

    def _has_room_for_decodes(self) -> bool:
        tokens = self._running.row_tokens_needed()
        # Every used slot has a row, so only their length can be too small.
        if tokens <= self.rows.row_tokens:
            return True
        return self.rows.resize(slots=self.rows.rows_needed(), tokens=tokens)

    def _make_room_for_decodes(self, plan_builder: PlanBuilder) -> None:
        """Grow the rows for all decodes, preempting the youngest sequences until that fits."""
        while not self._has_room_for_decodes():
            if self.rows.has_holes:
                self._running.compact(plan_builder)
                continue
            self._preempt_youngest()
            plan_builder.preempted = True

    def _preempt_youngest(self) -> None:
        victim = preemption.choose_for_memory(self._running, self._turns)
        if victim is None or len(self._running) == 1:
            raise InvariantBroken(f"a single sequence does not fit {self.rows.budget}")
        self._requeue(victim)
        self.preemptions += 1

    def _make_room_for_locked_out(self, plan_builder: PlanBuilder) -> None:
        """Preempt one sequence if a tenant with few in a full batch waits for its turn."""
        if len(self._turns) < 2:
            return
        sated = preemption.find_sated(self._running, self._turns)
        locked_out = self._prefill.find_locked_out(sated, plan_builder.now_s)
        if locked_out is None:
            return
        victim = preemption.choose_for_tenant(self._running, self._turns, locked_out.tenant)
        if victim is not None:
            self._requeue(victim)
            plan_builder.displaced = victim
            self._preemptions_for_fairness += 1

    def _remove(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self.grammars.end(sequence)
        self.cache.stop_running(sequence.blocks)

    def _requeue(self, sequence: Sequence) -> None:
        self._remove(sequence)
        sequence.preempt()
        self._waiting.add(sequence)


def _slot_of(sequence: Sequence) -> int:
    if sequence.slot is None:
        raise InvariantBroken(f"sequence {sequence.sequence_id} has no slot")
    return sequence.slot
