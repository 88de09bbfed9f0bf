"""What every method of proposing drafts can do, for one sequence."""

from collections.abc import Callable
from typing import Protocol

Judge = Callable[[int, bool], None]
"""Told of every token that could have been proposed: how much spoke for it (tokens matched, for
one) and whether it was the one that came."""


class SequenceProposer(Protocol):
    """Proposes what may follow a sequence's known tokens.

    Drafts never change which tokens come. So a proposer can be judged by every token that comes,
    whether or not it was proposed: probing costs no step.
    """

    @property
    def matched(self) -> int:
        """How much speaks for the next proposal, in tokens that it was found by; 0: there is none.

        Counts what is known; a proposal for later positions has one more per token that came true.
        """

    def reset(self, tokens: list[int]) -> None:
        """Begin with another text.

        Args:
            tokens: the sequence's own list, not copied. It only grows, and by `extend` alone is
                looked at again.
        """

    def extend(self, budget: int) -> int:
        """Take in what the list has grown by, judging it.

        Args:
            budget: tokens of work that may be done now; what is left is done next time.

        Returns:
            Tokens of work done.
        """

    def propose(self, count: int) -> list[int]:
        """Return up to `count` tokens that may come next, none when nothing is known."""
