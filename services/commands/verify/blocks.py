"""Checks of a long prompt's blocks: stored on every rank, reused, restored from SSD."""

import time
from collections.abc import Callable

from services.commands.verify import judging
from services.commands.verify.cluster_checks import VerifiedCluster
from services.commands.verify.gateway import HttpAnswer
from services.commands.verify.judging import TimedCheck
from shared.clock import SystemClock

BLOCKS = 2.5
"""Length of the prompt: two whole blocks and a part."""

STORED_S = 15.0
"""Time limit for blocks to reach the disks; they are written in the background."""

POLL_S = 0.1

FIRST_ID, IDS = 32, 128
"""Range of token ids in the prompt: every vocabulary has them, and few are special."""


class LongPrompt:
    """Checks that blocks of a prompt are stored, reused from the cache, and restored from SSD.

    All send the same prompt, two and a half blocks long, of which the cache has no block at first.
    """

    def __init__(self, cluster: VerifiedCluster) -> None:
        self._cluster = cluster
        self._salt = cluster.fresh_salt()
        self._length = int(BLOCKS * cluster.config.cache.block_tokens)
        self._first: HttpAnswer | None = None

    def by_name(self) -> list[tuple[str, Callable[[], TimedCheck]]]:
        """Return the name and the function of each check but `restore`, in order."""
        return [(judging.STORED, self._store), (judging.REUSED, self._reuse)]

    def skip_reason(self, name: str) -> str:
        """Return why a check must be skipped: no cache, no SSD, or too short a context.

        Args:
            name: name of the check.

        Returns:
            The reason; "" if the check can run.

        Raises:
            UnavailableError: when the scheduler does not answer.
        """
        cache = self._cluster.config.cache
        if not cache.enabled:
            return "cache.enabled is off"
        if name != judging.REUSED and not cache.ssd:
            return "cache.ssd is off"
        if self._length >= self._cluster.status().context_tokens_max:
            return f"the context has no room for {self._length} tokens"
        return ""

    def restore(self) -> TimedCheck:
        """Send the prompt again; check that some of its tokens are restored from SSD.

        The caller has restarted all ranks, so that no block is left in memory.

        Raises:
            UnavailableError: when the scheduler does not answer.
            NoAnswer: when the gateway does not complete the request.
        """
        if why := self.skip_reason(judging.RESTORED):
            return judging.skipped(judging.RESTORED, why)
        return judging.restored(self._ask())

    def _store(self) -> TimedCheck:
        if why := self.skip_reason(judging.STORED):
            return judging.skipped(judging.STORED, why)
        clock, cluster = SystemClock(), self._cluster
        before = cluster.status()
        self._first = self._ask()
        began_s = clock.now()
        written = lost = 0
        while written < int(BLOCKS) and not lost and clock.now() - began_s < STORED_S:
            time.sleep(POLL_S)
            now = cluster.status()
            written = judging.counter_growth(before, now, "cache_blocks_spilled_total")
            lost = judging.counter_growth(before, now, "cache_blocks_spill_lost_total")
        waited_s = clock.now() - began_s
        return judging.stored(written, lost, before.world_size, waited_s)

    def _reuse(self) -> TimedCheck:
        if why := self.skip_reason(judging.REUSED):
            return judging.skipped(judging.REUSED, why)
        return judging.reused(self._first or self._ask(), self._ask())

    def _ask(self) -> HttpAnswer:
        ids = [FIRST_ID + (place * place + place // 7) % IDS for place in range(self._length)]
        return self._cluster.gateway.complete(prompt=ids, max_tokens=1, cache_salt=self._salt)
