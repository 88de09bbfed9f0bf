"""Spiller: what is kept is written to SSD too, in the background and within bounds.

Candidates wait here, resident, until what was ordered before is reported; what is evicted meanwhile
is given up. A block is stored when the stores of all ranks have it.
"""

import dataclasses
from collections import OrderedDict, defaultdict, deque

from services.scheduler.cache.block_orders import PlannedBlockOrders
from services.scheduler.cache.index.block_format import BlockFormat
from services.scheduler.cache.index.block_index import BlockIndex, Entry
from services.scheduler.cache.index.eviction import least_valuable_stored
from shared import limits
from shared.configuration.settings import CacheConfig
from shared.messages import BlocksSpilled, SpillOrder

BACK_OFF_S = 10.0
"""How long nothing is asked of stores that are off; then one block shows whether they are on."""

_EVICT_FIRST = 32
"""Stored ones that an order names for stores that are full."""


@dataclasses.dataclass(slots=True)
class _Flight:
    """An entry whose spill is ordered."""

    entry: Entry
    ranks: set[int] = dataclasses.field(default_factory=set)
    is_lost: bool = False


class Spiller:
    """The candidates, and what is on its way."""

    def __init__(
        self,
        config: CacheConfig,
        index: BlockIndex,
        orders: PlannedBlockOrders,
        counters: defaultdict[str, float],
    ) -> None:
        self.store_bytes: dict[str, int] = {}
        """What the store of each host holds, as it said last."""
        self._config = config
        self._index = index
        self._orders = orders
        self._counters = counters
        self._candidates: OrderedDict[Entry, None] = OrderedDict()
        self._flights: dict[bytes, _Flight] = {}
        self._flying_bytes = 0
        self._retry_at_s = 0.0
        self._is_probing = False
        self._named: deque[Entry] = deque()
        """What stores were told to give up first, in order."""
        self._stores_are_full = False

    @property
    def is_busy(self) -> bool:
        """Tell whether something is being written, or could be."""
        waits = bool(self._candidates) and not self._is_probing
        return waits or bool(self._flights)

    def offer(self, entry: Entry) -> None:
        """Have an entry written that has just become resident, or was found resident again."""
        if not self._config.ssd or entry.is_stored or entry.is_spilling:
            return
        self._candidates[entry] = None
        if len(self._candidates) > 2 * len(self._index.recency) + 64:
            # Stores are off: what was evicted meanwhile is not waited for.
            for one in [one for one in self._candidates if not one.is_resident]:
                self._give_up(one)

    def order(self, form: BlockFormat, now_s: float) -> None:
        """Order what fits to be written, with the plan in the making."""
        if not self._candidates or now_s < self._retry_at_s:
            return
        names: list[bytes] = []
        most = 1 if self._is_probing else limits.BLOCKS_PER_MESSAGE_MAX
        while self._candidates and len(names) < most:
            entry = next(iter(self._candidates))
            if entry.is_stored or not entry.is_resident:
                self._give_up(entry)
                continue
            fits = self._flying_bytes + entry.size_bytes <= self._config.spill_bytes_max
            if self._flights and (self._is_probing or not fits):
                break
            del self._candidates[entry]
            entry.is_spilling = True
            self._flights[entry.hash] = _Flight(entry)
            self._flying_bytes += entry.size_bytes
            names.append(entry.hash)
        if names:
            first = self._name_least_valuable() if self._stores_are_full else []
            self._orders.spill = SpillOrder(
                namespace=form.namespace, hashes=names, evict_first=first
            )

    def report(
        self, form: BlockFormat, rank: int, host: str, message: BlocksSpilled, now_s: float
    ) -> None:
        """Take in what became of blocks on one rank."""
        self._counters["cache_spill_bytes_total"] += message.bytes_written
        self._counters["cache_spill_ms_total"] += message.write_ms
        for name in message.stored:
            self._settle(form, rank, name, lost=False)
        for name in message.lost:
            self._settle(form, rank, name, lost=True)
        if message.lost and not message.stored:
            self.back_off(now_s)
        if message.stored:
            self._note_store(rank, host, message)

    def back_off(self, now_s: float) -> None:
        """Ask nothing of the stores for a while."""
        self._retry_at_s = now_s + BACK_OFF_S
        self._is_probing = True

    def end_epoch(self) -> None:
        """Forget what is on its way: nobody will report it."""
        self._candidates.clear()
        self._flights.clear()
        self._flying_bytes = 0
        self._named.clear()
        self._retry_at_s, self._is_probing = 0.0, False

    def check_invariants(self) -> None:
        """Assert that what is marked as being spilled is on its way, and nothing else."""
        flying = [flight.entry for flight in self._flights.values()]
        assert all(entry.is_spilling for entry in flying)
        assert sum(entry.size_bytes for entry in flying) == self._flying_bytes
        marked = {one for one in self._index.all_entries() if one.is_spilling}
        assert marked == set(flying), (len(marked), len(flying))

    def _settle(self, form: BlockFormat, rank: int, name: bytes, *, lost: bool) -> None:
        flight = self._flights.get(name)
        if flight is None or rank in flight.ranks:
            return
        flight.ranks.add(rank)
        flight.is_lost = flight.is_lost or lost
        if len(flight.ranks) < form.ranks:
            return
        del self._flights[name]
        entry = flight.entry
        self._flying_bytes -= entry.size_bytes
        entry.is_spilling = False
        entry.is_stored = not flight.is_lost
        if flight.is_lost:
            self._counters["cache_blocks_spill_lost_total"] += 1
        else:
            self._is_probing = False
            self._counters["cache_blocks_spilled_total"] += 1

    def _give_up(self, entry: Entry) -> None:
        del self._candidates[entry]
        if not entry.is_stored:
            self._counters["cache_blocks_spill_lost_total"] += 1

    def _name_least_valuable(self) -> list[bytes]:
        entries = least_valuable_stored(self._index, _EVICT_FIRST)
        self._named = deque(entries)
        return [entry.hash for entry in entries]

    def _note_store(self, rank: int, host: str, message: BlocksSpilled) -> None:
        """Learn from the size of a store what it has given up."""
        before = self.store_bytes.get(host, 0)
        self.store_bytes[host] = message.store_bytes
        if rank != 0:
            return
        gone = before + message.bytes_written - message.store_bytes
        self._stores_are_full = gone > 0
        while gone > 0 and self._named:
            entry = self._named.popleft()
            # Perhaps it is gone, perhaps another one is: whoever wants it asks.
            entry.is_stored = None
            gone -= entry.size_bytes
