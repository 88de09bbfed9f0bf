"""Drafts in plans: chosen before a plan is made, cut back to what was accepted after its receipt.

A sequence with drafts in flight is in no other plan's forward, because its tokens are not known.
Its row counts all drafts until the next plan names the real length (`rolled_back`), so that what
ranks hold follows from plans alone. So does what a row of the ranks' draft model holds: as much as
the sequence's own after each plan in which it follows, and what plans have let it read.
"""

import dataclasses
from collections.abc import Callable, Iterable

from services.scheduler.batch.plan_builder import PlanBuilder, PlannedStep
from services.scheduler.requests.sequence import Sequence
from services.scheduler.speculation.method import Method
from services.scheduler.speculation.sequence_drafts import Drafting
from services.scheduler.speculation.speculator import (
    DecodingRow,
    PlannedDrafts,
    PromptRow,
    Speculator,
)
from shared import limits
from shared.configuration.settings import Config
from shared.errors import InvariantBroken
from shared.identifiers import SequenceId
from shared.messages import DraftChunk, RolledBack


@dataclasses.dataclass(frozen=True, slots=True)
class ChosenDrafts:
    """What the plan in the making may verify."""

    by_sequence: dict[SequenceId, list[int]] = dataclasses.field(default_factory=dict)
    """Of those that have any."""
    counts: dict[SequenceId, int] = dataclasses.field(default_factory=dict)
    """Of those whose draft rows follow; then nobody has drafts of ours."""
    reads: dict[SequenceId, int] = dataclasses.field(default_factory=dict)
    """Tokens that draft rows read before that."""
    method: Method = "ngram"
    """Whose drafts these are."""

    @property
    def longest(self) -> int:
        """Most drafts of one sequence."""
        ours = max(map(len, self.by_sequence.values()), default=0)
        return max(0, ours, *self.counts.values())


NO_DRAFTS = ChosenDrafts()


class SpeculationPlanner:
    """Between the running sequences and the speculator."""

    def __init__(self, config: Config) -> None:
        self._speculator = Speculator(config.speculation, config.scheduler)
        self.can_roll_back = False
        """Rows of the present or the last epoch can be cut back, so that drafts can be verified."""
        self._rolled_back: list[RolledBack] = []

    def begin_epoch(self, *, can_roll_back: bool) -> None:
        """Begin with nothing in flight; without roll-back nobody gets drafts."""
        self.can_roll_back = can_roll_back
        self._speculator.begin_epoch()
        self._rolled_back.clear()

    def look_ahead(self, running: Iterable[Sequence]) -> None:
        """Index prompts that are being computed, a slice at a time."""
        waiting = [self._drafting_of(one) for one in running if not one.is_decoding]
        self._speculator.look_ahead([one for one in waiting if one is not None])

    def choose(self, decoding: list[Sequence]) -> ChosenDrafts | None:
        """Return what the next plan verifies; None: no plan may be made yet.

        Args:
            decoding: who may decode.
        """
        draftings = [self._drafting_of(one) for one in decoding]
        if not any(one is not None for one in draftings):
            return NO_DRAFTS
        rows = [
            DecodingRow(
                drafting,
                one.samples_in_flight,
                one.tokens_max - len(one.tokens),
                _gap(one, drafting),
            )
            for one, drafting in zip(decoding, draftings, strict=True)
        ]
        planned = self._speculator.choose(rows)
        if planned.holds:
            return None
        names = [one.sequence_id for one in decoding]
        return ChosenDrafts(
            {name: one for name, one in zip(names, planned.drafts, strict=False) if one},
            {name: one for name, one in zip(names, planned.counts, strict=False) if one >= 0},
            {name: one for name, one in zip(names, planned.reads, strict=False) if one},
            planned.method,
        )

    def is_idle(self, running: Iterable[Sequence]) -> bool:
        """Tell whether none of the running sequences has drafts, or could have any."""
        if not self.can_roll_back:
            return True
        return all(
            one.drafting is None if one.has_drafting else self._drafting_of(one) is None
            for one in running
        )

    def enter(self, draft: PlanBuilder, sequence: Sequence, chosen: ChosenDrafts) -> None:
        """Enter into a plan what is chosen for one of its decodes, and that it decodes."""
        if chosen is NO_DRAFTS:
            sequence.draft_count = 0
            sequence.planned += 1
            sequence.samples_in_flight += 1
            return
        name = sequence.sequence_id
        drafts = chosen.by_sequence.get(name, [])
        follows = name in chosen.counts
        if drafts:
            draft.drafts[name] = drafts
        if name in chosen.reads:
            _read(draft, sequence, chosen.reads[name])
        if follows:
            draft.counts[name] = chosen.counts[name]
            draft.method = chosen.method
        sequence.draft_count = chosen.counts[name] if follows else len(drafts)
        sequence.is_verifying = sequence.draft_count > 0
        sequence.planned += 1 + sequence.draft_count
        sequence.samples_in_flight += 1
        if follows:
            sequence.draft_row = sequence.planned

    def read_prompts(
        self, draft: PlanBuilder, running: Iterable[Sequence], token_ms: Callable[[int], float]
    ) -> None:
        """Let draft rows read what a plan prefills, no more tokens than that in all.

        Args:
            draft: the plan, its prefill chunks known.
            running: everybody who runs then.
            token_ms: what prefilling a token takes at some place in a prompt; 0: unknown.
        """
        if not draft.chunks or not self.can_roll_back:
            return
        left = draft.chunk_tokens
        sequences = {one.sequence_id: one for one in running}
        for chunk in draft.chunks:
            sequence = sequences[SequenceId(chunk.sequence_id)]
            drafting = self._drafting_of(sequence)
            gap = _gap(sequence, drafting)
            if drafting is None or not gap or not left:
                continue
            tokens_left = sequence.tokens_max - len(sequence.tokens)
            prompt = PromptRow(
                drafts_max=min(drafting.drafts_max, tokens_left - 2),
                gap=len(sequence.tokens) - sequence.draft_row,
                tokens_left=tokens_left,
                token_ms=token_ms(chunk.start),
            )
            if self._speculator.reads_prompt(prompt, len(sequences)):
                count = min(gap, left, limits.FORWARD_TOKENS_MAX)
                _read(draft, sequence, count)
                left -= count

    def planned(self, drafts: PlannedDrafts, read: int) -> bool:
        """Note that a plan was made with these drafts; return whether it had been held back."""
        return self.can_roll_back and self._speculator.planned(drafts, read)

    def verified(self, sequence: Sequence, proposed: int, emitted: int, taken: int) -> None:
        """Take in what became of a running sequence's drafts.

        Args:
            sequence: whose.
            proposed: drafts that the plan had for it.
            emitted: tokens that the receipt has for it, one more than were accepted.
            taken: tokens of these that became part of the completion.
        """
        sequence.planned += emitted - proposed - 1
        sequence.draft_row = min(sequence.draft_row, sequence.planned)
        sequence.is_verifying = False
        self._rolled_back.append(
            RolledBack(sequence_id=sequence.sequence_id, length=sequence.planned)
        )
        if sequence.drafting is not None:
            self._speculator.verified(sequence.drafting, proposed, emitted, taken)

    def finished(self, step: PlannedStep, busy_ms: float, idle_ms: float) -> None:
        """Take in what a step has cost."""
        if self.can_roll_back:
            reads = [len(chunk.tokens) for chunk in step.plan.draft_chunks]
            self._speculator.finished(step.width, busy_ms, idle_ms, held=step.was_held, reads=reads)

    def take_rolled_back(self) -> list[RolledBack]:
        """Return the rows to cut back with the plan that leaves now, once."""
        taken, self._rolled_back = self._rolled_back, []
        return taken

    def report_counters(self) -> dict[str, float]:
        """Return monotonic sums since start."""
        return self._speculator.counters.report()

    def _drafting_of(self, sequence: Sequence) -> Drafting | None:
        if not sequence.has_drafting:
            sequence.has_drafting = True
            wish = sequence.request.speculation
            sequence.drafting = self._speculator.drafting(sequence.tokens, wish)
        return sequence.drafting if self.can_roll_back else None


def _gap(sequence: Sequence, drafting: Drafting | None) -> int:
    """Return how many tokens of a sequence's row its draft row lacks; of a head's row none."""
    if drafting is None or drafting.method != "draft_model":
        return 0
    return sequence.planned - sequence.draft_row


def _read(draft: PlanBuilder, sequence: Sequence, count: int) -> None:
    """Let a draft row read the next tokens of its sequence's row."""
    start, stop = sequence.draft_row, sequence.draft_row + count
    if stop > sequence.computed:
        raise InvariantBroken(f"sequence {sequence.sequence_id} is to read tokens up to {stop}")
    draft.reads.append(
        DraftChunk(
            sequence_id=sequence.sequence_id, start=start, tokens=sequence.tokens[start:stop]
        )
    )
    sequence.draft_row = stop
