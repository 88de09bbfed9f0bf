"""Adopting: what all ranks have read becomes resident, on all of them with the same plan."""

from collections import defaultdict

from services.scheduler.cache.block_orders import PlannedBlockOrders
from services.scheduler.cache.index.block_format import BlockFormat
from services.scheduler.cache.index.block_index import BlockIndex, Entry, Node
from services.scheduler.cache.memory import BlockMemory
from services.scheduler.cache.pins import BlockPins
from services.scheduler.cache.restore_order import RestoreOrder, restore_bytes


class Adopter:
    """Turns answers into residents, and learns from them what is stored."""

    def __init__(
        self,
        index: BlockIndex,
        pins: BlockPins,
        memory: BlockMemory,
        orders: PlannedBlockOrders,
        counters: defaultdict[str, float],
    ) -> None:
        self._index = index
        self._pins = pins
        self._memory = memory
        self._orders = orders
        self._counters = counters

    def adopt(self, form: BlockFormat, restore: RestoreOrder) -> int:
        """Make the first items of a restore resident; return how many, 0 if nothing fits.

        The caller holds the block that they follow, and has freed what was set apart for them.
        """
        nodes = restore.nodes[: restore.count]
        if not nodes or not self._is_wanted(form, restore, nodes):
            return 0
        while not self._memory.make_room(restore_bytes(form, nodes)):
            if form.needs_checkpoints or len(nodes) == 1:
                return 0
            nodes = nodes[: len(nodes) // 2]
        entries = [node.block for node in nodes if not node.is_resident]
        state = nodes[-1].checkpoint if form.needs_checkpoints else None
        if state is not None:
            entries.append(state)
        for entry in entries:
            self._index.set_resident(entry, resident=True)
        self._index.touch(nodes[-1], state)
        self._counters["cache_blocks_restored_total"] += len(entries)
        if restore.blocks is not None:
            first, last = restore.blocks.restored
            goes_on = first < last == nodes[0].start
            restore.blocks.restored = first if goes_on else nodes[0].start, nodes[-1].end
            held = [nodes[-1].block] if state is None else [nodes[-1].block, state]
            self._pins.hold(("waiting", restore.blocks.sequence_id), *held)
        return len(nodes)

    def learn(self, form: BlockFormat, restore: RestoreOrder) -> None:
        """Note what is stored and what is not, and why the one who waits gets less."""
        count, answers = restore.count, restore.answers.values()
        for node in restore.nodes[:count]:
            node.is_known = True
            if not node.is_resident:
                node.block.is_stored = True
        if count and form.needs_checkpoints:
            self._state(form, restore.nodes[count - 1]).is_stored = True
        if count == len(restore.nodes):
            return
        causes = {answer.stopped_by for answer in answers if answer.count == count}
        was_known = False
        if causes & {"absent", "unreadable"}:
            for entry in self._missing(form, restore.nodes[count:]):
                was_known = was_known or entry.is_stored is True
                entry.is_stored = False
        if restore.blocks is None:
            return
        if was_known or "unreadable" in causes:
            restore.blocks.restore_miss = "unreadable"
        elif causes & {"late", "full"}:
            restore.blocks.restore_miss = "slow"

    def _is_wanted(self, form: BlockFormat, restore: RestoreOrder, nodes: list[Node]) -> bool:
        """Tell whether all is as it was when it was asked for.

        Rows may have taken the blocks that these follow, and others may have computed them.
        """
        entries: list[tuple[Entry, bool]] = []
        for node, item in zip(nodes, restore.items, strict=False):
            entries.append((node.block, item.block is None))
        if form.needs_checkpoints:
            entries.append((self._state(form, nodes[-1]), False))
        parent = nodes[0].parent
        return (
            parent is not None
            and parent.is_resident
            and all(
                entry.is_resident is was_resident and entry.hash not in self._orders.evicted
                for entry, was_resident in entries
            )
        )

    def _missing(self, form: BlockFormat, nodes: list[Node]) -> list[Entry]:
        """Return what must be missing somewhere when a restore ends before these."""
        if not form.needs_checkpoints:
            return [nodes[0].block]
        return [self._state(form, node) for node in nodes]

    def _state(self, form: BlockFormat, node: Node) -> Entry:
        return self._index.checkpoint(node, form.checkpoint_bytes)
