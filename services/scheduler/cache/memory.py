"""The memory of resident blocks: its bound, making room, and giving way to rows. Pure accounting.

Rows and blocks share one budget, that of the poorest rank. Blocks may take up to a bound of their
own, as far as rows leave it; rows that must grow take it back. Everything is counted as it stands
when the plan in the making has been applied.
"""

from services.scheduler.cache.block_orders import PlannedBlockOrders
from services.scheduler.cache.index.block_index import BlockIndex, Entry
from services.scheduler.cache.index.eviction import choose_victims
from services.scheduler.cache.kv_rows import Rows
from services.scheduler.cache.pins import BlockPins
from shared.errors import InvariantBroken


class BlockMemory:
    """How many bytes per rank blocks take, and who goes when they are too many."""

    def __init__(
        self, index: BlockIndex, pins: BlockPins, orders: PlannedBlockOrders, rows: Rows
    ) -> None:
        self.bytes_max = 0
        """The blocks' own bound."""
        self.reserved_bytes = 0
        """Set apart for restores that are not adopted yet; rows may take it all the same."""
        self.evictions = 0
        self._index = index
        self._pins = pins
        self._orders = orders
        self._rows = rows

    @property
    def held_bytes(self) -> int:
        """What blocks and checkpoints take now."""
        return self._index.resident_bytes

    @property
    def limit(self) -> int:
        """What they may take: the bound, or what rows leave."""
        return min(self.bytes_max, self._rows.bytes_left)

    @property
    def free_bytes(self) -> int:
        """What can be kept or restored without evicting anything; below 0 when rows took it."""
        return self.limit - self._index.resident_bytes - self.reserved_bytes

    def make_room(self, size_bytes: int, *, system: bool = False) -> bool:
        """Evict what is less valuable until so many bytes are free; False when that cannot be.

        Args:
            size_bytes: how much memory is wanted per rank.
            system: it is for a system prompt, before which other system prompts may go.
        """
        missing = size_bytes - self.free_bytes
        if missing <= 0:
            return True
        if size_bytes > self.limit:
            return False
        # System prompts that changed every day would fill the memory for good otherwise.
        system = system or 2 * self._index.system_bytes > self.bytes_max
        victims = choose_victims(self._index, missing, system=system)
        if victims is None:
            return False
        self.evict(victims)
        return True

    def shrink_to(self, bytes_max: int) -> bool:
        """Give memory back to rows until blocks take at most this; False when that cannot be."""
        missing = self._index.resident_bytes - bytes_max
        if missing <= 0:
            return True
        victims = choose_victims(self._index, missing, system=True) or choose_victims(
            self._index, missing, system=True, force=True
        )
        if victims is None:
            return False
        self.evict(victims)
        return True

    def evict(self, entries: list[Entry]) -> None:
        """Have all ranks forget entries with the plan in the making."""
        for entry in entries:
            self._pins.give_up(entry)
            self._index.set_resident(entry, resident=False)
            self._orders.evict(entry.hash)
        self.evictions += len(entries)

    def check_invariants(self) -> None:
        """Raise InvariantBroken when blocks take more than they may."""
        if self._index.resident_bytes > self.limit:
            raise InvariantBroken(
                f"blocks take {self._index.resident_bytes} bytes of {self.limit} that they may"
            )
