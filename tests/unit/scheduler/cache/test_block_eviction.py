"""Eviction order, and memory that blocks give up to rows."""

from services.scheduler.cache.cache_state import CacheState, PlannedBlockOrders
from services.scheduler.cache.index.block_index import BlockIndex, Entry, Node
from services.scheduler.cache.index.eviction import choose_victims, least_valuable_stored
from services.scheduler.cache.kv_rows import RowBudget, Rows
from services.scheduler.cache.pins import BlockPins
from shared.messages import KeptBlock
from tests.unit.scheduler.cache.index_builder import (
    find_prefix,
    hash_chain,
    keep_blocks,
    keep_checkpoint,
)

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


def test_kv_blocks_held_by_restore_are_evicted_only_when_rows_need_memory() -> None:
    """Blocks that a restore holds, and all blocks before them, are evicted only when rows need the
    memory; blocks that a plan uses are never evicted.
    """
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


def test_kv_block_being_written_to_ssd_is_evicted_only_when_rows_need_memory() -> None:
    """A block that is being written to SSD is evicted only when rows need the memory."""
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


def test_kv_rows_are_not_enlarged_when_that_needs_blocks_of_current_plan() -> None:
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


def test_keeping_block_again_after_its_eviction_in_same_plan_removes_both_orders() -> None:
    """When a plan evicts a block and keeps it again, both orders are removed and the block stays
    resident.
    """
    memory, index, _, orders = make_cache_state(1_000, 5_000)
    node = keep_blocks(index, [1] * 16)[0]
    memory.evict([node.block])
    assert list(orders.evicted) == [node.hash]
    memory.keep(node.block, KeptBlock(sequence_id=1, start=0, length=16, hash=node.hash))
    assert node.is_resident
    assert not orders


def _add_blocks(state: CacheState, tokens: list[int], salt: str = "") -> list[Node]:
    """Make the whole blocks of a text resident as the keeper does, as long as the index has
    place."""
    chain = hash_chain(tokens, salt)
    parent, nodes = state.index.root(chain.root), []
    for name, packed in zip(chain.hashes, chain.packed, strict=True):
        node = state.add_block(parent, name, packed, BLOCK_BYTES)
        if node is None:
            break
        if not node.is_resident:
            state.index.set_resident(node.block, resident=True)
        nodes.append(node)
        parent = node
    state.index.touch(parent)
    return nodes


def test_full_index_replaces_least_recently_used_resident_blocks() -> None:
    """Texts that come after the index is full are indexed, and ranks are told to evict others."""
    state = CacheState(Rows(1, 1))
    state.index.set_bound(64)
    for number in range(100):
        assert len(_add_blocks(state, [number] * 64)) == 4
        assert find_prefix(state.index, [number] * 65).tokens == 64
        state.check_invariants()
    assert len(state.index) == 64
    assert find_prefix(state.index, [0] * 65).tokens == 0
    assert find_prefix(state.index, [84] * 65).tokens == 64, "the sixteen latest texts are known"
    assert len(state.orders.evicted) == 4 * 84


def test_full_index_keeps_blocks_that_are_needed() -> None:
    """Blocks of a restore, a spill and a waiting sequence stay, with all blocks before them; when
    nothing else is left, a new block is not indexed."""
    state = CacheState(Rows(1, 1))
    state.index.set_bound(10)
    held = _add_blocks(state, [1] * 48)
    spilling = _add_blocks(state, [2] * 32)
    restored = _add_blocks(state, [3] * 32)
    state.pins.hold(("waiting", 1), held[1].block)
    spilling[1].block.is_spilling = True
    restored[1].open_restores = 1

    added = _add_blocks(state, [4] * 160)

    assert [node.is_resident for node in [*held, *spilling, *restored]] == [
        *(True, True, False),
        *(True, True, True, True),
    ]
    assert len(added) == 10 - 6
    state.index.check_invariants()


def test_full_index_evicts_system_prompts_last_and_forgets_their_ghosts() -> None:
    """A system prompt outlives other texts; known blocks without a copy go with the block they
    follow."""
    state = CacheState(Rows(1, 1))
    state.index.set_bound(6)
    system = _add_blocks(state, [1] * 32)
    for node in system:
        state.index.set_system(node)
    parent = _add_blocks(state, [2] * 16)[0]
    ghosts = [state.add_block(parent, bytes([n]) * 32, bytes([n]) * 64, 1) for n in (1, 2, 3)]
    assert None not in ghosts
    state.index.touch(parent)

    _add_blocks(state, [3] * 64)

    assert all(node.is_resident for node in system)
    assert not parent.is_resident
    assert len(_add_blocks(state, [4] * 96)) == 6, "without other texts, system prompts go too"
    assert not system[0].is_resident
    state.check_invariants()


def test_lookup_outside_of_a_plan_evicts_nothing_from_full_index() -> None:
    """Ranks evict with a plan only, so that a lookup between plans leaves a full index as it is."""
    state = CacheState(Rows(1, 1))
    state.index.set_bound(4)
    kept = _add_blocks(state, [1] * 64)
    root = state.index.root(hash_chain([2] * 16).root)

    assert state.add_block(root, b"x" * 32, bytes(64), BLOCK_BYTES, may_evict=False) is None
    assert all(node.is_resident for node in kept)
