"""Plan builder. Owns the parts of a step plan and the facts needed for its receipts.

What every step needs anew is a struct: making one takes a tenth of the time of a frozen dataclass.
"""

import dataclasses

from msgspec import Struct

from services.scheduler.requests.sequence import Sequence
from services.scheduler.speculation.costs import DecodeWork
from services.scheduler.speculation.methods import Method
from services.scheduler.speculation.sequence_drafts import PLAIN_PLAN, PlannedDrafts
from shared.identifiers import SequenceId
from shared.messages import AdmittedSequence, DraftChunk, PrefillChunk, SlotMove, StepPlan


class StepWork(Struct, frozen=True):
    """The numbers of tokens and rows in a step that decide how long it takes."""

    chunk_tokens: int
    """Tokens of all prefill chunks."""
    chunk_position: int
    """Mean start of the chunks in their prompts in tokens, weighted by length; 0: no chunks."""
    decodes: int
    """Sequences that decode."""
    row_count: int
    """Rows that the KV cache of each rank has, used or not."""
    row_tokens: int
    """Capacity of each of these rows in tokens."""
    width: int = 1
    """Tokens per decoding row: one, and the most drafts of a row."""
    method: Method = "ngram"
    """Method that proposed the drafts."""
    read_tokens: int = 0
    """Known tokens that rows of the ranks' draft model read, which they lack."""


class PlannedStep(Struct, frozen=True):
    """A plan, the sequences that it samples, and its amounts of work, until its receipts arrive."""

    plan: StepPlan
    samples: list[Sequence]
    """Sequences that sample, in the order of StepFinished.tokens: sampling chunks, then decodes."""
    first_admitted: list[Sequence]
    """Sequences that were never admitted before."""
    work: StepWork
    decode_work: DecodeWork
    """The work of its decodes; 0 rows if the step has prefill chunks too."""
    was_held: bool
    """The plan was held back until all earlier plans had results."""

    @property
    def has_drafts(self) -> bool:
        """Tell whether any row has drafts, so that a sample may be more than one token."""
        return bool(self.plan.draft_counts or self.plan.drafts)

    def drafts_of(self, sample: int) -> int:
        """Return the number of drafts in the plan for one sample.

        Args:
            sample: index into `samples`; a prefill chunk's sample has no drafts.
        """
        decode = sample - (len(self.samples) - len(self.plan.decodes))
        if decode < 0:
            return 0
        if self.plan.draft_counts:
            return max(0, self.plan.draft_counts[decode])
        return len(self.plan.drafts[decode]) if self.plan.drafts else 0


@dataclasses.dataclass(frozen=True, slots=True)
class ChosenDrafts:
    """Drafts for the next plan, by sequence."""

    by_sequence: dict[SequenceId, list[int]] = dataclasses.field(default_factory=dict)
    """Drafts proposed by the scheduler, of the sequences that have any."""
    counts: dict[SequenceId, int] = dataclasses.field(default_factory=dict)
    """Drafts that the ranks propose, of the sequences whose draft rows take part in the plan. With
    any entry here, `by_sequence` is empty."""
    reads: dict[SequenceId, int] = dataclasses.field(default_factory=dict)
    """Tokens that rows of the draft model read before they propose."""
    method: Method = "ngram"
    """Method that proposes the drafts."""

    @property
    def longest(self) -> int:
        """The most drafts of one sequence."""
        if self is NO_DRAFTS:
            return 0
        return max([*map(len, self.by_sequence.values()), *self.counts.values()], default=0)

    def of(self, decodes: list[Sequence]) -> PlannedDrafts:
        """Return the drafts of a plan's decodes, in their order.

        Args:
            decodes: the sequences that decode, at least those with drafts that were not preempted.
        """
        if self is NO_DRAFTS:
            return PLAIN_PLAN
        ids = [one.sequence_id for one in decodes]
        if not self.counts.keys().isdisjoint(ids):
            counts = [self.counts.get(one, -1) for one in ids]
            return PlannedDrafts(counts=counts, method=self.method)
        if not self.by_sequence.keys().isdisjoint(ids):
            return PlannedDrafts([self.by_sequence.get(one, []) for one in ids])
        return PLAIN_PLAN


NO_DRAFTS = ChosenDrafts()


class PlanBuilder(Struct):
    """Collects the moves, admissions, prefill chunks, decodes and drafts of the next step plan."""

    step_id: int
    """Number of the step in its epoch."""
    now_s: float
    """When the plan is made, in seconds."""
    chosen: ChosenDrafts
    """Drafts of the sequences that decode."""
    moves: list[SlotMove] = []
    admitted: list[AdmittedSequence] = []
    first_admitted: list[Sequence] = []
    """Those of the admitted sequences that were never admitted before."""
    chunks: list[PrefillChunk] = []
    draft_reads: list[DraftChunk] = []
    """Known tokens that rows of the draft model read."""
    decodes: list[Sequence] = []
    samples: list[Sequence] = []
    """Sequences whose last prefill chunk is in the plan, so that it samples a token for them."""
    checkpoints: list[int] = []
    """Ids of sequences whose state is saved at the end of this step."""
    chunk_tokens: int = 0
    """Tokens of all prefill chunks."""
    preempted: bool = False
    """A sequence was preempted for this plan, because memory was used up."""
    displaced: Sequence | None = None
    """The sequence that was preempted for another tenant's; its row is dropped with this plan, so
    only a later one can admit it again."""

    @property
    def read_tokens(self) -> int:
        """Number of known tokens that rows of the ranks' draft model read in this plan."""
        return sum([len(chunk.tokens) for chunk in self.draft_reads])

    @property
    def chunk_position(self) -> int:
        """Mean start of the chunks in their prompts in tokens, weighted by length; 0: no chunks."""
        if not self.chunks:
            return 0
        return sum(one.start * one.length for one in self.chunks) // self.chunk_tokens
