"""The block index against a plain search, under random keeps, evictions and matches."""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.scheduler.cache.index.block_index import BlockIndex, Entry, Node
from services.scheduler.cache.index.eviction import choose_victims
from services.scheduler.cache.pins import BlockPins
from shared.errors import InvariantBroken
from tests.support.effort import cases
from tests.unit.scheduler.cache.index_builder import (
    BLOCK_TOKENS,
    find_prefix,
    hash_chain,
    keep_blocks,
    keep_checkpoint,
)

TEXTS = st.lists(st.integers(0, 1), max_size=70).map(
    # Long equal stretches make texts share whole blocks and diverge anywhere.
    lambda turns: [turn for turn in turns for _ in range(5)]
)
SALTS = st.sampled_from(["", "tenant"])


class IndexMachine(RuleBasedStateMachine):
    """Keeps and evicts blocks beside a list of (salt, text) of every resident block and
    checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex(nodes_max=60)
        self.resident: dict[Entry, tuple[str, list[int]]] = {}

    @rule(text=TEXTS, salt=SALTS, tail=st.booleans(), system=st.integers(0, 40))
    def keep(self, text: list[int], salt: str, tail: bool, system: int) -> None:
        if len(self.index) > 30 or len(text) > 20 * BLOCK_TOKENS:
            return
        for node in keep_blocks(self.index, text, salt, tail=tail, system=system):
            self.resident[node.block] = salt, text[: node.end]

    @rule(pick=st.integers(0, 100))
    def keep_state(self, pick: int) -> None:
        blocks = [one for one in self.resident if not one.is_checkpoint]
        whole = [one for one in blocks if len(one.node.tokens) == 4 * BLOCK_TOKENS]
        if whole:
            block = whole[pick % len(whole)]
            known = block.node.checkpoint
            if known is None or not known.is_resident:
                self.resident[keep_checkpoint(self.index, block.node)] = self.resident[block]

    @rule(size_bytes=st.integers(1, 2_000), system=st.booleans())
    def evict(self, size_bytes: int, system: bool) -> None:
        victims = choose_victims(self.index, size_bytes, system=system)
        if victims is None:
            return
        assert sum(one.size_bytes for one in victims) >= size_bytes
        assert sum(one.size_bytes for one in victims[:-1]) < size_bytes, "no more than needed"
        for one in victims:
            self.index.set_resident(one, resident=False)
            del self.resident[one]
            self.index.check_invariants()

    @rule(text=TEXTS, salt=SALTS)
    def match(self, text: list[int], salt: str) -> None:
        found = find_prefix(self.index, text, salt)
        best = 0
        for entry, (other, kept) in self.resident.items():
            if other == salt and not entry.is_checkpoint:
                best = max(best, min(_shared(kept, text), len(text) - 1))
        assert found.tokens == best
        held = [token for node in found.path for token in _tokens(node.tokens)]
        assert held[: found.tokens] == text[: found.tokens]
        assert all(node.is_resident for node in found.path)
        assert not found.path or found.path[-1].start < found.tokens
        assert found.shared_tokens >= found.tokens

    @rule(text=TEXTS, salt=SALTS)
    def match_checkpoints(self, text: list[int], salt: str) -> None:
        found = find_prefix(self.index, text, salt, states=True)
        best = 0
        for entry, (other, kept) in self.resident.items():
            fits = other == salt and entry.is_checkpoint and len(kept) <= len(text) - 1
            if fits and text[: len(kept)] == kept:
                best = max(best, len(kept))
        assert found.tokens == best
        assert (found.checkpoint is not None) == (best > 0)

    @rule()
    def end_epoch(self) -> None:
        self.index.end_epoch()
        self.resident.clear()

    @invariant()
    def is_consistent(self) -> None:
        self.index.check_invariants()
        assert self.index.resident_bytes == sum(one.size_bytes for one in self.resident)


def _shared(one: list[int], other: list[int]) -> int:
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


def _tokens(packed: bytes) -> list[int]:
    return list(memoryview(packed).cast("i"))


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=cases(30, 150), stateful_step_count=40)


def test_block_index_keeps_bounded_number_of_evicted_entries() -> None:
    """Ten thousand texts leave no more evicted entries than the bound."""
    index = BlockIndex(nodes_max=100)
    for number in range(10_000):
        for node in reversed(keep_blocks(index, [number] * 40)):
            index.set_resident(node.block, resident=False)
    assert len(index) <= 100
    assert find_prefix(index, [9_999] * 40).shared_tokens == 40
    assert find_prefix(index, [0] * 40).shared_tokens == 0


def test_full_block_index_adds_no_block_and_keeps_all() -> None:
    """When every entry is resident, a new block is not added and no block is lost."""
    index = BlockIndex(nodes_max=3)
    keep_blocks(index, [1] * 48)
    root = index.root(hash_chain([]).root)
    assert root.children, "the known block"
    assert index.add(root, b"x" * 32, b"1234", 10) is None
    assert find_prefix(index, [1] * 49).tokens == 48


def test_block_with_equal_hash_but_other_tokens_is_not_found() -> None:
    """A block with the right hash and other tokens is not found."""
    index = BlockIndex()
    node = keep_blocks(index, [5] * 16)[0]
    node.tokens = bytes(64)
    assert find_prefix(index, [5] * 30).tokens == 0


def _lose_child(parent: Node, other: Node) -> None:
    del parent.children[0]


def _repeat_child(parent: Node, other: Node) -> None:
    parent.children.append(parent.children[0])


def _replace_child(parent: Node, other: Node) -> None:
    parent.children[0] = parent.children[1]


def _change_parent(parent: Node, other: Node) -> None:
    parent.children[0].parent = other


def _reverse_children(parent: Node, other: Node) -> None:
    parent.children.reverse()


def _miscount_children(parent: Node, other: Node) -> None:
    other.resident_children += 1


@pytest.mark.parametrize(
    "break_links",
    [
        _lose_child,
        _repeat_child,
        _replace_child,
        _change_parent,
        _reverse_children,
        _miscount_children,
    ],
)
def test_block_index_check_fails_when_tree_links_contradict(
    break_links: Callable[[Node, Node], None],
) -> None:
    """A tree whose links contradict each other fails the check."""
    index = BlockIndex()
    first, left = keep_blocks(index, [1] * 16 + [2] * 16)
    keep_blocks(index, [1] * 16 + [3] * 16)
    index.check_invariants()

    break_links(first, left)

    with pytest.raises(InvariantBroken):
        index.check_invariants()


def test_block_index_check_fails_when_pinned_block_lacks_reference() -> None:
    """A pinned block without a reference count fails the check."""
    index, pins = BlockIndex(), BlockPins()
    (node,) = keep_blocks(index, [1] * 16)
    pins.hold(("restore", 1), node.block)
    pins.check_invariants(index.all_entries())

    node.block.references = 0

    with pytest.raises(InvariantBroken):
        pins.check_invariants(index.all_entries())
