"""Speculation planner. Owns the drafts in plans and the rows to roll back; chooses no drafts.

A sequence with drafts in flight is in no other plan in flight, because its next tokens are not
known. Its row counts all drafts until the next plan says how many remain (`rolled_back`), so the
contents of the ranks' rows follow from plans alone. The same holds for the rows of the ranks'
draft model: a draft row holds as much as its sequence's row after each plan in which it takes
part, plus the tokens that plans let it read.
"""

from collections.abc import Callable, Iterable

from services.scheduler.batch.plan_builder import (
    NO_DRAFTS,
    ChosenDrafts,
    PlanBuilder,
    PlannedStep,
)
from services.scheduler.requests.sequence import Sequence
from services.scheduler.speculation.sequence_drafts import (
    DecodingRow,
    DraftState,
    PlannedDrafts,
    PromptRow,
)
from services.scheduler.speculation.speculator import Speculator
from shared import limits
from shared.configuration.settings import Config
from shared.errors import InvariantBroken
from shared.identifiers import SequenceId
from shared.messages import DraftChunk, RolledBack, token_ids


class SpeculationPlanner:
    """Puts drafts chosen by the speculator into plans, and collects the rows to roll back."""

    def __init__(self, config: Config, token_ms: Callable[[int], float]) -> None:
        """Start without drafts.

        Args:
            config: the whole configuration.
            token_ms: returns the prefill milliseconds of one token at a position of a prompt; 0:
                unknown.
        """
        self._token_ms = token_ms
        self._speculator = Speculator(config.speculation, config.scheduler)
        self.counters = self._speculator.counters
        self.can_roll_back = False
        """Rows of the current or the last epoch can be rolled back, so drafts can be verified."""
        self._rolled_back: list[RolledBack] = []

    def begin_epoch(self, *, can_roll_back: bool) -> None:
        """Begin an epoch; if its rows cannot be rolled back, no sequence gets drafts."""
        self.can_roll_back = can_roll_back
        self._speculator.begin_epoch()
        self._rolled_back.clear()

    def look_ahead(self, prefilling: Iterable[Sequence]) -> None:
        """Add part of the prompts being prefilled to the n-gram indexes that drafts come from.

        Args:
            prefilling: the running sequences whose last prefill chunk is not planned.
        """
        states = [self._draft_state_of(one) for one in prefilling]
        self._speculator.index_prompts([one for one in states if one is not None])

    def choose(self, decoding: list[Sequence]) -> ChosenDrafts | None:
        """Return the drafts of the next plan; None: it must wait for results of plans in flight.

        Args:
            decoding: the running sequences that can decode in it.
        """
        draft_states = [self._draft_state_of(one) for one in decoding]
        if not any(one is not None for one in draft_states):
            return NO_DRAFTS
        rows = [
            DecodingRow(
                state,
                one.samples_in_flight,
                one.tokens_max - len(one.tokens),
                _unread_tokens(one, state),
            )
            for one, state in zip(decoding, draft_states, strict=True)
        ]
        planned = self._speculator.choose(rows)
        if planned.waits_for_results:
            return None
        ids = [one.sequence_id for one in decoding]
        return ChosenDrafts(
            {key: drafts for key, drafts in zip(ids, planned.drafts, strict=False) if drafts},
            {key: count for key, count in zip(ids, planned.counts, strict=False) if count >= 0},
            {key: tokens for key, tokens in zip(ids, planned.reads, strict=False) if tokens},
            planned.method,
        )

    def is_idle(self, running: Iterable[Sequence]) -> bool:
        """Tell whether no running sequence takes drafts, so that plans need no choice of drafts."""
        if not self.can_roll_back:
            return True
        for one in running:
            if one.draft_state is not None:
                return False
            if not one.is_draft_state_chosen and self._draft_state_of(one) is not None:
                return False
        return True

    def add_decodes(self, plan: PlanBuilder) -> None:
        """Count the decodes of a plan, and the drafts chosen for them, as planned.

        Args:
            plan: the plan being built, which changes.
        """
        if plan.chosen is not NO_DRAFTS:
            for sequence in plan.decodes:
                self._add_decode(plan, sequence)
            return
        for sequence in plan.decodes:
            sequence.drafts_in_flight = 0
            sequence.planned_tokens += 1
            sequence.samples_in_flight += 1

    def _add_decode(self, plan: PlanBuilder, sequence: Sequence) -> None:
        chosen, sequence_id = plan.chosen, sequence.sequence_id
        if sequence_id in chosen.reads:
            _add_read(plan, sequence, chosen.reads[sequence_id])
        drafts = chosen.by_sequence.get(sequence_id, [])
        sequence.drafts_in_flight = chosen.counts.get(sequence_id, len(drafts))
        sequence.is_verifying = sequence.drafts_in_flight > 0
        sequence.planned_tokens += 1 + sequence.drafts_in_flight
        sequence.samples_in_flight += 1
        if sequence_id in chosen.counts:
            sequence.draft_row_tokens = sequence.planned_tokens

    def read_prompts(self, plan: PlanBuilder, running: Iterable[Sequence]) -> None:
        """Add reads to a plan: rows of the draft model read prompts that the plan prefills.

        A prompt is read if that is expected to save time. All reads together have at most as many
        tokens as the plan's prefill chunks.

        Args:
            plan: a plan whose prefill chunks are complete; it changes.
            running: the sequences that run with this plan.
        """
        if not plan.chunks or not self.can_roll_back:
            return
        left = plan.chunk_tokens
        sequences = {one.sequence_id: one for one in running}
        for chunk in plan.chunks:
            sequence = sequences[SequenceId(chunk.sequence_id)]
            state = self._draft_state_of(sequence)
            unread_tokens = _unread_tokens(sequence, state)
            if state is None or not unread_tokens or not left:
                continue
            tokens_left = sequence.tokens_max - len(sequence.tokens)
            prompt = PromptRow(
                drafts_max=min(state.drafts_max, tokens_left - 2),
                unread_tokens=len(sequence.tokens) - sequence.draft_row_tokens,
                tokens_left=tokens_left,
                token_ms=self._token_ms(chunk.start),
            )
            if self._speculator.should_read_prompt(prompt, len(sequences)):
                count = min(unread_tokens, left, limits.FORWARD_TOKENS_MAX)
                _add_read(plan, sequence, count)
                left -= count

    def record_plan(self, drafts: PlannedDrafts, read: int) -> bool:
        """Record that a plan was made; return whether it was held back for earlier results.

        Args:
            drafts: the plan's drafts.
            read: number of tokens that rows of the draft model read in it.

        Returns:
            True if the choice of drafts had asked to wait for the results of all plans in flight.
        """
        return self.can_roll_back and self._speculator.record_plan(drafts, read)

    def record_verification(
        self, sequence: Sequence, proposed: int, emitted: int, taken: int
    ) -> None:
        """Record the verification of a running sequence's drafts, and roll back its row.

        Args:
            sequence: the sequence.
            proposed: drafts in the plan.
            emitted: tokens in the receipt, one more than the accepted drafts.
            taken: emitted tokens that became part of the completion.
        """
        sequence.planned_tokens += emitted - proposed - 1
        sequence.draft_row_tokens = min(sequence.draft_row_tokens, sequence.planned_tokens)
        sequence.is_verifying = False
        self._rolled_back.append(
            RolledBack(sequence_id=sequence.sequence_id, length=sequence.planned_tokens)
        )
        if sequence.draft_state is not None:
            self._speculator.record_verification(sequence.draft_state, proposed, emitted, taken)

    def record_step(self, step: PlannedStep, busy_ms: float, idle_ms: float) -> None:
        """Record a finished step's times, from which the costs of drafts and reads follow.

        Args:
            step: the step.
            busy_ms: StepFinished.busy_ms of its receipt.
            idle_ms: StepFinished.idle_ms if requests were open all the time, else 0.
        """
        if self.can_roll_back:
            reads = [len(chunk.tokens) for chunk in step.plan.draft_chunks]
            self._speculator.record_step(
                step.decode_work, busy_ms, idle_ms, was_held=step.was_held, reads=reads
            )

    def take_rolled_back(self) -> list[RolledBack]:
        """Return and clear the rows to roll back with the next plan, each with its new length."""
        taken, self._rolled_back = self._rolled_back, []
        return taken

    def _draft_state_of(self, sequence: Sequence) -> DraftState | None:
        if not sequence.is_draft_state_chosen:
            sequence.is_draft_state_chosen = True
            sequence.draft_state = self._speculator.new_draft_state(
                sequence.tokens,
                sequence.request.speculation,
                sequence.prompt_tokens,
                token_ids.unpack(sequence.request.prediction),
            )
        return sequence.draft_state if self.can_roll_back else None


def _unread_tokens(sequence: Sequence, state: DraftState | None) -> int:
    """Return the tokens of a sequence's row that its draft row lacks; 0 without a draft model."""
    if state is None or state.method != "draft_model":
        return 0
    return sequence.planned_tokens - sequence.draft_row_tokens


def _add_read(plan: PlanBuilder, sequence: Sequence, count: int) -> None:
    """Let a draft row read the next `count` tokens of its sequence's row."""
    start, stop = sequence.draft_row_tokens, sequence.draft_row_tokens + count
    if stop > sequence.computed_tokens:
        raise InvariantBroken(
            f"draft row of sequence {sequence.sequence_id} reads up to token {stop}, "
            f"but the row holds {sequence.computed_tokens}"
        )
    plan.draft_reads.append(
        DraftChunk(
            sequence_id=sequence.sequence_id, start=start, tokens=list(sequence.tokens[start:stop])
        )
    )
    sequence.draft_row_tokens = stop
