"""One restore: an order to all ranks, and what they answer."""

import dataclasses

from services.scheduler.cache.index.block_format import BlockFormat
from services.scheduler.cache.index.block_index import BlockIndex, Entry, Node
from services.scheduler.cache.index.sequence_blocks import SequenceBlocks
from shared.messages import BlocksRestored, RestoreItem


@dataclasses.dataclass(slots=True, eq=False)
class RestoreOrder:
    """What was asked for, for whom, and until when."""

    restore_id: int
    nodes: list[Node]
    """Of each item."""
    items: list[RestoreItem]
    deadline_s: float
    until_s: float
    """When whoever waits goes on without it."""
    reserved_bytes: int
    blocks: SequenceBlocks | None
    """Who waits for it; None: nobody any more."""
    is_limited: bool = False
    """It was asked again for what every rank can have."""
    is_late: bool = False
    """Nobody waits, and nothing will be adopted."""
    answers: dict[int, BlocksRestored] = dataclasses.field(default_factory=dict)
    """By rank."""

    @property
    def count(self) -> int:
        """Return how many items every rank can have."""
        return min(answer.count for answer in self.answers.values())

    @property
    def differs(self) -> bool:
        """Tell whether some rank can have more than another."""
        return len({answer.count for answer in self.answers.values()}) > 1

    @property
    def anchor(self) -> Entry | None:
        """Return the last resident block that the restored ones follow; None: they are first."""
        first = self.nodes[0].parent
        at = first.block if first is not None and first.parent is not None else None
        for node in self.nodes:
            if not node.is_resident:
                break
            at = node.block
        return at


def restore_item(index: BlockIndex, form: BlockFormat, node: Node) -> RestoreItem:
    """Return what to ask for so that rows can be built up to the end of a block."""
    state = index.checkpoint(node, form.checkpoint_bytes) if form.needs_checkpoints else None
    return RestoreItem(
        block=None if node.is_resident else node.hash,
        length=node.end - node.start,
        checkpoint=None if state is None or state.is_stored is False else state.hash,
    )


def restore_bytes(form: BlockFormat, nodes: list[Node]) -> int:
    """Return what these take when they are restored, with the last one's checkpoint."""
    blocks = sum(node.block.size_bytes for node in nodes if not node.is_resident)
    return blocks + (form.checkpoint_bytes if form.needs_checkpoints else 0)
