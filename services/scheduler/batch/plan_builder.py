"""A step in the making, and what is remembered of it until its receipts are back."""

import dataclasses

from services.scheduler.requests.sequence import Sequence
from services.scheduler.speculation.costs import StepWidth
from services.scheduler.speculation.method import Method
from shared.messages import AdmittedSequence, DraftChunk, PrefillChunk, SlotMove, StepPlan


@dataclasses.dataclass(frozen=True, slots=True)
class StepShape:
    """What a step costs depends on this."""

    chunk_tokens: int
    """Tokens of all its prefill chunks."""
    chunk_position: int
    """Where its chunks begin in their prompts, on average over their tokens."""
    decodes: int
    row_count: int
    row_tokens: int
    width: int = 1
    """One more than its longest drafts."""
    method: Method = "ngram"
    """Whose drafts those are."""
    read_tokens: int = 0
    """Tokens that draft rows read."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedStep:
    """A plan and what the scheduler must remember until its receipts are back."""

    plan: StepPlan
    samples: list[Sequence]
    """Who samples a token, in the order of StepFinished.tokens: sampling chunks, then decodes."""
    admitted_first: list[Sequence]
    """Who runs for the first time."""
    shape: StepShape
    width: StepWidth
    """What its drafts cost depends on this; no rows: it has prefill chunks too."""
    was_held: bool
    """It had waited for the results of all plans before it."""

    @property
    def has_drafts(self) -> bool:
        """Tell whether any of `samples` may be more than one token."""
        return bool(self.plan.draft_counts or self.plan.drafts)

    def drafts_of(self, sample: int) -> int:
        """Return how many drafts the plan had for one of `samples`."""
        decode = sample - (len(self.samples) - len(self.plan.decodes))
        if decode < 0:
            return 0
        if self.plan.draft_counts:
            return max(0, self.plan.draft_counts[decode])
        return len(self.plan.drafts[decode]) if self.plan.drafts else 0


@dataclasses.dataclass(slots=True)
class PlanBuilder:
    """A plan in the making."""

    now_s: float
    moves: list[SlotMove] = dataclasses.field(default_factory=list)
    admitted: list[AdmittedSequence] = dataclasses.field(default_factory=list)
    admitted_first: list[Sequence] = dataclasses.field(default_factory=list)
    chunks: list[PrefillChunk] = dataclasses.field(default_factory=list)
    reads: list[DraftChunk] = dataclasses.field(default_factory=list)
    """What draft rows read."""
    drafts: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    """By sequence id what it verifies."""
    counts: dict[int, int] = dataclasses.field(default_factory=dict)
    """By sequence id how many drafts the ranks propose for it; who is not there stays behind."""
    method: Method = "ngram"
    """Whose drafts these are."""
    decodes: list[Sequence] = dataclasses.field(default_factory=list)
    samples: list[Sequence] = dataclasses.field(default_factory=list)
    checkpoints: list[int] = dataclasses.field(default_factory=list)
    """Sequences whose state is set aside as this step leaves it."""
    chunk_tokens: int = 0
    preempted: bool = False

    @property
    def read_tokens(self) -> int:
        """Tokens that draft rows read."""
        return sum(len(chunk.tokens) for chunk in self.reads)

    @property
    def chunk_position(self) -> int:
        """Where the chunks begin in their prompts, on average over their tokens."""
        tokens = sum(chunk.length for chunk in self.chunks)
        return sum(one.start * one.length for one in self.chunks) // tokens if tokens else 0
