"""Prompt budget. Owns how many prompt tokens a step prefills; chooses no prompts."""

import math
from collections.abc import Callable

from services.scheduler.batch import chunk_grid
from services.scheduler.batch.step_timing import StepTiming
from shared import limits

_SCRAP_PART = 8
"""A scrap is up to this fraction (1/8) of a step's or a forward's budget, and may exceed it."""
_UNUSED_PART = 3
"""Up to this fraction (1/3) of a step's budget may stay unused, so that a prompt is not cut."""
_PRICE_MAX = 4.0
"""The most budget tokens that one token costs, so that a full budget is always over a scrap."""


class PromptBudget:
    """Counts down the prompt tokens that one step may prefill.

    The budget is in tokens at the position of the step's first chunk. A token deeper in a prompt
    takes longer, so it takes its relative time, 1 to 4 tokens, off the budget. A forward has a
    fixed cost, so small chunks (scraps, up to an eighth of the step's tokens) are avoided: a
    remainder of that size is added to the chunk before it, and a beginning of that size waits for
    the next step. So does a prompt that the next step can take whole, where at most a third of the
    budget is left: on CUDA each chunk of another length, or at another position, may have to be
    prepared first. Other prompts that do not end in the step are cut on the grid of `chunk_grid`.

    With a fixed grid a prompt is cut at multiples of its cell only, so that its chunks do not
    depend on other prompts. A cell that exceeds the budget left waits for the next step; the first
    one of a step may exceed the whole budget.
    """

    def __init__(
        self,
        tokens: int,
        position: int,
        timing: StepTiming,
        *,
        next_tokens: Callable[[int], int] | None = None,
        fixed_grid: bool = False,
    ) -> None:
        """Begin a step.

        Args:
            tokens: budget of the step.
            position: position of the first chunk in its prompt.
            timing: measured step times.
            next_tokens: returns the expected budget of the next step if its first chunk begins at
                a position; None: the same budget.
            fixed_grid: whether the grid is fixed.
        """
        self._fixed_grid, self._is_untouched = fixed_grid, True
        self._tokens = self._left = tokens
        self._next_tokens = next_tokens or (lambda _position: tokens)
        self._scrap = min(tokens, limits.FORWARD_TOKENS_MAX) // _SCRAP_PART
        self._timing = timing
        self._token_ms = timing.prefill_token_ms(position)

    def defers(self, rest: int, position: int) -> bool:
        """Tell whether a prompt's next chunk waits for the next step.

        Args:
            rest: number of tokens of the prompt that are not prefilled.
            position: number of tokens before them.

        Returns:
            True if the budget left permits only a scrap, or no more than a part of a prompt that
            the next step can take whole.
        """
        left = self._fitting(position)
        if self._fixed_grid:
            return not self._is_untouched and left < min(rest, chunk_grid.fixed_length(position))
        if rest <= left + self._scrap:
            return False
        forward = min(self._next_tokens(position), limits.FORWARD_TOKENS_MAX)
        is_whole_then = rest <= forward + forward // _SCRAP_PART
        return left <= self._scrap or (is_whole_then and _UNUSED_PART * self._left <= self._tokens)

    def tokens_max(self, position: int) -> int:
        """Return the most tokens that one prompt may prefill in this step.

        Args:
            position: tokens of the prompt before the chunk; deeper tokens cost more of the budget.
        """
        if self._fixed_grid:
            return chunk_grid.fixed_length(position)
        return min(self._fitting(position), limits.FORWARD_TOKENS_MAX) + self._scrap

    def take(self, rest: int, position: int, length_max: int) -> int:
        """Return the length of a prompt's next chunk in tokens, and take its cost off the budget.

        On the fixed grid that is the rest of the cell, or of the prompt.

        Args:
            rest: number of tokens of the prompt that are not prefilled.
            position: number of tokens before them.
            length_max: most tokens of the chunk, such as up to the next checkpoint.
        """
        length = rest
        self._is_untouched = False
        if self._fixed_grid:
            length = min(rest, chunk_grid.fixed_length(position))
        elif rest > self.tokens_max(position):
            longest = max(1, min(self._fitting(position), limits.FORWARD_TOKENS_MAX))
            length = chunk_grid.round_down(longest, position)
            # Later prompts get no tokens while a long prompt is not finished.
            self._left = min(self._left, self._count(length, position))
        length = min(length, length_max)
        self._left -= self._count(length, position)
        return length

    def _fitting(self, position: int) -> int:
        return int(self._left / self._price(position))

    def _count(self, tokens: int, position: int) -> int:
        return math.ceil(tokens * self._price(position))

    def _price(self, position: int) -> float:
        if not self._token_ms:
            return 1.0
        ratio = self._timing.prefill_token_ms(position) / self._token_ms
        return min(max(1.0, ratio), _PRICE_MAX)
