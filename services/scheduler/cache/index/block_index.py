"""The block index: which blocks of which sequences are known, and which copies of them exist.

A tree per root (namespace and salt). A node is a block; its children are the blocks that have
followed it. What ranks or stores hold under a hash is an entry: the block, or the checkpoint at its
end. A node without any copy is a ghost: it remembers the tokens, so that a miss can be explained.
"""

import bisect
import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import Iterator

from services.scheduler.cache.index.hashes import TOKEN_BYTES, checkpoint_hash
from services.scheduler.cache.index.recency import Recency
from shared.errors import InvariantBroken

NODES_MAX = 65_536
"""Blocks that are known at once. With 256 tokens each they take about 100 MiB."""

_TRIM_LOOK = 512
_TRIM_NODES = 64
"""How many of the oldest nodes are looked at for ghosts to forget, and how many are forgotten."""


@dataclasses.dataclass(slots=True, eq=False)
class Entry:
    """What ranks hold under one hash: a block, or the checkpoint at its end."""

    hash: bytes
    node: "Node"
    size_bytes: int
    """On the rank where it takes most."""
    is_checkpoint: bool
    is_resident: bool = False
    """All ranks hold it once the plans sent and the one in the making are applied."""
    is_stored: bool | None = None
    """All ranks' stores have it; None: nobody has asked them since this scheduler started."""
    is_spilling: bool = False
    """A spill is ordered and not reported; until then evicting it frees nothing."""
    references: int = 0
    """Restores and sequences that need it to stay."""
    firm_references: int = 0
    """Those among them that the plan in the making relies on."""
    owner: int = 0
    """Of a checkpoint taken while decoding: the sequence whose next one supersedes it; 0: none."""


@dataclasses.dataclass(slots=True, eq=False)
class Node:
    """One known block."""

    hash: bytes
    parent: "Node | None"
    """None: a root, which has no tokens."""
    tokens: bytes
    """Packed token ids, compared whenever the hash is found."""
    end: int
    """Tokens of the sequence up to the end of this block."""
    block: Entry = dataclasses.field(init=False)
    checkpoint: Entry | None = None
    children: "list[Node]" = dataclasses.field(default_factory=list)
    """In the order of their tokens, so that the likest one is found by bisection."""
    resident_children: int = 0
    is_system: bool = False
    """It lies in a system prompt: other conversations begin with it too."""
    is_known: bool = False
    """Some sequence had these tokens; else somebody has only asked whether they are stored."""
    awaited: int = 0
    """Restores that may make it resident."""

    @property
    def is_resident(self) -> bool:
        """Tell whether rows can be built up to here; a root needs nothing."""
        return self.parent is None or self.block.is_resident

    @property
    def start(self) -> int:
        """Tokens of the sequence before this block."""
        return self.end - len(self.tokens) // TOKEN_BYTES

    @property
    def entries(self) -> "Iterator[Entry]":
        """The block, and the checkpoint if one is known."""
        yield self.block
        if self.checkpoint is not None:
            yield self.checkpoint

    @property
    def is_forgettable(self) -> bool:
        """Tell whether nothing is lost but the memory of its tokens."""
        return not (
            self.children
            or self.awaited
            or any(one.is_resident or one.is_spilling for one in self.entries)
        )


class BlockIndex:
    """All nodes by hash."""

    def __init__(self, nodes_max: int = NODES_MAX) -> None:
        self.recency: Recency[Entry] = Recency()
        self.version = 0
        """Changes with every change of what is resident."""
        self.resident_bytes = 0
        self.system_bytes = 0
        """Of the resident bytes, those of system prompts."""
        self.resident_blocks = 0
        self._nodes_max = nodes_max
        self._nodes: dict[bytes, Node] = {}
        self._roots: dict[bytes, Node] = {}
        self._known: OrderedDict[Node, None] = OrderedDict()
        """All nodes but roots, the least recently touched first, children before parents."""

    def __len__(self) -> int:
        """Return how many blocks are known."""
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        """Iterate over all nodes, the least recently touched first."""
        return iter(self._known)

    def find_root(self, root_hash: bytes) -> Node | None:
        """Return the root of a tenant of whom something is known."""
        return self._roots.get(root_hash)

    def root(self, root_hash: bytes) -> Node:
        """Return the root of a tenant; a new one is known from its first block on."""
        root = self._roots.get(root_hash)
        if root is None:
            root = Node(root_hash, None, b"", 0)
            root.block = Entry(root_hash, root, 0, is_checkpoint=False)
        return root

    def find(self, parent: Node, block_hash: bytes, tokens: bytes) -> Node | None:
        """Return the block of this name behind `parent`, if it holds these tokens."""
        node = self._nodes.get(block_hash)
        if node is None or node.parent is not parent or node.tokens != tokens:
            return None
        return node

    def add(self, parent: Node, block_hash: bytes, tokens: bytes, size_bytes: int) -> Node | None:
        """Return the block behind `parent`, added as a ghost if it is not known.

        None: there is no room for one more, or the hash belongs to other tokens.
        """
        known = self.find(parent, block_hash, tokens)
        if known is not None:
            return known
        if len(self._nodes) >= self._nodes_max:
            self._trim(parent)
        if len(self._nodes) >= self._nodes_max or block_hash in self._nodes:
            return None
        node = Node(block_hash, parent, tokens, parent.end + len(tokens) // TOKEN_BYTES)
        node.block = Entry(block_hash, node, size_bytes, is_checkpoint=False)
        bisect.insort(parent.children, node, key=tokens_of)
        self._nodes[block_hash] = node
        self._known[node] = None
        if parent.parent is None:
            self._roots[parent.hash] = parent
        return node

    def checkpoint(self, node: Node, size_bytes: int) -> Entry:
        """Return the checkpoint at the end of a block, known or not."""
        if node.checkpoint is None:
            name = checkpoint_hash(node.hash)
            node.checkpoint = Entry(name, node, size_bytes, is_checkpoint=True)
        return node.checkpoint

    def set_resident(self, entry: Entry, *, resident: bool) -> None:
        """Note that all ranks hold an entry, or that none does. `touch` its node afterwards."""
        if entry.is_resident is resident:
            raise InvariantBroken(f"{entry.hash.hex()} is resident twice, or evicted twice")
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
            self.recency.add(entry, last=node.is_system)
        else:
            self.recency.remove(entry, last=node.is_system)

    def set_system(self, node: Node) -> None:
        """Evict this block after those that belong to no system prompt."""
        if node.is_system:
            return
        node.is_system = True
        for entry in node.entries:
            if entry.is_resident:
                self.system_bytes += entry.size_bytes
                self.recency.remove(entry, last=False)
                self.recency.add(entry, last=True)

    def touch(self, node: Node, checkpoint: Entry | None = None) -> None:
        """Note a use of all blocks up to `node`, and of the checkpoint there.

        From the last to the first, so that a block is always evicted before the one that it
        follows, and a checkpoint before its block.
        """
        if checkpoint is not None and checkpoint.is_resident:
            self.recency.touch(checkpoint, last=node.is_system)
        at: Node | None = node
        while at is not None and at.parent is not None:
            self._known.move_to_end(at)
            if at.block.is_resident:
                self.recency.touch(at.block, last=at.is_system)
            at = at.parent

    def forget(self, node: Node) -> None:
        """Remove a ghost that has no children."""
        if not node.is_forgettable or node.parent is None:
            raise InvariantBroken(f"block {node.hash.hex()} is in use and cannot be forgotten")
        siblings = node.parent.children
        del siblings[bisect.bisect_left(siblings, node.tokens, key=tokens_of)]
        del self._nodes[node.hash]
        del self._known[node]
        if node.parent.parent is None and not siblings:
            self._roots.pop(node.parent.hash, None)

    def end_epoch(self) -> None:
        """Note that no rank holds anything any more; what is stored stays known."""
        for node in self._known:
            for entry in node.entries:
                if entry.is_resident:
                    self.set_resident(entry, resident=False)
                entry.is_spilling = False
                entry.references = entry.firm_references = 0
            node.awaited = 0

    def clear(self) -> None:
        """Forget everything."""
        self.recency.clear()
        self._nodes.clear()
        self._roots.clear()
        self._known.clear()
        self.resident_bytes = self.system_bytes = self.resident_blocks = 0
        self.version += 1

    def all_entries(self) -> list[Entry]:
        """Return every block and every checkpoint that is known."""
        checkpoints = [one for one in [node.checkpoint for node in self._known] if one is not None]
        return [node.block for node in self._known] + checkpoints

    def check_invariants(self) -> None:
        """Raise InvariantBroken when links, sums or orders contradict the nodes (I9)."""
        held = [one for one in self.all_entries() if one.is_resident]
        blocks = [one for one in held if not one.is_checkpoint]
        system = [one for one in held if one.node.is_system]
        facts = (
            set(self._known) == set(self._nodes.values()),
            self.resident_bytes == sum(one.size_bytes for one in held),
            self.system_bytes == sum(one.size_bytes for one in system),
            self.resident_blocks == len(blocks),
            self._is_in_order(last=False),
            self._is_in_order(last=True),
            len(self.recency) == len(held),
            all(one in self.recency for one in held),
            all(one.node.block.is_resident for one in held),
            all(one.node.parent is not None and one.node.parent.is_resident for one in held),
        )
        if not all(facts):
            raise InvariantBroken(f"the index contradicts its nodes: {facts}")
        self._check_links()

    def _check_links(self) -> None:
        """Raise InvariantBroken unless everybody is once among the children of its parent."""
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

    def _is_in_order(self, *, last: bool) -> bool:
        """Tell whether all are evicted before what they follow."""
        places = {one: place for place, one in enumerate(self.recency.of_class(last=last))}
        for one, place in places.items():
            parent = one.node.parent
            after = one.node.block if one.is_checkpoint else parent.block if parent else None
            if after in places and places[after] < place:
                return False
        return all(one.node.is_system is last for one in places)

    def _trim(self, spared: Node) -> None:
        oldest = list(itertools.islice(self._known, _TRIM_LOOK))
        forgotten = 0
        for node in oldest:
            if node is not spared and node.is_forgettable and forgotten < _TRIM_NODES:
                self.forget(node)
                forgotten += 1


def tokens_of(node: Node) -> bytes:
    """Return what children are sorted by."""
    return node.tokens
