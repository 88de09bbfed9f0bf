"""One sequence as speculation sees it."""

from services.scheduler.speculation.acceptance import Acceptance, AcceptanceRates
from services.scheduler.speculation.method import Method, Model
from services.scheduler.speculation.ngram.interface import SequenceProposer
from services.scheduler.speculation.ngram.proposer import NgramProposer
from services.scheduler.speculation.position_rates import PositionAcceptance, PositionRates


class Drafting:
    """Counts what became of one sequence's drafts.

    It outlives preemption and epochs, since the text does; plans in flight it knows nothing of.
    """

    __slots__ = ("accepted", "drafts_max", "method", "rejected")

    def __init__(self, method: Method, drafts_max: int) -> None:
        """Begin with nothing proposed.

        Args:
            method: how drafts are proposed.
            drafts_max: most drafts per step.
        """
        self.method = method
        self.drafts_max = drafts_max
        self.accepted = 0
        """Tokens of its completion that were drafts first."""
        self.rejected = 0
        """Drafts that were verified and are not part of its completion."""


class NgramDrafting(Drafting):
    """Drafts are proposed here, from the sequence's own tokens."""

    __slots__ = ("acceptance", "proposer")

    def __init__(self, tokens: list[int], drafts_max: int, common: AcceptanceRates) -> None:
        """Begin with nothing looked at.

        Args:
            tokens: the sequence's own list; it only grows.
            drafts_max: most drafts per step.
            common: rates of all sequences with this method.
        """
        super().__init__("ngram", drafts_max)
        self.acceptance = Acceptance(common)
        self.proposer: SequenceProposer = NgramProposer(tokens, self.acceptance.note)


class ModelDrafting(Drafting):
    """Drafts are proposed by the ranks, in the step that verifies them."""

    __slots__ = ("acceptance",)

    def __init__(self, method: Model, drafts_max: int, common: PositionRates) -> None:
        """Begin with nothing proposed; `common`: rates of all sequences with this method."""
        super().__init__(method, drafts_max)
        self.acceptance = PositionAcceptance(common)
