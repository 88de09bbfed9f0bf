"""Keeping: what of a sequence's row becomes resident blocks and checkpoints, in the next plan.

Only tokens that are known here and that plans already sent have computed. A block that is resident
already is only touched. A prefix comes first: where there is no memory for one block, none behind
it is kept. What is evicted while its sequence runs is kept again when the row ends, not before.
"""

from collections import defaultdict

from services.scheduler.cache.block_orders import PlannedBlockOrders
from services.scheduler.cache.index.block_format import BlockFormat
from services.scheduler.cache.index.block_index import BlockIndex, Entry, Node
from services.scheduler.cache.index.hashes import block_hash, pack
from services.scheduler.cache.index.prefix_match import nearest_before, nearest_from
from services.scheduler.cache.index.sequence_blocks import SequenceBlocks
from services.scheduler.cache.memory import BlockMemory
from services.scheduler.cache.pins import BlockPins
from services.scheduler.cache.spiller import Spiller
from shared.messages import KeptBlock, KeptCheckpoint


class Keeper:
    """Writes keeps into the orders of the plan in the making."""

    def __init__(
        self,
        index: BlockIndex,
        pins: BlockPins,
        memory: BlockMemory,
        orders: PlannedBlockOrders,
        spilling: Spiller,
        counters: defaultdict[str, float],
    ) -> None:
        self._index = index
        self._pins = pins
        self._memory = memory
        self._orders = orders
        self._spilling = spilling
        self._counters = counters

    def keep(self, form: BlockFormat, blocks: SequenceBlocks, computed: int, *, ends: bool) -> None:
        """Keep what of a row is not resident yet.

        Args:
            form: what a block is.
            blocks: the sequence.
            computed: tokens that are known, and in the row once the plans sent are applied.
            ends: its row is given up with the next plan, so this is the last chance.
        """
        assert blocks.chain is not None
        blocks.chain.extend()
        whole = computed // form.block_tokens
        path = self._keep_whole(form, blocks, whole, ends=ends)
        last = path[-1] if path else self._index.root(blocks.chain.root)
        if ends and not form.needs_checkpoints and len(path) == whole:
            last = self._keep_tail(form, blocks, last, computed)
        if 0 < blocks.set_aside <= computed:
            self._keep_checkpoint(form, blocks, path)
        state = blocks.decode_checkpoint
        if ends and state is not None and state.is_resident:
            state.owner = 0
            self._spilling.offer(state)
        self._index.touch(last)
        self._pins.release(("plan", blocks.sequence_id))
        blocks.border = (whole + 1) * form.block_tokens

    def _keep_whole(
        self, form: BlockFormat, blocks: SequenceBlocks, whole: int, *, ends: bool
    ) -> list[Node]:
        """Keep whole blocks; return those that are resident then, from the first on."""
        chain, path = blocks.chain, blocks.path
        assert chain is not None
        # Whatever a resident block follows is resident too.
        while path and not path[-1].is_resident:
            path.pop()
        first = 0 if ends else len(path)
        at, goes_on = path[-1] if path else self._index.root(chain.root), True
        for number in range(len(path), whole):
            name, packed = chain.hashes[number], chain.packed[number]
            node = self._index.add(at, name, packed, form.block_bytes(form.block_tokens))
            if node is None:
                break
            node.is_known = True
            if node.end <= blocks.system_tokens:
                self._index.set_system(node)
            # Two running sequences that kept again what the other has evicted would copy their
            # rows all the time; the end of a row is the last chance.
            may_keep = ends or number >= blocks.handled
            if not node.is_resident:
                goes_on = goes_on and may_keep and self._keep_block(blocks, node)
            if goes_on:
                path.append(node)
            at = node
        for node in path[first:]:
            self._spilling.offer(node.block)
        blocks.handled = whole
        self._index.touch(at)
        return path

    def _keep_tail(
        self, form: BlockFormat, blocks: SequenceBlocks, last: Node, computed: int
    ) -> Node:
        """Keep what is behind the last whole block; return the last block that is resident."""
        packed = pack(blocks.tokens[last.end : computed])
        if not packed:
            return last
        for longer in nearest_from(last, packed):
            if longer.is_resident and longer.tokens.startswith(packed):
                return longer
        size_bytes = form.block_bytes(computed - last.end)
        tail = self._index.add(last, block_hash(last.hash, packed), packed, size_bytes)
        if tail is None:
            return last
        tail.is_known = True
        return tail if tail.is_resident or self._keep_block(blocks, tail) else last

    def _keep_block(self, blocks: SequenceBlocks, node: Node) -> bool:
        """Keep one block behind resident ones; False when there is no memory for it."""
        assert node.parent is not None
        if node.parent.parent is not None:
            self._pins.hold(("plan", blocks.sequence_id), node.parent.block)
        if not self._memory.make_room(node.block.size_bytes, system=node.is_system):
            return False
        self._orders.keep_block(
            KeptBlock(
                sequence_id=blocks.sequence_id,
                start=node.start,
                length=node.end - node.start,
                hash=node.hash,
            )
        )
        self._index.set_resident(node.block, resident=True)
        self._counters["cache_blocks_kept_total"] += 1
        self._replace_tails(node)
        return True

    def _replace_tails(self, node: Node) -> None:
        """Evict the shorter blocks whose tokens this one holds too."""
        assert node.parent is not None
        for shorter in nearest_before(node.parent, node.tokens):
            tail = shorter.block
            if not node.tokens.startswith(shorter.tokens) or tail.references:
                continue
            if tail.is_resident:
                self._memory.evict([tail])
            if shorter.is_forgettable:
                self._index.forget(shorter)

    def _keep_checkpoint(self, form: BlockFormat, blocks: SequenceBlocks, path: list[Node]) -> None:
        """Keep the state that the sequence has set aside, if its blocks are resident."""
        position = blocks.set_aside
        number = position // form.block_tokens
        if len(path) < number:
            return
        node = path[number - 1]
        state = self._index.checkpoint(node, form.checkpoint_bytes)
        if blocks.is_decode_state:
            self._supersede(blocks, state)
        if not state.is_resident:
            self._pins.hold(("plan", blocks.sequence_id), path[-1].block)
            if not self._memory.make_room(state.size_bytes, system=node.is_system):
                return
            self._orders.keep_checkpoint(
                KeptCheckpoint(sequence_id=blocks.sequence_id, position=position, hash=state.hash)
            )
            self._index.set_resident(state, resident=True)
            self._counters["cache_checkpoints_kept_total"] += 1
            state.owner = blocks.sequence_id if blocks.is_decode_state else 0
        blocks.set_aside = 0
        if blocks.is_decode_state:
            blocks.decode_checkpoint = state
        else:
            self._spilling.offer(state)
        self._index.touch(node, state)

    def _supersede(self, blocks: SequenceBlocks, state: Entry) -> None:
        """Evict the sequence's last decode checkpoint if nobody else has used it."""
        old = blocks.decode_checkpoint
        if (
            old is not None
            and old is not state
            and old.is_resident
            and old.owner == blocks.sequence_id
            and not (old.references or old.is_spilling)
        ):
            self._memory.evict([old])
