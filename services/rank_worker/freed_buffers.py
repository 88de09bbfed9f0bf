"""Gives freed buffers back: MLX keeps them by size, and rows that grow leave ever new sizes."""

import mlx.core as mx

from shared.messages import StepPlan

CLEAR_EVERY_STEPS = 256
CLEAR_EVERY_TOKENS = 2_048
"""Prompts of ever new lengths leave buffers of ever new sizes too."""


class FreedBuffers:
    """Clears MLX's cache of buffers after so many steps or prefilled tokens."""

    def __init__(self) -> None:
        self._steps = 0
        self._tokens = 0

    def note(self, plan: StepPlan) -> None:
        """Take note of a finished step; clear when it is due."""
        self._steps += 1
        self._tokens += sum(one.length for one in plan.prefill_chunks)
        if self._steps >= CLEAR_EVERY_STEPS or self._tokens >= CLEAR_EVERY_TOKENS:
            mx.clear_cache()
            self._steps = self._tokens = 0
