"""Frees buffers that MLX keeps for reuse, because growing rows leave buffers of many sizes.

Freeing and allocating again takes 3 to 8 ms after a long step on a GPU, sometimes 50. So buffers
are kept up to a limit.
"""

import mlx.core as mx

from shared.messages import StepPlan

CLEAR_EVERY_STEPS = 256
CLEAR_EVERY_TOKENS = 2_048
"""Prompts of many lengths leave buffers of many sizes too."""


class FreedBuffers:
    """Empties MLX's cache of freed buffers regularly, if it is larger than a limit.

    The cache is compared with the limit every 256 steps or 2,048 prefilled tokens.
    """

    def __init__(self, bytes_max: int) -> None:
        """Start counting steps.

        Args:
            bytes_max: a cache of at most this size is kept.
        """
        self._bytes_max = bytes_max
        self._steps = 0
        self._tokens = 0

    def step_finished(self, plan: StepPlan) -> None:
        """Count a finished step; after 256 steps or 2,048 prefilled tokens check the cache.

        A cache above the limit is emptied, and the counts begin again at 0.

        Args:
            plan: of the finished step; its prefilled tokens are counted.
        """
        self._steps += 1
        self._tokens += sum(one.length for one in plan.prefill_chunks)
        if self._steps >= CLEAR_EVERY_STEPS or self._tokens >= CLEAR_EVERY_TOKENS:
            if mx.get_cache_memory() > self._bytes_max:
                mx.clear_cache()
            self._steps = self._tokens = 0
