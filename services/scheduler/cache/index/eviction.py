"""The eviction order of blocks and checkpoints, in memory and in the stores."""

import itertools

from services.scheduler.cache.index.block_index import BlockIndex, Entry, Node

_STORED_NODES_EXAMINED = 512
"""Most nodes, oldest first, that are searched for stored entries."""


def choose_victims(
    index: BlockIndex, size_bytes: int, *, system: bool, force: bool = False
) -> list[Entry] | None:
    """Choose the least valuable resident entries whose eviction frees `size_bytes` per rank.

    Args:
        index: all known blocks.
        size_bytes: memory needed per rank.
        system: blocks of system prompts may be evicted too, after all others.
        force: rows need the memory, so entries that restores or waiting sequences hold and entries
            being spilled may be evicted too. Entries of the plan being built never are.

    Returns:
        The victims in eviction order; None when there are not enough.
    """
    search = _VictimSearch(force=force)
    is_enough = search.collect(index, size_bytes, system=False) or (
        system and search.collect(index, size_bytes, system=True)
    )
    return list(search.victims) if is_enough else None


def choose_expired(index: BlockIndex, used_before_s: float) -> list[Entry]:
    """Choose the resident entries that were last used before a time and that are not in use.

    Args:
        index: all known blocks.
        used_before_s: that time, in seconds.

    Returns:
        The victims in eviction order.
    """
    search = _VictimSearch(force=False)
    for entries in index.recency:
        for entry in entries:
            if entry.used_at_s >= used_before_s:
                break
            search.add(entry)
    return list(search.victims)


def choose_forgotten(index: BlockIndex, spared: Node, count: int) -> list[Node]:
    """Choose the least recently used resident blocks that give their places to new ones.

    Known blocks without a copy that follow a chosen block are forgotten with it. Blocks that a
    restore, a waiting sequence, a spill or the plan being built needs stay, and so do the blocks
    before them.

    Args:
        index: all known blocks; those of system prompts are chosen only when there is no other.
        spared: the block that the new one follows.
        count: how many blocks are wanted.

    Returns:
        The blocks, each before the block that it follows; none when all are needed.
    """
    for system in (False, True):
        chosen: dict[Node, None] = {}
        chosen_children: dict[Node, int] = {}
        for entry in index.recency[system]:
            if len(chosen) >= count:
                break
            node = entry.node
            if node in chosen or node.resident_children != chosen_children.get(node, 0):
                continue
            unused = _unused_from(node, spared, chosen)
            chosen.update(dict.fromkeys(unused))
            if unused and node.parent is not None:
                chosen_children[node.parent] = chosen_children.get(node.parent, 0) + 1
        if chosen:
            return list(chosen)
    return []


def _unused_from(node: Node, spared: Node, chosen: dict[Node, None]) -> list[Node]:
    """Return a block and all that follow it except chosen ones, last first; [] if one is needed."""
    found: list[Node] = []
    reached = [node]
    while reached:
        one = reached.pop()
        if one in chosen:
            continue
        if one is spared or one.open_restores:
            return []
        if any(entry.references or entry.is_spilling for entry in one.entries):
            return []
        found.append(one)
        reached += one.children
    return found[::-1]


def least_valuable_stored(index: BlockIndex, count: int) -> list[Entry]:
    """Return stored blocks and checkpoints that a full cache store should evict first.

    Args:
        index: all known blocks; those of system prompts are left out.
        count: most entries to return.

    Returns:
        The entries, least recently used first, each block before the block it follows.
    """
    oldest = itertools.islice(index, _STORED_NODES_EXAMINED)
    found = (one for node in oldest if not node.is_system for one in reversed([*node.entries]))
    return list(itertools.islice((one for one in found if one.is_stored), count))


class _VictimSearch:
    """A search for victims among ordinary blocks, then among those of system prompts."""

    def __init__(self, *, force: bool) -> None:
        self.victims: dict[Entry, None] = {}
        """In eviction order."""
        self._force = force
        self._freed_bytes = 0
        self._evicted_children: dict[Node, int] = {}

    def collect(self, index: BlockIndex, size_bytes: int, *, system: bool) -> bool:
        """Collect victims, of system prompts or not; return True when they free `size_bytes`."""
        for entry in index.recency[system]:
            if self._freed_bytes >= size_bytes:
                return True
            self.add(entry)
        return self._freed_bytes >= size_bytes

    def add(self, entry: Entry) -> None:
        """Add an entry to the victims unless it is in use or others need it."""
        if self._stays(entry):
            return
        self.victims[entry] = None
        self._freed_bytes += entry.size_bytes
        parent = entry.node.parent
        if not entry.is_checkpoint and parent is not None:
            self._evicted_children[parent] = self._evicted_children.get(parent, 0) + 1

    def _stays(self, entry: Entry) -> bool:
        if entry.firm_references:
            return True
        if not self._force and (entry.references or entry.is_spilling):
            return True
        if entry.is_checkpoint:
            return False
        node = entry.node
        if node.resident_children != self._evicted_children.get(node, 0):
            return True
        checkpoint = node.checkpoint
        return checkpoint is not None and checkpoint.is_resident and checkpoint not in self.victims
