"""Spills: resident blocks are written to SSD in the background. Owns the spill queue.

A queued block that is evicted before its turn is lost. A block counts as stored when the stores of
all ranks have it.
"""

import dataclasses
from collections import OrderedDict, deque

from services.scheduler.cache.cache_state import CacheState
from services.scheduler.cache.index.block_index import Entry
from services.scheduler.cache.index.eviction import least_valuable_stored
from shared import limits
from shared.configuration.settings import CacheConfig
from shared.messages import BlocksSpilled, SpillOrder

BACK_OFF_S = 10.0
"""Pause after the stores were off; then a single block shows whether they are on again."""

_EVICT_FIRST_MAX = 32
"""Most stored entries that an order names for full stores to evict."""

_UNSENT_SPARE = 64
"""Queued entries beyond twice the resident ones before evicted entries are removed."""


@dataclasses.dataclass(slots=True)
class _Spill:
    """An entry whose spill was ordered."""

    entry: Entry
    ordered_at_s: float
    reported_ranks: set[int] = dataclasses.field(default_factory=set)
    is_lost: bool = False


class Spiller:
    """Orders ranks to write resident blocks to SSD (spills), and records which are stored."""

    def __init__(self, config: CacheConfig, state: CacheState) -> None:
        """Start with an empty queue.

        Args:
            config: the operator's cache settings.
            state: the cache's shared state.
        """
        self.store_bytes: dict[str, int] = {}
        """Bytes in each host's store, as last reported."""
        self._config = config
        self._state = state
        self._queue: OrderedDict[Entry, None] = OrderedDict()
        self._in_progress: dict[bytes, _Spill] = {}
        self._in_progress_bytes = 0
        self._retry_at_s = 0.0
        self._is_probing = False
        self._evict_first: deque[Entry] = deque()
        """Entries that stores were told to evict first, in order."""
        self._are_stores_full = False

    @property
    def is_busy(self) -> bool:
        """Whether a spill is ordered and not reported, or entries wait for their spill.

        Entries that wait while a store that failed is tried again do not count.
        """
        can_start = bool(self._queue) and not self._is_probing
        return can_start or bool(self._in_progress)

    def offer(self, entry: Entry) -> None:
        """Queue a block or checkpoint to be spilled, unless it is stored or being spilled.

        Args:
            entry: the resident block or checkpoint.
        """
        if entry.is_stored and self._will_expire(entry):
            entry.is_stored = None
        if not self._config.ssd or entry.is_stored or entry.is_spilling:
            return
        self._queue[entry] = None
        if len(self._queue) > 2 * sum(map(len, self._state.index.recency)) + _UNSENT_SPARE:
            # The stores are off, so the queue is not emptied by `order_spills`.
            for evicted in [one for one in self._queue if not one.is_resident]:
                self._lose(evicted)

    def order_spills(self, now_s: float) -> None:
        """Order spills with the plan being built, as many as a message and `spill_bytes_max` allow.

        Args:
            now_s: the scheduler's time in seconds; nothing is ordered during a pause (`back_off`).
        """
        if not self._queue or now_s < self._retry_at_s:
            return
        hashes: list[bytes] = []
        hashes_max = 1 if self._is_probing else limits.BLOCKS_PER_MESSAGE_MAX
        while self._queue and len(hashes) < hashes_max:
            entry = next(iter(self._queue))
            if entry.is_stored or not entry.is_resident:
                self._lose(entry)
                continue
            fits = self._in_progress_bytes + entry.size_bytes <= self._config.spill_bytes_max
            if self._in_progress and (self._is_probing or not fits):
                break
            del self._queue[entry]
            entry.is_spilling = True
            self._in_progress[entry.hash] = _Spill(entry, now_s)
            self._in_progress_bytes += entry.size_bytes
            hashes.append(entry.hash)
        if hashes:
            evict_first: list[Entry] = []
            if self._are_stores_full:
                evict_first = least_valuable_stored(self._state.index, _EVICT_FIRST_MAX)
                self._evict_first = deque(evict_first)
            self._state.orders.spill = SpillOrder(
                namespace=self._state.block_format.namespace,
                hashes=hashes,
                evict_first=[entry.hash for entry in evict_first],
            )

    def handle_spilled(
        self, rank: int, host: str, message: BlocksSpilled, now_s: float
    ) -> float | None:
        """Record which blocks one rank has stored, and which are lost because it could not.

        Args:
            rank: the rank.
            host: the rank's machine, which has a cache store of its own.
            message: the rank's report.
            now_s: the scheduler's time in seconds; after a report of losses only, spills pause from
                then on.

        Returns:
            When the first of its blocks was ordered; None if none of them was.
        """
        known = (self._in_progress.get(one) for one in (*message.stored, *message.lost))
        ordered_at_s = min((one.ordered_at_s for one in known if one is not None), default=None)
        self._state.counters["cache_spill_bytes_total"] += message.bytes_written
        self._state.counters["cache_spill_ms_total"] += message.write_ms
        for block_hash in message.stored:
            self._record(rank, block_hash, lost=False)
        for block_hash in message.lost:
            self._record(rank, block_hash, lost=True)
        if message.lost and not message.stored:
            self.back_off(now_s)
        if message.stored:
            self._update_store(rank, host, message)
        return ordered_at_s

    def back_off(self, now_s: float) -> None:
        """Order no spill for `BACK_OFF_S` seconds, then one block at a time until one is stored.

        Args:
            now_s: the scheduler's time in seconds, at which the pause begins.
        """
        self._retry_at_s = now_s + BACK_OFF_S
        self._is_probing = True

    def end_epoch(self) -> None:
        """Forget the queue and the spills in progress, which no rank will report."""
        self._queue.clear()
        self._in_progress.clear()
        self._in_progress_bytes = 0
        self._evict_first.clear()
        self._retry_at_s, self._is_probing = 0.0, False

    def check_invariants(self) -> None:
        """Assert that exactly the spills in progress are marked and counted."""
        entries = [spill.entry for spill in self._in_progress.values()]
        assert all(entry.is_spilling for entry in entries)
        assert sum(entry.size_bytes for entry in entries) == self._in_progress_bytes
        marked = {one for one in self._state.index.all_entries() if one.is_spilling}
        assert marked == set(entries), (len(marked), len(entries))

    def _record(self, rank: int, block_hash: bytes, *, lost: bool) -> None:
        spill = self._in_progress.get(block_hash)
        if spill is None or rank in spill.reported_ranks:
            return
        spill.reported_ranks.add(rank)
        spill.is_lost = spill.is_lost or lost
        if len(spill.reported_ranks) < self._state.block_format.ranks:
            return
        del self._in_progress[block_hash]
        entry = spill.entry
        self._in_progress_bytes -= entry.size_bytes
        entry.is_spilling = False
        entry.is_stored, entry.stored_at_s = not spill.is_lost, self._state.index.now_s
        if spill.is_lost:
            self._state.counters["cache_blocks_spill_lost_total"] += 1
        else:
            self._is_probing = False
            self._state.counters["cache_blocks_spilled_total"] += 1

    def _will_expire(self, entry: Entry) -> bool:
        """Tell whether half of an entry's time in the stores is over.

        Stores do not see the uses of a block in memory, so that it is written again.
        """
        half_s = self._config.ttl_s / 2.0
        return half_s > 0.0 and self._state.index.now_s - entry.stored_at_s > half_s

    def _lose(self, entry: Entry) -> None:
        del self._queue[entry]
        if not entry.is_stored:
            self._state.counters["cache_blocks_spill_lost_total"] += 1

    def _update_store(self, rank: int, host: str, message: BlocksSpilled) -> None:
        """Infer from a store's size which entries it has evicted."""
        before_bytes = self.store_bytes.get(host, 0)
        self.store_bytes[host] = message.store_bytes
        if rank != 0:
            return
        evicted_bytes = before_bytes + message.bytes_written - message.store_bytes
        self._are_stores_full = evicted_bytes > 0
        while evicted_bytes > 0 and self._evict_first:
            entry = self._evict_first.popleft()
            # The store may have evicted another entry; the next restore finds out.
            entry.is_stored = None
            evicted_bytes -= entry.size_bytes
