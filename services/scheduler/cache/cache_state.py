"""The cache's shared state. Owns index, references, memory bound, block orders and counters.

All parts of the cache share it. It describes the ranks as they are once all sent plans and the plan
being built are applied.
"""

from collections import defaultdict

from msgspec import Struct

from services.scheduler.cache.index.block_format import BlockFormat
from services.scheduler.cache.index.block_index import BlockIndex, Entry, Node
from services.scheduler.cache.index.eviction import (
    choose_expired,
    choose_forgotten,
    choose_victims,
)
from services.scheduler.cache.index.sequence_blocks import UNREACHABLE_TOKENS, SequenceBlocks
from services.scheduler.cache.kv_rows import Rows
from services.scheduler.cache.pins import BlockPins
from shared.errors import InvariantBroken
from shared.messages import AdoptedRestore, KeptBlock, KeptCheckpoint, SpillOrder

_LOW_MEMORY_SHARE = 8
"""Memory is low when less than an eighth of the blocks' bound is free."""

_PLACES_SHARE = 1_024
"""A full index gives up a 1,024th of its blocks at once, because the search for them costs more
than the eviction."""

COUNTERS = (
    "cache_blocks_kept_total",
    "cache_blocks_restored_total",
    "cache_blocks_spill_lost_total",
    "cache_blocks_spilled_total",
    "cache_checkpoints_kept_total",
    "cache_hit_tokens_memory_total",
    "cache_hit_tokens_ssd_total",
    *(
        f"cache_miss_tokens_{cause}_total"
        for cause in ("diverged", "end", "evicted", "new", "slow", "unreadable")
    ),
    "cache_restore_bytes_total",
    "cache_restore_ms_total",
    "cache_restores_late_total",
    "cache_restores_total",
    "cache_spill_bytes_total",
    "cache_spill_ms_total",
)
"""Counters that are reported from the start, as 0."""


class PlannedBlockOrders(Struct):
    """The fields of a StepPlan that concern blocks, in the order in which ranks apply them."""

    keep_blocks: list[KeptBlock] = []
    keep_checkpoints: list[KeptCheckpoint] = []
    adopted: list[AdoptedRestore] = []
    spill: SpillOrder | None = None
    evicted: dict[bytes, None] = {}
    """Hashes in insertion order."""

    def __bool__(self) -> bool:
        """Return True when the plan has an order about blocks."""
        return bool(
            self.keep_blocks
            or self.keep_checkpoints
            or self.adopted
            or self.evicted
            or self.spill is not None
        )


class CacheState:
    """Which blocks are resident, who needs them, and what the next plan orders about them.

    Rows and blocks share the KV memory of each rank, sized by the rank with the least. Blocks may
    use up to a bound of their own (`bytes_max`) of the memory that rows leave; when rows grow,
    blocks are evicted.
    """

    def __init__(self, rows: Rows, *, is_enabled: bool = True, grid_tokens: int = 1) -> None:
        """Start without ranks: no block is resident.

        Args:
            rows: the KV rows that share the memory budget.
            is_enabled: report all counters from the start.
            grid_tokens: rows reuse a multiple of this number of tokens. With more than 1, blocks
                hold tokens of prompts only, up to the last such multiple.
        """
        self.grid_tokens = grid_tokens
        self.index = BlockIndex()
        self.pins = BlockPins()
        self.orders = PlannedBlockOrders()
        self.counters = defaultdict(float, cache_blocks_evicted_total=0.0)
        """Counts of blocks, tokens, bytes and milliseconds since start, by name of the metric."""
        if is_enabled:
            self.counters.update(dict.fromkeys(COUNTERS, 0.0))
        self.epoch = 0
        self.bytes_max = 0
        """The blocks' own bound, in bytes per rank."""
        self.reserved_bytes = 0
        """Reserved for restores that are not adopted yet. Rows may take this memory."""
        self._format: BlockFormat | None = None
        self._namespace = ""
        self._rows = rows
        rows.others = self

    def kept_tokens_max(self, blocks: SequenceBlocks) -> int:
        """Return how many leading tokens of a sequence blocks may hold."""
        grid = self.grid_tokens
        return UNREACHABLE_TOKENS if grid == 1 else blocks.prompt_tokens // grid * grid

    # --- epochs ------------------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        """Whether blocks are kept in this epoch."""
        return self._format is not None

    @property
    def block_format(self) -> BlockFormat:
        """The block format of this epoch. The cache must be on."""
        assert self._format is not None
        return self._format

    def start_epoch(self, block_format: BlockFormat | None, epoch: int) -> None:
        """Start an epoch without resident blocks; with another namespace forget all known blocks.

        Args:
            block_format: format of blocks; None: no blocks are kept in this epoch.
            epoch: number of the epoch.
        """
        self._format, self.epoch = block_format, epoch
        if block_format is None:
            return
        self.bytes_max = block_format.bytes_max
        if self._namespace not in ("", block_format.namespace):
            self.index.clear()
        self._namespace = block_format.namespace
        self.index.set_bound(block_format.nodes_max)

    def end_epoch(self) -> None:
        """End the epoch: no block is resident or protected any more, no order is pending.

        The index keeps the tokens of all blocks, and which are stored on SSD, for the next epoch.
        """
        self.pins.clear()
        self.orders = PlannedBlockOrders()
        self.index.end_epoch()
        self.reserved_bytes = 0
        self._format = None

    # --- memory ------------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """Bytes per rank of all resident blocks and checkpoints."""
        return self.index.resident_bytes

    @property
    def limit_bytes(self) -> int:
        """Most bytes per rank that blocks may use: `bytes_max`, or less if rows leave less."""
        return min(self.bytes_max, self._rows.bytes_left)

    @property
    def free_bytes(self) -> int:
        """Bytes per rank for new blocks without an eviction; negative after rows took memory.

        Memory reserved for restores does not count as free.
        """
        return self.limit_bytes - self.index.resident_bytes - self.reserved_bytes

    @property
    def is_memory_low(self) -> bool:
        """Whether rows limit the blocks' memory and less than an eighth of `bytes_max` is free."""
        if not self.is_on or self._rows.bytes_left >= self.bytes_max:
            return False
        return self.free_bytes < self.bytes_max // _LOW_MEMORY_SHARE

    def make_room(self, size_bytes: int, *, system: bool = False) -> bool:
        """Evict blocks and checkpoints, least valuable first, until `size_bytes` are free.

        Args:
            size_bytes: memory needed per rank.
            system: the memory is for a system prompt, which may replace other system prompts.

        Returns:
            False, and nothing is evicted, when there cannot be enough memory.
        """
        missing = size_bytes - self.free_bytes
        if missing <= 0:
            return True
        if size_bytes > self.limit_bytes:
            return False
        # System prompts that change every day would fill the memory for good otherwise.
        system = system or 2 * self.index.system_bytes > self.bytes_max
        victims = choose_victims(self.index, missing, system=system)
        if victims is None:
            return False
        self.evict(victims)
        return True

    def shrink_to(self, bytes_max: int) -> bool:
        """Evict until blocks use at most `bytes_max` per rank, so that rows can grow.

        Returns:
            False, and nothing is evicted, when the plan being built needs too many blocks.
        """
        missing = self.index.resident_bytes - bytes_max
        if missing <= 0:
            return True
        victims = choose_victims(self.index, missing, system=True) or choose_victims(
            self.index, missing, system=True, force=True
        )
        if victims is None:
            return False
        self.evict(victims)
        return True

    def evict(self, entries: list[Entry]) -> None:
        """Order all ranks to evict blocks and checkpoints, and release them for every holder."""
        for entry in entries:
            self.pins.release_entry(entry)
            self.index.set_resident(entry, resident=False)
            self.orders.evicted[entry.hash] = None
        self.counters["cache_blocks_evicted_total"] += len(entries)

    def expire(self, used_before_s: float) -> None:
        """Evict and forget blocks that were last used before a time; those in use stay.

        Args:
            used_before_s: that time, in seconds.
        """
        self.evict(choose_expired(self.index, used_before_s))
        self.index.forget_unused(used_before_s)

    def add_block(
        self,
        parent: Node,
        block_hash: bytes,
        tokens: bytes,
        size_bytes: int,
        *,
        may_evict: bool = True,
    ) -> Node | None:
        """Return a block of the index; if it is not known, add it as neither resident nor stored.

        A full index forgets blocks without a copy for it, then evicts the least recently used
        resident ones and forgets them. A forgotten block that is stored is found again when its
        tokens are asked for, because then the stores are asked too.

        Args:
            parent: the block before it, or a root.
            block_hash: hash of the block.
            tokens: its packed token ids.
            size_bytes: its bytes on the rank where it is largest.
            may_evict: a plan is being built, so blocks can be evicted.

        Returns:
            None when the index is full of blocks that are needed.
        """
        index = self.index
        node = index.add(parent, block_hash, tokens, size_bytes)
        if node is not None or not may_evict or not index.is_full:
            return node
        count = max(1, index.nodes_max // _PLACES_SHARE)
        for forgotten in choose_forgotten(index, parent, count):
            # The checkpoint goes before its block.
            self.evict([one for one in reversed([*forgotten.entries]) if one.is_resident])
            index.forget(forgotten)
        return index.add(parent, block_hash, tokens, size_bytes)

    # --- residents ---------------------------------------------------------------------------

    def keep(self, entry: Entry, kept: KeptBlock | KeptCheckpoint) -> None:
        """Order ranks to keep a block or checkpoint of a row, and mark it as resident.

        An eviction of it in the same plan is cancelled instead: ranks evict after they keep, so
        both orders together would remove it.

        Args:
            entry: the block or checkpoint.
            kept: the order.
        """
        if entry.hash in self.orders.evicted:
            del self.orders.evicted[entry.hash]
        elif isinstance(kept, KeptBlock):
            self.orders.keep_blocks.append(kept)
        else:
            self.orders.keep_checkpoints.append(kept)
        self.index.set_resident(entry, resident=True)
        kind = "checkpoints" if entry.is_checkpoint else "blocks"
        self.counters[f"cache_{kind}_kept_total"] += 1

    def adopt(self, entries: list[Entry]) -> None:
        """Mark restored entries as resident; the caller orders ranks to adopt them."""
        for entry in entries:
            self.index.set_resident(entry, resident=True)
        self.counters["cache_blocks_restored_total"] += len(entries)

    def take_orders(self) -> PlannedBlockOrders:
        """Return the block orders of the plan being built, and start to collect the next plan's.

        Entries that were protected from eviction only for this plan are released.
        """
        self.pins.release_plan()
        taken, self.orders = self.orders, PlannedBlockOrders()
        return taken

    def check_invariants(self) -> None:
        """Compare references with holders, the index's sums with its blocks, and memory (I9).

        Raises:
            InvariantBroken: they disagree, or resident blocks exceed their limit.
        """
        self.pins.check_invariants(self.index.all_entries())
        self.index.check_invariants()
        if self.is_on and self.index.resident_bytes > self.limit_bytes:
            raise InvariantBroken(
                f"resident blocks use {self.index.resident_bytes} bytes, "
                f"the limit is {self.limit_bytes}"
            )
