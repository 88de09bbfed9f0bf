"""Eviction order, and memory that blocks give up to rows."""

from services.scheduler.cache.cache_state import CacheState, PlannedBlockOrders
from services.scheduler.cache.index.block_index import BlockIndex, Entry
from services.scheduler.cache.index.eviction import choose_victims, least_valuable_stored
from services.scheduler.cache.kv_rows import RowBudget, Rows
from services.scheduler.cache.pins import BlockPins
from shared.messages import KeptBlock
from tests.unit.scheduler.cache.index_builder import find_prefix, keep_blocks, keep_checkpoint

BLOCK_BYTES = 160
"""Bytes of a whole block."""


def eviction_order(index: BlockIndex, *, force: bool = False) -> list[Entry]:
    """Return all entries in eviction order."""
    found: list[Entry] = []
    size_bytes = 1
    while True:
        victims = choose_victims(index, size_bytes, system=True, force=force)
        if victims is None:
            return found
        found, size_bytes = victims, sum(one.size_bytes for one in victims) + 1


def test_least_recently_used_kv_block_is_evicted_first() -> None:
    """A use of a block counts for all blocks before it too."""
    index = BlockIndex()
    first = keep_blocks(index, [1] * 32)
    second = keep_blocks(index, [2] * 16)
    third = keep_blocks(index, [*[1] * 16, *[3] * 16])
    index.touch(second[0])
    assert eviction_order(index) == [
        first[1].block,
        third[1].block,
        first[0].block,
        second[0].block,
    ]


def test_kv_block_is_evicted_only_after_blocks_that_follow_it() -> None:
    """No block is evicted while a block that follows it stays."""
    index = BlockIndex()
    nodes = keep_blocks(index, [1] * 80)
    assert eviction_order(index) == [node.block for node in reversed(nodes)]


def test_kv_blocks_of_system_prompts_are_evicted_last() -> None:
    """The oldest block of a system prompt outlives the newest other block."""
    index = BlockIndex()
    system = keep_blocks(index, [1] * 40, system=35)
    other = keep_blocks(index, [2] * 16)
    order = eviction_order(index)
    assert order == [system[2].block, other[0].block, system[1].block, system[0].block]
    assert choose_victims(index, 2 * BLOCK_BYTES, system=False) is None


def test_state_checkpoint_is_evicted_before_its_kv_block() -> None:
    """A checkpoint is useless without its block."""
    index = BlockIndex()
    nodes = keep_blocks(index, [1] * 32)
    state = keep_checkpoint(index, nodes[0])
    assert eviction_order(index) == [nodes[1].block, state, nodes[0].block]


def test_kv_blocks_in_use_are_evicted_only_by_force() -> None:
    """Blocks used by a restore, and all blocks before them, are evicted only by force; blocks used
    by a plan are never evicted."""
    index = BlockIndex()
    nodes, other = keep_blocks(index, [1] * 48), keep_blocks(index, [2] * 16)
    pins = BlockPins()
    pins.hold(("restore", 1), nodes[1].block)
    assert eviction_order(index) == [nodes[2].block, other[0].block]
    assert len(eviction_order(index, force=True)) == 4
    pins.hold(("plan", 1), nodes[1].block)
    assert eviction_order(index, force=True) == [nodes[2].block, other[0].block]
    pins.release_plan()
    pins.release(("restore", 1))
    assert len(eviction_order(index)) == 4
    pins.check_invariants([entry for node in index for entry in node.entries])


def test_kv_block_being_written_to_ssd_is_evicted_only_by_force() -> None:
    """A block that is being written to SSD is evicted only by force, because that would free no
    memory."""
    index = BlockIndex()
    node = keep_blocks(index, [1] * 16)[0]
    node.block.is_spilling = True
    assert eviction_order(index) == []
    assert eviction_order(index, force=True) == [node.block]


def test_store_drops_oldest_kv_blocks_first_and_no_system_prompt() -> None:
    """Stores use the same order; blocks of system prompts are not named."""
    index = BlockIndex()
    old, new = keep_blocks(index, [1] * 32), keep_blocks(index, [2] * 32)
    system = keep_blocks(index, [3] * 16, system=16)
    for node in [*old, *new, *system]:
        node.block.is_stored = True
    assert least_valuable_stored(index, 3) == [old[1].block, old[0].block, new[1].block]


def make_cache_state(
    tokens: int, bytes_max: int
) -> tuple[CacheState, BlockIndex, Rows, PlannedBlockOrders]:
    """Return cache state beside rows in a budget of `tokens` tokens."""
    rows = Rows(8, 16)
    rows.start(RowBudget(10 * tokens, 10, 0))
    memory = CacheState(rows)
    memory.bytes_max = bytes_max
    return memory, memory.index, rows, memory.orders


def test_new_kv_block_uses_free_memory_before_evicting_oldest_blocks() -> None:
    """Room is free memory below the bound, then the oldest blocks; no more is evicted than
    needed."""
    memory, index, _, orders = make_cache_state(1_000, 3 * BLOCK_BYTES)
    nodes = keep_blocks(index, [1] * 48)
    assert memory.make_room(BLOCK_BYTES)
    assert list(orders.evicted) == [nodes[2].hash]
    assert memory.make_room(BLOCK_BYTES)
    assert len(orders.evicted) == 1, "there was room already"
    assert not memory.make_room(4 * BLOCK_BYTES)
    assert len(orders.evicted) == 1, "an impossible request evicts nothing"


def test_system_prompt_blocks_over_half_of_cache_can_be_evicted() -> None:
    """System prompts give way to another one, and to any block once they hold over half."""
    memory, index, _, orders = make_cache_state(1_000, 4 * BLOCK_BYTES)
    keep_blocks(index, [1] * 32, system=32)
    other = keep_blocks(index, [2] * 32)
    assert memory.make_room(2 * BLOCK_BYTES)
    assert list(orders.evicted) == [other[1].hash, other[0].hash]
    assert not memory.make_room(3 * BLOCK_BYTES), "half is protected"
    keep_blocks(index, [3] * 32, system=32)
    assert memory.make_room(BLOCK_BYTES), "more than half is not"
    assert memory.make_room(2 * BLOCK_BYTES, system=True)


def test_growing_kv_rows_evict_no_more_blocks_than_needed() -> None:
    """Growing rows evict blocks in eviction order, and no more than needed."""
    memory, index, rows, orders = make_cache_state(64, 640)
    nodes = keep_blocks(index, [1] * 48)
    assert rows.resize(slots=1, tokens=16)
    assert not orders.evicted
    assert rows.resize(slots=1, tokens=40)
    assert list(orders.evicted) == [nodes[2].hash, nodes[1].hash]
    assert memory.held_bytes <= rows.bytes_left
    assert rows.resize(slots=1, tokens=64), "a single sequence gets everything if need be"
    assert memory.held_bytes == 0
    assert not rows.resize(slots=2, tokens=64)


def test_kv_rows_do_not_grow_into_blocks_of_current_plan() -> None:
    """Rows that would need blocks of the same plan do not grow, and nothing is evicted."""
    memory, index, rows, orders = make_cache_state(64, 640)
    nodes = keep_blocks(index, [1] * 48)
    memory.pins.hold(("plan", 1), nodes[2].block)
    assert not rows.resize(slots=1, tokens=40)
    assert not orders.evicted
    assert find_prefix(index, [1] * 60).tokens == 48


def test_kv_rows_shrink_only_when_at_least_half_is_unused() -> None:
    """Rows shrink for blocks when at least half of them is unused, and keep a reserve."""
    _, _, rows, _ = make_cache_state(4_000, 5_000)
    assert rows.resize(slots=8, tokens=200)
    rows.trim(slots=8, tokens=150)
    assert (rows.row_count, rows.row_tokens) == (8, 240), "not worth a copy"
    rows.trim(slots=5, tokens=200)
    assert rows.row_count == 8, "a reserve for more sequences stays"
    rows.trim(slots=2, tokens=20)
    assert (rows.row_count, rows.row_tokens) == (4, 32)
    rows.trim(slots=0, tokens=0)
    assert (rows.row_count, rows.row_tokens) == (4, 16)


def test_keeping_and_evicting_one_block_in_one_plan_cancel_out() -> None:
    """An eviction and a keep of one block in one plan cancel out."""
    memory, index, _, orders = make_cache_state(1_000, 5_000)
    node = keep_blocks(index, [1] * 16)[0]
    memory.evict([node.block])
    assert list(orders.evicted) == [node.hash]
    memory.keep(node.block, KeptBlock(sequence_id=1, start=0, length=16, hash=node.hash))
    assert node.is_resident
    assert not orders
