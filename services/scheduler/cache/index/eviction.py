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
            if self._stays(entry):
                continue
            self.victims[entry] = None
            self._freed_bytes += entry.size_bytes
            parent = entry.node.parent
            if not entry.is_checkpoint and parent is not None:
                self._evicted_children[parent] = self._evicted_children.get(parent, 0) + 1
        return self._freed_bytes >= size_bytes

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
