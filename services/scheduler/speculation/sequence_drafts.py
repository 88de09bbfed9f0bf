"""Draft state of a sequence. Owns its proposer, acceptance rates and counts of drafts."""

import dataclasses
from collections.abc import Sequence

from services.scheduler.speculation.costs import DecodeWork
from services.scheduler.speculation.methods import Method, Model
from services.scheduler.speculation.ngram.acceptance import AcceptanceRates, SequenceAcceptance
from services.scheduler.speculation.ngram.predicted_text import PredictedText
from services.scheduler.speculation.ngram.proposer import NgramProposer
from services.scheduler.speculation.position_rates import PositionAcceptance, PositionRates


@dataclasses.dataclass(slots=True, eq=False)
class DraftState:
    """Speculation method and draft counts of one sequence; survives preemption and epochs."""

    method: Method
    """Method that proposes its drafts."""
    drafts_max: int
    """Most drafts per step."""
    accepted: int = 0
    """Verified drafts that became part of its completion."""
    rejected: int = 0
    """Verified drafts that did not."""


class NgramDraftState(DraftState):
    """State of a sequence whose drafts the scheduler copies from its tokens or its prediction."""

    __slots__ = ("_predicted", "acceptance", "proposer")

    def __init__(
        self,
        tokens: Sequence[int],
        drafts_max: int,
        common: AcceptanceRates,
        predicted: PredictedText | None = None,
    ) -> None:
        """Start with an empty n-gram index.

        Args:
            tokens: all tokens of the sequence, which only grow.
            drafts_max: most drafts per step.
            common: rates of all sequences with this method.
            predicted: the same tokens with a prediction; None: the client made none.
        """
        super().__init__("ngram", drafts_max)
        self.acceptance = SequenceAcceptance(common)
        self._predicted = predicted
        text = tokens if predicted is None else predicted.text
        self.proposer = NgramProposer(text, self.acceptance.record)

    def extend(self, budget: int) -> int:
        """Take in new tokens, as `NgramProposer.extend`; return how many were indexed."""
        if self._predicted is not None:
            self._predicted.update()
        return self.proposer.extend(budget)


class ModelDraftState(DraftState):
    """State of a sequence whose drafts the ranks propose in the step that verifies them."""

    __slots__ = ("acceptance",)

    def __init__(self, method: Model, drafts_max: int, common: PositionRates) -> None:
        """Start without drafts; `common` are the rates of all sequences with this method."""
        super().__init__(method, drafts_max)
        self.acceptance = PositionAcceptance(common)


@dataclasses.dataclass(frozen=True, slots=True)
class DecodingRow:
    """The facts about one decoding sequence that decide its drafts in the next plan."""

    draft_state: DraftState | None
    """None: it takes no drafts."""
    tokens_in_flight: int
    """Its tokens that are sampled in flight and not known yet."""
    tokens_left: int
    """Tokens until it ends by length, counted from the known tokens."""
    unread_tokens: int = 0
    """Known tokens of its row that its row in the ranks' draft model lacks."""


@dataclasses.dataclass(frozen=True, slots=True)
class PromptRow:
    """The facts about one sequence being prefilled that decide whether the draft model reads it."""

    drafts_max: int
    """Most drafts per step that it may get."""
    unread_tokens: int
    """Tokens of its prompt that its row in the ranks' draft model lacks."""
    tokens_left: int
    """Completion tokens until it ends by length."""
    token_ms: float
    """Milliseconds in which the model prefills one token; 0: unknown."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedDrafts:
    """The drafts of the next plan. Lists are empty or have one entry per decoding row, in order."""

    drafts: list[list[int]] = dataclasses.field(default_factory=list)
    """Drafts to verify, proposed by the scheduler."""
    waits_for_results: bool = False
    """The plan must wait for the results of all plans in flight."""
    counts: list[int] = dataclasses.field(default_factory=list)
    """StepPlan.draft_counts: drafts that the ranks propose; `drafts` is empty then."""
    reads: list[int] = dataclasses.field(default_factory=list)
    """Known tokens that the row of the draft model lacks and reads before it proposes."""
    method: Method = "ngram"
    """Method that proposes the drafts."""
    speedup: float = dataclasses.field(default=0.0, compare=False)
    """Expected tokens per time relative to plain steps, as DraftChoice.speedup; 0 if not known."""

    @property
    def has_drafts(self) -> bool:
        """Tell whether any row has drafts."""
        return any(self.drafts) or max(self.counts, default=-1) > 0

    def decode_work(self, rows: int) -> DecodeWork:
        """Return the rows and drafts of a step with these drafts, by which its costs are recorded.

        Args:
            rows: number of sequences that decode in it; 0 if its cost must not be recorded.
        """
        if not self.counts and not self.drafts:
            return DecodeWork(rows, 1, 0, self.method)
        lengths = [max(0, count) for count in self.counts] or [len(one) for one in self.drafts]
        longest = max(lengths, default=0)
        if self.counts and not longest:
            # Draft rows that only keep up make this no plain step, so its cost is not recorded.
            rows = 0
        return DecodeWork(rows, 1 + longest, sum(map(bool, lengths)), self.method)


PLAIN_PLAN = PlannedDrafts()
"""No drafts and no reads."""
