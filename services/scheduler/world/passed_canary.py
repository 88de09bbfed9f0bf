"""The last canary that has passed. Owns for which ranks its long prompt need not run again. Pure.

The prompt delays each recovery, and finds faults of links, devices and libraries. Those have not
changed when a process takes the place of one that was killed.
"""

from collections.abc import Sequence

from shared.messages import RankHello
from shared.messages.base import Sharding
from shared.messages.rank_link import Backend

VALID_S = 3_600.0
"""How long a passed prompt counts."""


class PassedCanary:
    """The ranks whose canary has passed, prompt included, and when."""

    def __init__(self, sharding: Sharding) -> None:
        """Begin without any.

        Args:
            sharding: how the model is split.
        """
        # Shares of layers and experts follow from the ranks' memory.
        self._depends_on_memory = sharding not in ("none", "tensor")
        self.doubts = 0
        """How often the results of ranks were in doubt."""
        self._world: object = None
        """Backend and machines that have passed."""
        self._passed_at_s = 0.0

    def note(self, backend: Backend, ranks: Sequence[RankHello], now_s: float) -> None:
        """Note that the canary of a world has passed.

        Args:
            backend: of the world's collectives.
            ranks: its processes, in rank order.
            now_s: the monotonic time in seconds.
        """
        # Without its prompt it extends nothing, or no prompt would ever run again.
        if not self.covers(backend, ranks, now_s):
            self._world, self._passed_at_s = self._describe(backend, ranks), now_s

    def forget(self) -> None:
        """Let the next canary run whole, because results of its ranks are in doubt."""
        self._world = None
        self.doubts += 1

    def covers(self, backend: Backend, ranks: Sequence[RankHello], now_s: float) -> bool:
        """Tell whether equal devices, with equal code and shards, have passed within the hour.

        Args:
            backend: of the world's collectives.
            ranks: its processes, in rank order.
            now_s: the monotonic time in seconds.
        """
        is_recent = now_s - self._passed_at_s < VALID_S
        is_known = all(one.build for one in ranks)
        return is_recent and is_known and self._world == self._describe(backend, ranks)

    def _describe(self, backend: Backend, ranks: Sequence[RankHello]) -> object:
        machines = [
            (one.host, one.device, one.mlx_version, one.build, one.fast_synch) for one in ranks
        ]
        return backend, machines, self._depends_on_memory and [one.memory_bytes for one in ranks]
