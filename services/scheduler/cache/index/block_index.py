"""The tree of known blocks. Owns which copies exist and how recently they were used.

There is one tree per root (namespace and salt). A node is a block; its children are the blocks that
have followed it. An entry is the unit that ranks and stores hold under one hash: a block, or the
checkpoint at its end. A node without a copy (a ghost) explains a miss by its tokens.
"""

import bisect
import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import Iterator

from services.scheduler.cache.index.hashes import checkpoint_hash
from shared.errors import InvariantBroken
from shared.messages.token_ids import TOKEN_BYTES

NODES_MAX = 131_072
"""Most known blocks, however much memory and stores can hold: Python's garbage collector stops the
scheduler for 0.1 s to look at them (measured)."""

_TRIM_NODES_EXAMINED = 512
_TRIM_NODES_MAX = 64
"""Of the oldest nodes: how many are searched for ghosts, and most ghosts that are forgotten."""


@dataclasses.dataclass(slots=True, eq=False)
class Entry:
    """A block, or the checkpoint at its end, as ranks and stores hold it under one hash."""

    hash: bytes
    node: "Node"
    size_bytes: int
    """On the rank where it is largest."""
    is_checkpoint: bool
    is_resident: bool = False
    """All ranks hold it after all sent plans and the plan being built."""
    is_stored: bool | None = None
    """The stores of all ranks have it; None: unknown since this scheduler started."""
    is_spilling: bool = False
    """Its spill was ordered and not reported; until then an eviction frees no memory."""
    references: int = 0
    """Number of restores and sequences that need it resident."""
    firm_references: int = 0
    """The references among them that belong to the plan being built."""
    used_at_s: float = 0.0
    """Time of its latest use; of a block without a copy, too."""
    stored_at_s: float = 0.0
    """When it was last known to be stored."""
    owner: int = 0
    """The sequence whose next decode checkpoint replaces this one; 0: none."""


@dataclasses.dataclass(slots=True, eq=False)
class Node:
    """One known block in the tree: its tokens, its parent (the block before it), its children."""

    hash: bytes
    parent: "Node | None"
    """None for a root, which has no tokens."""
    tokens: bytes
    """Packed token ids, compared at every lookup of the hash."""
    end: int
    """Position in the sequence after the last token of this block."""
    block: Entry = dataclasses.field(init=False)
    checkpoint: Entry | None = None
    children: "list[Node]" = dataclasses.field(default_factory=list)
    """Sorted by tokens, so that the most similar child is found by bisection."""
    resident_children: int = 0
    is_system: bool = False
    """It belongs to a system prompt, which other conversations share."""
    is_known: bool = False
    """A sequence had these tokens; else a lookup only asked whether they are stored."""
    open_restores: int = 0
    """Number of restores that may make it resident."""

    @property
    def is_resident(self) -> bool:
        """Whether ranks hold this block; always True for a root."""
        return self.parent is None or self.block.is_resident

    @property
    def start(self) -> int:
        """Position in the sequence of the first token of this block."""
        return self.end - len(self.tokens) // TOKEN_BYTES

    @property
    def entries(self) -> "Iterator[Entry]":
        """The block, and its checkpoint if one is known."""
        yield self.block
        if self.checkpoint is not None:
            yield self.checkpoint

    @property
    def is_forgettable(self) -> bool:
        """Whether it can leave the index: not resident, spilled or restored now, no children."""
        return not (
            self.children
            or self.open_restores
            or any(one.is_resident or one.is_spilling for one in self.entries)
        )


class BlockIndex:
    """All known blocks by hash, and the order in which they and their checkpoints were used."""

    def __init__(self, nodes_max: int = NODES_MAX) -> None:
        self.recency: tuple[OrderedDict[Entry, None], OrderedDict[Entry, None]]
        self.recency = (OrderedDict(), OrderedDict())
        """Resident entries of ordinary blocks, and of blocks of system prompts, which are evicted
        after all others; each from least recently used, the first to be evicted."""
        self.now_s = 0.0
        """The scheduler's time in seconds, which its owner sets before uses count."""
        self.version = 0
        """Changes with every change of the resident entries."""
        self.resident_bytes = 0
        self.system_bytes = 0
        """The part of the resident bytes that belongs to system prompts."""
        self.resident_blocks = 0
        self.nodes_max = nodes_max
        """Most known blocks; see `set_bound`."""
        self._nodes: dict[bytes, Node] = {}
        self._roots: dict[bytes, Node] = {}
        self._known: OrderedDict[Node, None] = OrderedDict()
        """All nodes except roots, least recently used first, children before parents."""

    def __len__(self) -> int:
        """Return the number of known blocks."""
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        """Iterate over all nodes, least recently used first."""
        return iter(self._known)

    @property
    def is_full(self) -> bool:
        """Whether a new block needs the place of another one."""
        return len(self._nodes) >= self.nodes_max

    def set_bound(self, nodes_max: int) -> None:
        """Set the most known blocks; above it, forget blocks without a copy, oldest first."""
        self.nodes_max = nodes_max
        if len(self._nodes) > nodes_max:
            # Children stand before parents, so that one pass finds every block that can go.
            for node in list(self._known):
                if len(self._nodes) <= nodes_max:
                    break
                if node.is_forgettable:
                    self.forget(node)

    def find_root(self, root_hash: bytes) -> Node | None:
        """Return the root of a tenant's blocks by its hash; None when no known block follows it."""
        return self._roots.get(root_hash)

    def root(self, root_hash: bytes) -> Node:
        """Return the root of a tenant's blocks by its hash, created if it is not known.

        A new root becomes part of the index when `add` adds a block below it.
        """
        root = self._roots.get(root_hash)
        if root is None:
            root = Node(root_hash, None, b"", 0)
            root.block = Entry(root_hash, root, 0, is_checkpoint=False)
        return root

    def find(self, parent: Node, block_hash: bytes, tokens: bytes) -> Node | None:
        """Return the child of `parent` with this hash, if it has these tokens."""
        node = self._nodes.get(block_hash)
        if node is None or node.parent is not parent or node.tokens != tokens:
            return None
        return node

    def add(self, parent: Node, block_hash: bytes, tokens: bytes, size_bytes: int) -> Node | None:
        """Return a child of `parent`; if it is not known, add it as neither resident nor stored.

        Args:
            parent: the block before it, or a root.
            block_hash: hash of the block.
            tokens: its packed token ids.
            size_bytes: its bytes on the rank where it is largest.

        Returns:
            None when the index is full of blocks with a copy, or the hash belongs to other tokens.
        """
        known = self.find(parent, block_hash, tokens)
        if known is not None:
            return known
        if self.is_full:
            self._trim(parent)
        if self.is_full or block_hash in self._nodes:
            return None
        node = Node(block_hash, parent, tokens, parent.end + len(tokens) // TOKEN_BYTES)
        node.block = Entry(block_hash, node, size_bytes, is_checkpoint=False)
        node.block.used_at_s = self.now_s
        bisect.insort(parent.children, node, key=tokens_of)
        self._nodes[block_hash] = node
        self._known[node] = None
        if parent.parent is None:
            self._roots[parent.hash] = parent
        return node

    def checkpoint(self, node: Node, size_bytes: int) -> Entry:
        """Return the checkpoint at the end of a block, created if it is not known.

        Args:
            node: the block.
            size_bytes: bytes of a new checkpoint on the rank where it is largest.
        """
        if node.checkpoint is None:
            name = checkpoint_hash(node.hash)
            node.checkpoint = Entry(name, node, size_bytes, is_checkpoint=True)
        return node.checkpoint

    def set_resident(self, entry: Entry, *, resident: bool) -> None:
        """Record that all ranks hold an entry, or that no rank does.

        The caller then marks its block as used, with `touch`.

        Args:
            entry: the block or checkpoint.
            resident: True if all ranks hold it.

        Raises:
            InvariantBroken: the entry is in that state already.
        """
        if entry.is_resident is resident:
            raise InvariantBroken(f"{entry.hash.hex()} was made resident twice or evicted twice")
        node, sign = entry.node, 1 if resident else -1
        entry.is_resident = resident
        self.version += 1
        self.resident_bytes += sign * entry.size_bytes
        if node.is_system:
            self.system_bytes += sign * entry.size_bytes
        if not entry.is_checkpoint and node.parent is not None:
            node.parent.resident_children += sign
            self.resident_blocks += sign
        if resident:
            node.is_known = True
            entry.used_at_s = self.now_s
            self.recency[node.is_system][entry] = None
        else:
            del self.recency[node.is_system][entry]

    def set_system(self, node: Node) -> None:
        """Mark a block as part of a system prompt, so that it is evicted after all other blocks."""
        if node.is_system:
            return
        node.is_system = True
        for entry in node.entries:
            if entry.is_resident:
                self.system_bytes += entry.size_bytes
                del self.recency[False][entry]
                self.recency[True][entry] = None

    def touch(self, node: Node, checkpoint: Entry | None = None) -> None:
        """Make a block, all blocks before it and its checkpoint the most recently used.

        The last block is touched first, so that a block is always evicted before its parent, and a
        checkpoint before its block.

        Args:
            node: the last block.
            checkpoint: the checkpoint at its end; None: leave it where it is.
        """
        if checkpoint is not None and checkpoint.is_resident:
            self.recency[node.is_system].move_to_end(checkpoint)
            checkpoint.used_at_s = self.now_s
        at: Node | None = node
        while at is not None and at.parent is not None:
            self._known.move_to_end(at)
            at.block.used_at_s = self.now_s
            if at.block.is_resident:
                self.recency[at.is_system].move_to_end(at.block)
            at = at.parent

    def forget_unused(self, used_before_s: float) -> None:
        """Forget the blocks without a copy that were last used before a time, in seconds."""
        unused = itertools.takewhile(lambda one: one.block.used_at_s < used_before_s, self)
        for node in list(unused):
            if node.is_forgettable:
                self.forget(node)

    def forget(self, node: Node) -> None:
        """Remove a block that has neither a copy nor children from the index.

        Raises:
            InvariantBroken: the block is in use.
        """
        if not node.is_forgettable or node.parent is None:
            raise InvariantBroken(f"block {node.hash.hex()} is in use and cannot be forgotten")
        siblings = node.parent.children
        del siblings[bisect.bisect_left(siblings, node.tokens, key=tokens_of)]
        del self._nodes[node.hash]
        del self._known[node]
        if node.parent.parent is None and not siblings:
            self._roots.pop(node.parent.hash, None)

    def end_epoch(self) -> None:
        """Mark all entries as not resident and unused; blocks, and which are stored, stay known."""
        for node in self._known:
            for entry in node.entries:
                if entry.is_resident:
                    self.set_resident(entry, resident=False)
                entry.is_spilling = False
                entry.references = entry.firm_references = 0
            node.open_restores = 0

    def clear(self) -> None:
        """Forget all blocks, because their namespace is no longer used."""
        for entries in self.recency:
            entries.clear()
        self._nodes.clear()
        self._roots.clear()
        self._known.clear()
        self.resident_bytes = self.system_bytes = self.resident_blocks = 0
        self.version += 1

    def all_entries(self) -> list[Entry]:
        """Return all known blocks and checkpoints."""
        return [entry for node in self._known for entry in node.entries]

    def check_invariants(self) -> None:
        """Compare the links between blocks, the sums and the orders of use with all blocks (I9).

        Raises:
            InvariantBroken: they contradict each other.
        """
        held = [one for one in self.all_entries() if one.is_resident]
        blocks = [one for one in held if not one.is_checkpoint]
        system = [one for one in held if one.node.is_system]
        facts = (
            set(self._known) == set(self._nodes.values()),
            self.resident_bytes == sum(one.size_bytes for one in held),
            self.system_bytes == sum(one.size_bytes for one in system),
            self.resident_blocks == len(blocks),
            self._is_in_order(system=False),
            self._is_in_order(system=True),
            {*self.recency[False], *self.recency[True]} == set(held),
            all(one.node.block.is_resident for one in held),
            all(one.node.parent is not None and one.node.parent.is_resident for one in held),
        )
        if not all(facts):
            raise InvariantBroken(f"the index contradicts its nodes: {facts}")
        self._check_links()

    def _check_links(self) -> None:
        """Raise InvariantBroken unless every node is once among its parent's children."""
        parents = [*self._known, *self._roots.values()]
        linked = [child for node in parents for child in node.children]
        if len(linked) != len(self._known) or set(linked) != set(self._known):
            lost = [node.hash.hex() for node in set(linked) ^ set(self._known)]
            raise InvariantBroken(
                f"{len(linked)} links to {len(self._known)} blocks, wrong: {lost}"
            )
        for node in [one for one in parents if one.children or one.resident_children]:
            children = node.children
            resident = len([1 for child in children if child.block.is_resident])
            in_order = len(children) < 2 or children == sorted(children, key=tokens_of)
            is_theirs = all(child.parent is node for child in children)
            if not in_order or not is_theirs or resident != node.resident_children:
                raise InvariantBroken(f"block {node.hash.hex()} contradicts its children")

    def _is_in_order(self, *, system: bool) -> bool:
        """Return True when every entry is evicted before its parent, of system prompts or not."""
        places = {one: place for place, one in enumerate(self.recency[system])}
        for one, place in places.items():
            parent = one.node.parent
            after = one.node.block if one.is_checkpoint else parent.block if parent else None
            if after in places and places[after] < place:
                return False
        return all(one.node.is_system is system for one in places)

    def _trim(self, spared: Node) -> None:
        oldest = list(itertools.islice(self._known, _TRIM_NODES_EXAMINED))
        forgotten = 0
        for node in oldest:
            if node is not spared and node.is_forgettable and forgotten < _TRIM_NODES_MAX:
                self.forget(node)
                forgotten += 1


def tokens_of(node: Node) -> bytes:
    """Return a block's packed token ids, by which the children of a block are sorted."""
    return node.tokens
