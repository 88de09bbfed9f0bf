"""How many tokens of which prompts one step reads."""

import math

from services.scheduler.batch.step_timing import StepTiming
from shared import limits

_SCRAP_PART = 8
"""An eighth of a step's or a forward's budget is a scrap; so much longer may it take than asked
for."""
_PRICE_MAX = 4.0
"""No token counts for more, so that a whole budget is always more than a scrap."""


class PromptBudget:
    """Tokens that a step may still read, priced at the place where its first prompt goes on.

    Further on in a prompt a token takes longer, and counts for as many as that; none counts for
    less than one. A forward has a fixed cost, so nothing shorter than a scrap is cut off a prompt:
    a rest of that size is taken along, and a start of that size waits for the next step.
    """

    def __init__(self, tokens: int, position: int, timing: StepTiming) -> None:
        """Begin a step.

        Args:
            tokens: that it may read.
            position: tokens before the first of them in its prompt.
            timing: what they take.
        """
        self._left = tokens
        self._scrap = min(tokens, limits.FORWARD_TOKENS_MAX) // _SCRAP_PART
        self._timing = timing
        self._token_ms = timing.prefill_token_ms(position)

    def refuses(self, rest: int, position: int) -> bool:
        """Tell whether what is left would cut a scrap off a prompt.

        Args:
            rest: tokens of the prompt that are not read.
            position: tokens before them.
        """
        left = self._fitting(position)
        return left <= self._scrap and rest > left + self._scrap

    def most(self, position: int) -> int:
        """Return how many tokens of one prompt may be read from there on."""
        return min(self._fitting(position), limits.FORWARD_TOKENS_MAX) + self._scrap

    def take(self, rest: int, position: int, border: int) -> int:
        """Return how many tokens of a prompt to read, and count them.

        Args:
            rest: tokens of the prompt that are not read.
            position: tokens before them.
            border: how many of them may be read at most, whatever is left.
        """
        length = rest
        if rest > self.most(position):
            length = min(self._fitting(position), limits.FORWARD_TOKENS_MAX)
            # Who came later does not make the rest of a long prompt wait.
            self._left = min(self._left, self._count(length, position))
        length = min(length, border)
        self._left -= self._count(length, position)
        return length

    def _fitting(self, position: int) -> int:
        return int(self._left / self._price(position))

    def _count(self, tokens: int, position: int) -> int:
        return math.ceil(tokens * self._price(position))

    def _price(self, position: int) -> float:
        if not self._token_ms:
            return 1.0
        dearer = self._timing.prefill_token_ms(position) / self._token_ms
        return min(max(1.0, dearer), _PRICE_MAX)
