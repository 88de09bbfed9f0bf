"""Keeping: parts of a sequence's row become resident blocks and checkpoints with the next plan.

Only tokens that the scheduler knows and that sent plans have computed are kept. Resident blocks are
only touched. Blocks are kept from the start of the row on: without memory for one block, none after
it is kept. A block that is evicted while its sequence runs is kept again only when the row ends.
"""

from services.scheduler.cache.cache_state import CacheState
from services.scheduler.cache.index.block_index import Entry, Node
from services.scheduler.cache.index.hashes import block_hash
from services.scheduler.cache.index.prefix_match import nearest_before, nearest_from
from services.scheduler.cache.index.sequence_blocks import UNREACHABLE_TOKENS, SequenceBlocks
from services.scheduler.cache.spiller import Spiller
from shared.messages import KeptBlock, KeptCheckpoint
from shared.messages.token_ids import pack


class Keeper:
    """Orders ranks to copy parts of a sequence's row into blocks and checkpoints, for reuse."""

    def __init__(self, state: CacheState, spiller: Spiller) -> None:
        self._state = state
        self._spiller = spiller

    def keep(self, blocks: SequenceBlocks, computed: int, *, ends: bool) -> None:
        """Order ranks to keep the whole blocks and the snapshot of a row that are not resident yet.

        When the row ends, also the tokens after its last whole block, unless rows need checkpoints.
        Whole blocks that are resident then are offered to be spilled.

        Args:
            blocks: the record of the sequence.
            computed: number of leading tokens that may be kept: their ids are known, and the row
                contains them after all sent plans.
            ends: the next plan drops the row.
        """
        block_format = self._state.block_format
        blocks.chain.extend()
        kept_max = self._state.kept_tokens_max(blocks)
        computed = min(computed, kept_max)
        whole_blocks = computed // block_format.block_tokens
        path = self._keep_whole(blocks, whole_blocks, ends=ends)
        last = path[-1] if path else self._state.index.root(blocks.chain.root)
        if ends and not block_format.needs_checkpoints and len(path) == whole_blocks:
            last = self._keep_tail(blocks, last, computed)
        if 0 < blocks.snapshot_tokens <= computed:
            self._keep_checkpoint(blocks, path)
        checkpoint = blocks.decode_checkpoint
        if ends and checkpoint is not None and checkpoint.is_resident:
            checkpoint.owner = 0
            self._spiller.offer(checkpoint)
        self._state.index.touch(last)
        self._state.pins.release(("plan", blocks.sequence_id))
        following = (whole_blocks + 1) * block_format.block_tokens
        blocks.next_boundary = following if following <= kept_max else UNREACHABLE_TOKENS

    def _keep_whole(self, blocks: SequenceBlocks, whole_blocks: int, *, ends: bool) -> list[Node]:
        """Keep whole blocks; return the leading ones that are resident then."""
        chain, path, index = blocks.chain, blocks.resident_path, self._state.index
        block_format = self._state.block_format
        block_bytes = block_format.block_bytes(block_format.block_tokens)
        # All blocks before a resident one are resident.
        while path and not path[-1].is_resident:
            path.pop()
        first = 0 if ends else len(path)
        parent, is_unbroken = path[-1] if path else index.root(chain.root), True
        for number in range(len(path), whole_blocks):
            node = self._state.add_block(
                parent, chain.hashes[number], chain.packed[number], block_bytes
            )
            if node is None:
                break
            node.is_known = True
            if node.end <= blocks.request.system_tokens:
                index.set_system(node)
            # Two running sequences that keep again what the other one evicted would copy their
            # rows with every plan.
            may_keep = ends or number >= blocks.settled_blocks
            if not node.is_resident:
                is_unbroken = is_unbroken and may_keep and self._keep_block(blocks, node)
            if is_unbroken:
                path.append(node)
            parent = node
        for node in path[first:]:
            self._spiller.offer(node.block)
        blocks.settled_blocks = whole_blocks
        index.touch(parent)
        return path

    def _keep_tail(self, blocks: SequenceBlocks, last: Node, computed: int) -> Node:
        """Keep the tokens after the last whole block; return the last resident block."""
        packed = pack(blocks.tokens[last.end : computed])
        if not packed:
            return last
        for longer in nearest_from(last, packed):
            if longer.is_resident and longer.tokens.startswith(packed):
                return longer
        size_bytes = self._state.block_format.block_bytes(computed - last.end)
        tail = self._state.add_block(last, block_hash(last.hash, packed), packed, size_bytes)
        if tail is None:
            return last
        tail.is_known = True
        return tail if tail.is_resident or self._keep_block(blocks, tail) else last

    def _keep_block(self, blocks: SequenceBlocks, node: Node) -> bool:
        """Keep one block whose parent is resident; return False without memory for it."""
        assert node.parent is not None
        if node.parent.parent is not None:
            self._state.pins.hold(("plan", blocks.sequence_id), node.parent.block)
        if not self._state.make_room(node.block.size_bytes, system=node.is_system):
            return False
        kept = KeptBlock(
            sequence_id=blocks.sequence_id,
            start=node.start,
            length=node.end - node.start,
            hash=node.hash,
        )
        self._state.keep(node.block, kept)
        self._replace_tails(node)
        return True

    def _replace_tails(self, node: Node) -> None:
        """Evict shorter blocks whose tokens this block begins with."""
        assert node.parent is not None
        for shorter in nearest_before(node.parent, node.tokens):
            tail = shorter.block
            if not node.tokens.startswith(shorter.tokens) or tail.references:
                continue
            if tail.is_resident:
                self._state.evict([tail])
            if shorter.is_forgettable:
                self._state.index.forget(shorter)

    def _keep_checkpoint(self, blocks: SequenceBlocks, path: list[Node]) -> None:
        """Keep the sequence's snapshot as a checkpoint when its blocks are resident."""
        block_format, position = self._state.block_format, blocks.snapshot_tokens
        number = position // block_format.block_tokens
        if len(path) < number:
            return
        node = path[number - 1]
        checkpoint = self._state.index.checkpoint(node, block_format.checkpoint_bytes)
        if blocks.is_decode_snapshot:
            self._evict_superseded(blocks, checkpoint)
        if not checkpoint.is_resident:
            self._state.pins.hold(("plan", blocks.sequence_id), path[-1].block)
            if not self._state.make_room(checkpoint.size_bytes, system=node.is_system):
                return
            kept = KeptCheckpoint(
                sequence_id=blocks.sequence_id, position=position, hash=checkpoint.hash
            )
            self._state.keep(checkpoint, kept)
            checkpoint.owner = blocks.sequence_id if blocks.is_decode_snapshot else 0
        blocks.snapshot_tokens = 0
        if blocks.is_decode_snapshot:
            blocks.decode_checkpoint = checkpoint
        else:
            self._spiller.offer(checkpoint)
        self._state.index.touch(node, checkpoint)

    def _evict_superseded(self, blocks: SequenceBlocks, checkpoint: Entry) -> None:
        """Evict the sequence's previous decode checkpoint unless another sequence used it."""
        old = blocks.decode_checkpoint
        if (
            old is not None
            and old is not checkpoint
            and old.is_resident
            and old.owner == blocks.sequence_id
            and not (old.references or old.is_spilling)
        ):
            self._state.evict([old])
