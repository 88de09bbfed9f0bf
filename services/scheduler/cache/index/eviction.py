"""Which blocks and checkpoints are evicted next, on all ranks and in both tiers."""

import itertools

from services.scheduler.cache.index.block_index import BlockIndex, Entry, Node

_STORED_LOOK = 512
"""How many of the oldest nodes are looked at for stored ones."""


def choose_victims(
    index: BlockIndex, size_bytes: int, *, system: bool, force: bool = False
) -> list[Entry] | None:
    """Return what to evict to free so many bytes, the least valuable first; None: not possible.

    Args:
        index: what is known.
        size_bytes: how much memory is wanted per rank.
        system: system prompts may be evicted too, after all others.
        force: rows need the memory: evict also what a restore or a waiting sequence wants to stay,
            and what is being spilled. What the plan in the making relies on stays.
    """
    search = _VictimSearch(force=force)
    if search.collect(index, size_bytes, last=False):
        return search.found
    if system and search.collect(index, size_bytes, last=True):
        return search.found
    return None


def least_valuable_stored(index: BlockIndex, count: int) -> list[Entry]:
    """Return some stored entries that the stores give up first: children before parents."""
    oldest = itertools.islice(index, _STORED_LOOK)
    found = (one for node in oldest if not node.is_system for one in reversed([*node.entries]))
    return list(itertools.islice((one for one in found if one.is_stored), count))


class _VictimSearch:
    """Goes through the eviction order and notes what could go."""

    def __init__(self, *, force: bool) -> None:
        self.found: list[Entry] = []
        self._force = force
        self._freed = 0
        self._gone: set[Entry] = set()
        self._children_gone: dict[Node, int] = {}

    def collect(self, index: BlockIndex, size_bytes: int, *, last: bool) -> bool:
        for entry in index.recency.of_class(last=last):
            if self._freed >= size_bytes:
                return True
            if self._stays(entry):
                continue
            self.found.append(entry)
            self._freed += entry.size_bytes
            self._gone.add(entry)
            parent = entry.node.parent
            if not entry.is_checkpoint and parent is not None:
                self._children_gone[parent] = self._children_gone.get(parent, 0) + 1
        return self._freed >= size_bytes

    def _stays(self, entry: Entry) -> bool:
        if entry.firm_references:
            return True
        if not self._force and (entry.references or entry.is_spilling):
            return True
        if entry.is_checkpoint:
            return False
        node = entry.node
        if node.resident_children != self._children_gone.get(node, 0):
            return True
        checkpoint = node.checkpoint
        return checkpoint is not None and checkpoint.is_resident and checkpoint not in self._gone
