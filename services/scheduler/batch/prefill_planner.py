"""Prefill planner. Owns admissions and prefill chunks of a step plan; decodes come before it.

Sequences of one tenant are served in order of arrival, in chunks short enough not to delay decodes
too long; tenants take turns, chunk by chunk. Sequences that wait for cache blocks are overtaken by
later ones.
"""

import functools
import math
from collections.abc import Container

from services.scheduler.batch.grammar_waits import GrammarWaits
from services.scheduler.batch.plan_builder import PlanBuilder
from services.scheduler.batch.prompt_budget import PromptBudget
from services.scheduler.batch.running_sequences import RunningSequences
from services.scheduler.batch.step_timing import StepTiming
from services.scheduler.cache.kv_rows import Rows
from services.scheduler.cache.manager import BlockCache
from services.scheduler.requests.sequence import Sequence, SequenceState
from services.scheduler.requests.tenant_turns import TenantTurns
from services.scheduler.requests.waiting_queue import WaitingQueue
from shared import limits
from shared.configuration.settings import Config
from shared.messages import AdmittedSequence, PrefillChunk

_SCANNED_MAX = 64
"""Waiting sequences of a tenant considered for one plan; later ones do not overtake these."""

_LOOKAHEAD_COUNT = 8
"""Waiting sequences whose restores start before they can be admitted."""


class PrefillPlanner:
    """Plans prefill chunks of running sequences first, then admits waiting ones."""

    def __init__(
        self,
        config: Config,
        rows: Rows,
        running: RunningSequences,
        waiting: WaitingQueue,
        cache: BlockCache,
        timing: StepTiming,
        turns: TenantTurns,
        grammars: GrammarWaits,
    ) -> None:
        self._config = config.scheduler
        self._fixed_grid = config.rank_worker.batch_invariant
        self._rows = rows
        self._running = running
        self._waiting = waiting
        self._cache = cache
        self._timing = timing
        self._turns = turns
        self._grammars = grammars
        self._refused: Sequence | None = None
        """The waiting sequence that the last plan had no KV memory for."""

    def look_ahead(self, now_s: float, *, may_evict: bool) -> None:
        """Request restores of cache blocks for the first waiting sequences, before their admission.

        Args:
            now_s: the monotonic time in seconds, from which deadlines of restores count.
            may_evict: a plan is being made, which can carry evictions that make room for the
                blocks.
        """
        for sequence in self._waiting.heads(_LOOKAHEAD_COUNT)[:_LOOKAHEAD_COUNT]:
            self._cache.admission.prepare(sequence.blocks, now_s, may_evict=may_evict)

    def find_locked_out(self, sated: Container[str], now_s: float) -> Sequence | None:
        """Return a waiting sequence whose turn it is, and that a full batch leaves no place.

        Args:
            sated: the tenants that have enough running sequences not to be locked out.
            now_s: the monotonic time in seconds, from which deadlines of restores count.
        """
        if self._rows.has_free_slot and self._refused is None:
            return None
        for sequence in self._turns.in_turn(self._waiting.heads(1)):
            if sequence.tenant in sated:
                return None
            if self._rows.has_free_slot and sequence is not self._refused:
                return None
            is_ready = self._cache.admission.prepare(sequence.blocks, now_s, may_evict=True)
            if is_ready and not sequence.samples_in_flight:
                return sequence
        return None

    def plan(self, plan: PlanBuilder) -> None:
        """Add prefill chunks and admissions to a plan whose decodes are complete.

        Args:
            plan: the plan being built, which changes.
        """
        self._refused = None
        candidates = self._running.prefilling
        waiting = self._waiting.heads(_SCANNED_MAX)
        candidates += [one for one in waiting if one is not plan.displaced]
        if not candidates:
            return
        first = next(self._turns.in_turn(candidates), None)
        position = _position_of(first)
        # Without decodes one long prompt may fill a step, but several prompts may not.
        joint_tokens_max = math.inf if plan.decodes else self._timing.joint_tokens_max(position)
        # Other tenants' prompts wait for the chunk of a long one as decodes do.
        delays_others = bool(plan.decodes) or (
            first is not None
            and len(first.tokens) - position > joint_tokens_max
            and any(one.tenant != first.tenant for one in candidates)
        )
        budget = PromptBudget(
            self._step_tokens(position, decoding=delays_others),
            position,
            self._timing,
            # Prompts of this step decode then.
            next_tokens=functools.partial(self._step_tokens, decoding=True),
            fixed_grid=self._fixed_grid,
        )
        admits = not plan.preempted
        for sequence in self._turns.in_turn(candidates):
            rest, position = _unplanned_tokens(sequence), sequence.planned_tokens
            if sequence.state is SequenceState.WAITING:
                admits = admits and self._admit_next(plan, sequence, budget, joint_tokens_max)
                continue
            if self._waits_for_grammar(sequence, budget):
                continue
            others = any(one.tenant != sequence.tenant for one in plan.samples)
            length_max = min(rest, budget.tokens_max(position))
            exceeds = others and plan.chunk_tokens + length_max > joint_tokens_max
            if exceeds or budget.defers(rest, position):
                self._turns.pass_over(sequence.tenant)
                return
            self._plan_chunk(plan, sequence, budget)

    def _step_tokens(self, position: int, *, decoding: bool) -> int:
        """Return the budget in tokens of a step whose first chunk begins at a position."""
        return min(
            self._config.step_tokens_max,
            self._timing.chunk_tokens(decoding=decoding, position=position),
        )

    def _admit_next(
        self, plan: PlanBuilder, sequence: Sequence, budget: PromptBudget, joint_tokens_max: float
    ) -> bool:
        """Admit a sequence unless it waits for blocks; return False if none may follow it."""
        if not self._rows.has_free_slot or _exceeds_grammars(plan, sequence):
            return False
        if not self._cache.admission.prepare(sequence.blocks, plan.now_s, may_evict=True):
            return True
        found = sequence.blocks.resident_tokens
        rest = len(sequence.tokens) - found
        if sequence.samples_in_flight:
            return False
        length_max = min(rest, budget.tokens_max(found))
        exceeds = plan.chunks and plan.chunk_tokens + length_max > joint_tokens_max
        if exceeds or budget.defers(rest, found):
            self._turns.pass_over(sequence.tenant)
            return False
        if not self._admit(plan, sequence):
            self._refused = sequence
            return False
        if budget.defers(_unplanned_tokens(sequence), sequence.planned_tokens):
            # Blocks that it would have reused were evicted to make room for its row.
            return False
        if not self._waits_for_grammar(sequence, budget):
            self._plan_chunk(plan, sequence, budget)
        return True

    def _waits_for_grammar(self, sequence: Sequence, budget: PromptBudget) -> bool:
        """Tell whether the next chunk would sample, and a rank has not compiled the grammar."""
        if not self._grammars.is_waiting(sequence):
            return False
        rest = _unplanned_tokens(sequence)
        chunk_max = budget.tokens_max(sequence.planned_tokens)
        return rest <= min(chunk_max, _tokens_to_snapshot(sequence))

    def _plan_chunk(self, plan: PlanBuilder, sequence: Sequence, budget: PromptBudget) -> None:
        rest = _unplanned_tokens(sequence)
        length = budget.take(rest, sequence.planned_tokens, _tokens_to_snapshot(sequence))
        samples = sequence.planned_tokens + length == len(sequence.tokens)
        plan.chunks.append(
            PrefillChunk(
                sequence_id=sequence.sequence_id,
                start=sequence.planned_tokens,
                length=length,
                samples=samples,
            )
        )
        sequence.planned_tokens += length
        plan.chunk_tokens += length
        self._turns.charge(sequence.tenant, length)
        if self._cache.snapshot_state(sequence.blocks, sequence.planned_tokens, is_decode=False):
            plan.checkpoints.append(sequence.sequence_id)
        if samples:
            self._running.begin_decoding(sequence)
            plan.samples.append(sequence)

    def _admit(self, plan: PlanBuilder, sequence: Sequence) -> bool:
        """Admit a sequence with the blocks it reuses; return False if there is no room."""
        if not self._make_room_for(sequence, plan):
            return False
        self._waiting.remove(sequence)
        if sequence.blocks.cached is None:
            plan.first_admitted.append(sequence)
        reuse = self._cache.admission.admit(sequence.blocks)
        sequence.planned_tokens = reuse.tokens
        self._grammars.begin(sequence, plan.step_id, plan.now_s)
        plan.admitted.append(
            AdmittedSequence(
                sequence_id=sequence.sequence_id,
                slot=self._running.admit(sequence, plan.now_s),
                tokens=list(sequence.tokens),
                prompt_tokens=sequence.prompt_tokens,
                sampling=sequence.request.sampling,
                grammar=sequence.request.grammar,
                tenant=sequence.tenant,
                reused_tokens=reuse.tokens,
                reused_blocks=reuse.block_hashes,
                checkpoint=reuse.checkpoint,
            )
        )
        return True

    def _make_room_for(self, sequence: Sequence, plan: PlanBuilder) -> bool:
        # Leaves room for the first completion tokens, so that the row need not grow at once.
        ahead = min(sequence.tokens_max, len(sequence.tokens) + self._config.kv_row_growth_tokens)
        tokens = max(ahead, self._running.row_tokens_needed())
        if self._rows.drops_idle_rows(tokens) and self._rows.has_holes and not plan.admitted:
            # All rows are copied anyway, and unused rows between them would grow too.
            self._running.compact(plan)
        slots = max(self._rows.rows_needed(), self._rows.lowest_free_slot() + 1)
        if self._rows.resize(slots=slots, tokens=tokens):
            return True
        if not plan.admitted and self._rows.has_holes:
            self._running.compact(plan)
            return self._rows.resize(slots=self._rows.slots_used + 1, tokens=tokens)
        return False


def _exceeds_grammars(plan: PlanBuilder, sequence: Sequence) -> bool:
    """Return whether a plan with a sequence would be too long a message; one grammar never is."""
    texts = [one.grammar.text for one in plan.admitted if one.grammar is not None]
    grammar = sequence.request.grammar
    if grammar is None or not texts:
        return False
    return sum(map(len, texts)) + len(grammar.text) > limits.PLAN_GRAMMAR_CHARS_MAX


def _position_of(sequence: Sequence | None) -> int:
    """Return the position of the first token of a sequence that its next chunk prefills."""
    if sequence is None:
        return 0
    is_waiting = sequence.state is SequenceState.WAITING
    return sequence.blocks.resident_tokens if is_waiting else sequence.planned_tokens


def _unplanned_tokens(sequence: Sequence) -> int:
    """Return the known tokens of a sequence that no plan has prefilled."""
    return len(sequence.tokens) - sequence.planned_tokens


def _tokens_to_snapshot(sequence: Sequence) -> int:
    """Return how many tokens the next chunk may have before the row's state must be saved."""
    cuts, position = sequence.blocks.snapshot_stops, sequence.planned_tokens
    return cuts[0] - position if cuts and cuts[0] > position else _unplanned_tokens(sequence)
