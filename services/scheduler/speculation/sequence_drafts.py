"""Draft state of a sequence. Owns its proposer, acceptance rates and counts of drafts."""

import dataclasses

from services.scheduler.speculation.methods import Method, Model
from services.scheduler.speculation.ngram.acceptance import AcceptanceRates, SequenceAcceptance
from services.scheduler.speculation.ngram.proposer import NgramProposer
from services.scheduler.speculation.position_rates import PositionAcceptance, PositionRates


class DraftState:
    """Speculation method and draft counts of one sequence; survives preemption and epochs."""

    __slots__ = ("accepted", "drafts_max", "method", "rejected")

    def __init__(self, method: Method, drafts_max: int) -> None:
        """Start without drafts.

        Args:
            method: method that proposes its drafts.
            drafts_max: most drafts per step.
        """
        self.method = method
        self.drafts_max = drafts_max
        self.accepted = 0
        """Verified drafts that became part of its completion."""
        self.rejected = 0
        """Verified drafts that did not."""


class NgramDraftState(DraftState):
    """State of a sequence whose drafts the scheduler copies from the sequence's own tokens."""

    __slots__ = ("acceptance", "proposer")

    def __init__(self, tokens: list[int], drafts_max: int, common: AcceptanceRates) -> None:
        """Start with an empty n-gram index.

        Args:
            tokens: the sequence's own list, which only grows.
            drafts_max: most drafts per step.
            common: rates of all sequences with this method.
        """
        super().__init__("ngram", drafts_max)
        self.acceptance = SequenceAcceptance(common)
        self.proposer = NgramProposer(tokens, self.acceptance.record)


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
