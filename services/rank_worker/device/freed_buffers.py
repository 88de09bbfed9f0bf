"""Gives freed buffers back: MLX keeps them by size, and rows that grow leave ever new sizes.

Giving back and taking anew is not free, 3 to 8 ms after each long step on a GPU, and now and then
50. So what fits into some memory stays.
"""

import mlx.core as mx

from shared.messages import StepPlan

CLEAR_EVERY_STEPS = 256
CLEAR_EVERY_TOKENS = 2_048
"""Prompts of ever new lengths leave buffers of ever new sizes too."""


class FreedBuffers:
    """Clears MLX's cache of buffers after so many steps or prefilled tokens, if it is large."""

    def __init__(self, bytes_max: int) -> None:
        """Begin.

        Args:
            bytes_max: so much may stay.
        """
        self._bytes_max = bytes_max
        self._steps = 0
        self._tokens = 0

    def note(self, plan: StepPlan) -> None:
        """Take note of a finished step; clear when it is due."""
        self._steps += 1
        self._tokens += sum(one.length for one in plan.prefill_chunks)
        if self._steps >= CLEAR_EVERY_STEPS or self._tokens >= CLEAR_EVERY_TOKENS:
            if mx.get_cache_memory() > self._bytes_max:
                mx.clear_cache()
            self._steps = self._tokens = 0
