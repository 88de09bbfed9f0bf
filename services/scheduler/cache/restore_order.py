"""One restore: the order to all ranks, their answers, and what follows from them; sends nothing.

All ranks make the same blocks resident with the same plan.
"""

import dataclasses

from services.scheduler.cache.cache_state import CacheState
from services.scheduler.cache.index.block_index import Entry, Node
from services.scheduler.cache.index.sequence_blocks import SequenceBlocks
from shared.messages import BlocksRestored, RestoreItem


@dataclasses.dataclass(slots=True, eq=False)
class RestoreOrder:
    """A restore that all ranks were asked for, from its request until all have answered.

    An item is one block, and the checkpoint at its end where rows need one.
    """

    restore_id: int
    nodes: list[Node]
    """The block of each item."""
    items: list[RestoreItem]
    request_id: str
    """The request of the sequence that waited first."""
    ordered_at_s: float
    """When it was ordered, on the scheduler's clock."""
    deadline_s: float
    """Seconds that a rank may take."""
    wait_until_s: float
    """When the sequence stops waiting for it."""
    reserved_bytes: int
    """Memory per rank that is reserved for it."""
    blocks: SequenceBlocks | None
    """The sequence that waits for it; None when it stopped waiting."""
    is_retry: bool = False
    """It repeats an earlier restore for only the items that every rank can read."""
    is_late: bool = False
    """Its time is over: no sequence waits for it, and nothing will be adopted."""
    answers: dict[int, BlocksRestored] = dataclasses.field(default_factory=dict)
    """By rank."""

    @property
    def count(self) -> int:
        """Number of leading items that every rank has read, once all ranks have answered."""
        return min(answer.count for answer in self.answers.values())

    @property
    def differs(self) -> bool:
        """Whether the ranks that have answered have read different numbers of items."""
        return len({answer.count for answer in self.answers.values()}) > 1

    @property
    def anchor(self) -> Entry | None:
        """The resident block that the first restored one follows; None at a sequence's start."""
        parent = self.nodes[0].parent
        anchor = parent.block if parent is not None and parent.parent is not None else None
        for node in self.nodes:
            if not node.is_resident:
                break
            anchor = node.block
        return anchor


def restore_item(state: CacheState, node: Node) -> RestoreItem:
    """Return the item of an order that restores a block, and its checkpoint where rows need one.

    Args:
        state: the cache's shared state.
        node: the block; if it is resident, only its checkpoint is restored.
    """
    checkpoint = _checkpoint(state, node) if state.block_format.needs_checkpoints else None
    return RestoreItem(
        block=None if node.is_resident else node.hash,
        length=node.end - node.start,
        checkpoint=None if checkpoint is None or checkpoint.is_stored is False else checkpoint.hash,
    )


def restore_bytes(state: CacheState, nodes: list[Node]) -> int:
    """Return the memory per rank, in bytes, that a restore of blocks needs.

    Args:
        state: the cache's shared state.
        nodes: the blocks in order; resident ones need nothing. The last one's checkpoint is
            included where rows need one.
    """
    blocks = sum(node.block.size_bytes for node in nodes if not node.is_resident)
    checkpoint_bytes = state.block_format.checkpoint_bytes
    return blocks + (checkpoint_bytes if state.block_format.needs_checkpoints else 0)


def adopt_blocks(state: CacheState, restore: RestoreOrder) -> int:
    """Make the leading blocks of a restore resident, as far as every rank has read them.

    Before the call, the memory reserved for the restore must be released, and the resident block
    before its blocks protected from eviction.

    Args:
        state: the cache's shared state.
        restore: a restore that all ranks have answered.

    Returns:
        The number of leading blocks that ranks adopt. 0 when there is no memory for them, or when
        one of their blocks was computed or evicted since the restore was requested.
    """
    block_format = state.block_format
    nodes = restore.nodes[: restore.count]
    if not nodes or not _is_unchanged(state, restore, nodes):
        return 0
    while not state.make_room(restore_bytes(state, nodes)):
        if block_format.needs_checkpoints or len(nodes) == 1:
            return 0
        nodes = nodes[: len(nodes) // 2]
    entries = [node.block for node in nodes if not node.is_resident]
    checkpoint = _checkpoint(state, nodes[-1]) if block_format.needs_checkpoints else None
    if checkpoint is not None:
        entries.append(checkpoint)
    state.adopt(entries)
    state.index.touch(nodes[-1], checkpoint)
    if restore.blocks is not None:
        first, last = restore.blocks.restored_range
        continues = first < last == nodes[0].start
        restore.blocks.restored_range = first if continues else nodes[0].start, nodes[-1].end
        held = [nodes[-1].block] if checkpoint is None else [nodes[-1].block, checkpoint]
        state.pins.hold(("waiting", restore.blocks.sequence_id), *held)
    return len(nodes)


def learn_stored(state: CacheState, restore: RestoreOrder) -> None:
    """Record, from all ranks' answers to a restore, which blocks and checkpoints are stored.

    Items that every rank has read are stored. If a store lacks the next record or cannot read it,
    this block, or every later checkpoint, is not. A sequence that still waits for the restore and
    gets less than it requested learns the cause (`restore_miss`).

    Args:
        state: the cache's shared state.
        restore: a restore that all ranks have answered.
    """
    count, answers = restore.count, restore.answers.values()
    needs_checkpoints = state.block_format.needs_checkpoints
    for node in restore.nodes[:count]:
        node.is_known = True
        if not node.is_resident:
            node.block.is_stored, node.block.stored_at_s = True, state.index.now_s
    if count and needs_checkpoints:
        checkpoint = _checkpoint(state, restore.nodes[count - 1])
        checkpoint.is_stored, checkpoint.stored_at_s = True, state.index.now_s
    if count == len(restore.nodes):
        return
    causes = {answer.stopped_by for answer in answers if answer.count == count}
    was_known = False
    if causes & {"absent", "unreadable"}:
        for entry in _missing(state, restore.nodes[count:]):
            was_known = was_known or entry.is_stored is True
            entry.is_stored = False
    if restore.blocks is None:
        return
    if was_known or "unreadable" in causes:
        restore.blocks.restore_miss = "unreadable"
    elif causes & {"late", "full"}:
        restore.blocks.restore_miss = "slow"


def _is_unchanged(state: CacheState, restore: RestoreOrder, nodes: list[Node]) -> bool:
    """Return True when no block of a restore was computed or evicted since it was requested."""
    entries = [
        (node.block, item.block is None) for node, item in zip(nodes, restore.items, strict=False)
    ]
    if state.block_format.needs_checkpoints:
        entries.append((_checkpoint(state, nodes[-1]), False))
    parent = nodes[0].parent
    return (
        parent is not None
        and parent.is_resident
        and all(
            entry.is_resident is was_resident and entry.hash not in state.orders.evicted
            for entry, was_resident in entries
        )
    )


def _missing(state: CacheState, nodes: list[Node]) -> list[Entry]:
    """Return the entries that some store lacks when a restore ends before these blocks."""
    if not state.block_format.needs_checkpoints:
        return [nodes[0].block]
    return [_checkpoint(state, node) for node in nodes]


def _checkpoint(state: CacheState, node: Node) -> Entry:
    return state.index.checkpoint(node, state.block_format.checkpoint_bytes)
