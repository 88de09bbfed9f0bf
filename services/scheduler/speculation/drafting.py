"""One sequence as speculation sees it."""

from typing import Literal

from services.scheduler.speculation.acceptance import Acceptance, Rates
from services.scheduler.speculation.ngram import NgramProposer
from services.scheduler.speculation.proposer import Proposer

Method = Literal["ngram"]


class Drafting:
    """Proposes for one sequence, and counts what became of it.

    It outlives preemption and epochs, since the text does; plans in flight it knows nothing of.
    """

    __slots__ = ("acceptance", "accepted", "drafts_max", "method", "proposer", "rejected")

    def __init__(self, tokens: list[int], method: Method, drafts_max: int, common: Rates) -> None:
        """Begin with nothing looked at.

        Args:
            tokens: the sequence's own list; it only grows.
            method: how drafts are proposed.
            drafts_max: most drafts per step.
            common: rates of all sequences with this method.
        """
        self.method = method
        self.drafts_max = drafts_max
        self.acceptance = Acceptance(common)
        self.proposer: Proposer = NgramProposer(tokens, self.acceptance.note)
        self.accepted = 0
        """Tokens of its completion that were drafts first."""
        self.rejected = 0
        """Drafts that were verified and are not part of its completion."""
