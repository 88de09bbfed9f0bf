"""One restore: the order to all ranks and their answers. Owns no block; sends nothing."""

import dataclasses

from services.scheduler.cache.index.block_format import BlockFormat
from services.scheduler.cache.index.block_index import BlockIndex, Entry, Node
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


def restore_item(index: BlockIndex, block_format: BlockFormat, node: Node) -> RestoreItem:
    """Return the item of an order that restores a block, and its checkpoint where rows need one.

    Args:
        index: all known blocks.
        block_format: the block format of this epoch.
        node: the block; if it is resident, only its checkpoint is restored.
    """
    checkpoint = None
    if block_format.needs_checkpoints:
        checkpoint = index.checkpoint(node, block_format.checkpoint_bytes)
    return RestoreItem(
        block=None if node.is_resident else node.hash,
        length=node.end - node.start,
        checkpoint=None if checkpoint is None or checkpoint.is_stored is False else checkpoint.hash,
    )


def restore_bytes(block_format: BlockFormat, nodes: list[Node]) -> int:
    """Return the memory per rank, in bytes, that a restore of blocks needs.

    Args:
        block_format: the block format of this epoch.
        nodes: the blocks in order; resident ones need nothing. The last one's checkpoint is
            included where rows need one.
    """
    blocks = sum(node.block.size_bytes for node in nodes if not node.is_resident)
    return blocks + (block_format.checkpoint_bytes if block_format.needs_checkpoints else 0)
