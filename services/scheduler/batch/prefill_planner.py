"""PrefillPlanner: who is admitted, and which tokens of which prompts the next step computes.

First come, first served, in chunks that hold up decodes no longer than is allowed. Those who wait
for blocks are passed by those behind them.
"""

import math

from services.scheduler.batch.plan_builder import PlanBuilder
from services.scheduler.batch.prompt_budget import PromptBudget
from services.scheduler.batch.running_sequences import RunningSequences
from services.scheduler.batch.step_timing import StepTiming
from services.scheduler.cache.kv_rows import Rows
from services.scheduler.cache.manager import BlockCache
from services.scheduler.requests.sequence import Sequence
from services.scheduler.requests.waiting_queue import WaitingQueue
from shared.configuration.settings import SchedulerConfig
from shared.messages import AdmittedSequence, PrefillChunk

_PASSED_MAX = 64
"""So many of those who wait are looked at: the others do not pass them."""

_LOOKED_AHEAD = 8
"""So many of those who wait are looked up before it is their turn, so that restores begin early."""


class PrefillPlanner:
    """Plans chunks for those who run and then for those who may."""

    def __init__(
        self,
        config: SchedulerConfig,
        rows: Rows,
        running: RunningSequences,
        waiting: WaitingQueue,
        cache: BlockCache,
    ) -> None:
        self._config = config
        self._rows = rows
        self._running = running
        self._waiting = waiting
        self._cache = cache

    def look_ahead(self, timing: StepTiming, now_s: float, *, may_evict: bool) -> None:
        """Look up who is next, so that restores begin while others run.

        Args:
            timing: what a step costs.
            now_s: the time.
            may_evict: a plan is in the making, which can carry evictions.
        """
        if len(self._waiting):
            for sequence in self._waiting.first(_LOOKED_AHEAD):
                self._cache.must_wait(
                    sequence.blocks, now_s, timing.prefill_token_ms, may_evict=may_evict
                )

    def plan(self, draft: PlanBuilder, timing: StepTiming) -> None:
        """Add chunks and admissions to a plan whose decodes are known."""
        position = self._position()
        whole = min(
            self._config.step_tokens_max,
            timing.chunk_tokens(decoding=bool(draft.decodes), position=position),
        )
        # While nobody decodes a step may be long: for a long prompt, not for those who came later.
        together = math.inf if draft.decodes else timing.together_tokens(position)
        budget = PromptBudget(whole, position, timing)
        for sequence in self._running:
            if not sequence.is_decoding:
                if budget.refuses(_rest(sequence), sequence.planned):
                    return
                self._plan_chunk(draft, sequence, budget)
        if not draft.preempted and len(self._waiting):
            self._admit_next(draft, timing, budget, together)

    def _position(self) -> int:
        """Return where the next prefill goes on: in the first undone prompt, or in a new one."""
        for sequence in self._running:
            if not sequence.is_decoding:
                return sequence.planned
        return self._waiting.first(1)[0].blocks.found_tokens if len(self._waiting) else 0

    def _admit_next(
        self, draft: PlanBuilder, timing: StepTiming, budget: PromptBudget, together: float
    ) -> None:
        """Admit those who need not wait for blocks, in order, as far as budget and room go."""
        for sequence in self._waiting.first(_PASSED_MAX):
            if not self._rows.has_free_slot:
                return
            if self._cache.must_wait(
                sequence.blocks, draft.now_s, timing.prefill_token_ms, may_evict=True
            ):
                continue
            found = sequence.blocks.found_tokens
            rest = len(sequence.tokens) - found
            if sequence.samples_in_flight or budget.refuses(rest, found):
                return
            if draft.chunks and draft.chunk_tokens + min(rest, budget.most(found)) > together:
                return
            if not self._admit(draft, sequence):
                return
            if budget.refuses(_rest(sequence), sequence.planned):
                # Making room for its row has taken blocks that it would have reused.
                return
            self._plan_chunk(draft, sequence, budget)

    def _plan_chunk(self, draft: PlanBuilder, sequence: Sequence, budget: PromptBudget) -> None:
        rest = _rest(sequence)
        cuts = sequence.blocks.cuts
        border = cuts[0] - sequence.planned if cuts and cuts[0] > sequence.planned else rest
        length = budget.take(rest, sequence.planned, border)
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
        if self._cache.set_aside(sequence.blocks, sequence.planned, is_decode=False):
            draft.checkpoints.append(sequence.sequence_id)
        if samples:
            sequence.is_decoding = True
            sequence.samples_in_flight += 1
            draft.samples.append(sequence)

    def _admit(self, draft: PlanBuilder, sequence: Sequence) -> bool:
        """Admit a sequence with what blocks hold of it; False when there is no room."""
        if not self._make_room_for(sequence, draft):
            return False
        self._waiting.remove(sequence)
        if sequence.blocks.cached is None:
            draft.admitted_first.append(sequence)
        reuse = self._cache.admit(sequence.blocks)
        sequence.planned = reuse.tokens
        draft.admitted.append(
            AdmittedSequence(
                sequence_id=sequence.sequence_id,
                slot=self._running.admit(sequence, draft.now_s),
                tokens=list(sequence.tokens),
                prompt_tokens=sequence.prompt_tokens,
                sampling=sequence.request.sampling,
                reused_tokens=reuse.tokens,
                reused_blocks=reuse.block_hashes,
                checkpoint=reuse.checkpoint,
            )
        )
        return True

    def _make_room_for(self, sequence: Sequence, draft: PlanBuilder) -> bool:
        # Room for a first stretch of completion, so that a row does not grow right after it was
        # filled.
        ahead = min(sequence.tokens_max, len(sequence.tokens) + self._config.kv_row_growth_tokens)
        tokens = max(ahead, self._running.tokens_needed())
        if self._rows.makes_long(tokens) and self._rows.has_holes and not draft.admitted:
            # All rows are copied anyway: those between them would become long for nobody.
            self._running.compact(draft)
        slots = max(self._rows.rows_needed(), self._rows.lowest_free() + 1)
        if self._rows.resize(slots=slots, tokens=tokens):
            return True
        if not draft.admitted and self._rows.has_holes:
            self._running.compact(draft)
            return self._rows.resize(slots=self._rows.used + 1, tokens=tokens)
        return False


def _rest(sequence: Sequence) -> int:
    """Return how many of its tokens no plan has read."""
    return len(sequence.tokens) - sequence.planned
