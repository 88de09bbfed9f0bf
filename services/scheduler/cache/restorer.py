"""Restores: stored blocks are read on all ranks while steps run. Owns the open restores.

An order goes to every rank at once. When all ranks have answered, the next plan adopts the blocks
that all of them have read. A sequence waits for its restore no longer than computing the same
tokens would take; a later answer is discarded.
"""

from collections.abc import Callable

from services.scheduler.cache.cache_state import CacheState
from services.scheduler.cache.index.block_index import Node
from services.scheduler.cache.index.prefix_match import Match
from services.scheduler.cache.index.sequence_blocks import SequenceBlocks
from services.scheduler.cache.restore_order import (
    RestoreOrder,
    adopt_blocks,
    learn_stored,
    restore_bytes,
    restore_item,
)
from services.scheduler.cache.spiller import BACK_OFF_S, Spiller
from shared import limits
from shared.configuration.settings import CacheConfig
from shared.messages import AdoptedRestore, BlocksRestored, RestoreBlocks

RESTORES_MAX = 8
"""Most restores that are open at once; further sequences wait for their turn."""
_RESTORES_PER_SEQUENCE_MAX = 3
_UNPREDICTED_DEADLINE_S = 10.0
"""A restore's deadline while the time to compute is not known."""
_DEADLINE_MIN_S = 0.05
_DEADLINE_MAX_S = 120.0
"""A store that needs longer has failed, however long computing may take."""
_GRACE_S = 0.05
"""Time for an answer that a rank sent just before its deadline."""
_WORTHWHILE_MS = 5.0
"""Blocks that are computed faster than this are not restored."""


class Restorer:
    """Orders all ranks to read stored blocks, and adopts those that every rank has read."""

    def __init__(
        self,
        config: CacheConfig,
        state: CacheState,
        spiller: Spiller,
        token_ms: Callable[[int], float],
    ) -> None:
        """Start without restores.

        Args:
            config: the operator's cache settings.
            state: the cache's shared state.
            spiller: told to pause when a store is off.
            token_ms: returns the predicted milliseconds to compute the token at a position of a
                prompt; 0: unknown.
        """
        self._config = config
        self._state = state
        self._spiller = spiller
        self._token_ms = token_ms
        self._outbox: list[RestoreBlocks] = []
        self._open: dict[int, RestoreOrder] = {}
        self._reading: dict[bytes, int] = {}
        """Restore ids by the hash of a block that other sequences may wait for."""
        self._last_id = 0
        self._off_until_s = 0.0

    def __contains__(self, block_hash: bytes) -> bool:
        """Return True while a block, or the checkpoint at its end, is being restored in time."""
        return block_hash in self._reading

    @property
    def _is_stuck(self) -> bool:
        """Whether a rank owes a late answer. Until it comes, no restore is requested."""
        return any(restore.is_late for restore in self._open.values())

    def request(
        self, blocks: SequenceBlocks, match: Match, now_s: float, *, may_evict: bool
    ) -> bool:
        """Request the blocks after a match if reading them is faster than computing them.

        Args:
            blocks: the record of the sequence that would wait.
            match: its resident blocks.
            now_s: the scheduler's time in seconds, from which the restore's deadline counts.
            may_evict: a plan is being built, so blocks can be evicted to make room.

        Returns:
            True if the sequence must wait: a restore was requested, or can be later (restores must
            finish or blocks be evicted first).
        """
        if (
            not self._config.ssd
            or now_s < self._off_until_s
            or blocks.restores_requested >= _RESTORES_PER_SEQUENCE_MAX
            or blocks.restore_miss == "slow"
        ):
            return False
        if self._is_stuck:
            blocks.restore_miss = "slow"
            return False
        nodes = self._find_restorable(blocks, match, may_evict=may_evict)
        missing = min(nodes[-1].end, len(blocks.tokens) - 1) - match.tokens if nodes else 0
        if missing < self._state.block_format.block_tokens:
            return False
        predicted_ms = missing * self._token_ms(match.tokens + missing // 2)
        if 0.0 < predicted_ms < _WORTHWHILE_MS:
            return False
        deadline_s = _UNPREDICTED_DEADLINE_S
        if predicted_ms:
            deadline_s = min(max(predicted_ms / 1_000.0, _DEADLINE_MIN_S), _DEADLINE_MAX_S)
        if len(self._open) >= RESTORES_MAX:
            blocks.queue_until_s = blocks.queue_until_s or now_s + deadline_s
            return self.must_queue(blocks, now_s)
        restore = self._make(blocks, nodes, now_s, deadline_s)
        if not self._fit_into_memory(restore, may_evict=may_evict):
            self._state.pins.release(("restore", restore.restore_id))
            return not may_evict
        self._send(restore)
        return True

    def must_queue(self, blocks: SequenceBlocks, now_s: float) -> bool:
        """Tell whether a sequence still waits for its turn, because too many restores are open.

        When its time for that is over, or a rank owes a late answer, the sequence is marked to be
        computed without a restore.

        Args:
            blocks: the record of the waiting sequence.
            now_s: the scheduler's time in seconds, compared with the end of the wait.
        """
        if not blocks.queue_until_s or len(self._open) < RESTORES_MAX:
            return False
        if now_s <= blocks.queue_until_s and not self._is_stuck:
            return True
        blocks.restore_miss = "slow"
        return False

    def expire(self, now_s: float) -> None:
        """Give up the restores that some rank has not answered in time.

        Memory reserved for them becomes free, sequences that wait for them are computed instead,
        and later answers only tell which blocks are stored.

        Args:
            now_s: the scheduler's time in seconds, which is compared with the restores' deadlines.
        """
        for restore in self._open.values():
            is_answered = len(restore.answers) == self._state.block_format.ranks
            if restore.is_late or is_answered or now_s <= restore.wait_until_s:
                continue
            self._state.counters["cache_restores_late_total"] += 1
            self._free(restore)
            restore.is_late = True
            if restore.blocks is not None:
                restore.blocks.restore_miss = "slow"
                self.stop_waiting(restore.blocks)

    def stop_waiting(self, blocks: SequenceBlocks) -> None:
        """Detach a sequence from its restore, if it waits for one; the restore goes on."""
        if blocks.restore_id is not None:
            self._open[blocks.restore_id].blocks = None
            blocks.restore_id = None

    def handle_restored(self, rank: int, message: BlocksRestored) -> RestoreOrder | None:
        """Record which blocks a rank has read for a restore.

        Args:
            rank: the rank.
            message: its answer. A second one, and one to an unknown restore, is only counted.

        Returns:
            The restore; None if the answer was only counted.
        """
        counters = self._state.counters
        restore = self._open.get(message.restore_id)
        if restore is None or rank in restore.answers or message.count > len(restore.items):
            counters["cache_restore_answers_refused_total"] += 1
            return None
        restore.answers[rank] = message
        counters["cache_restore_bytes_total"] += message.bytes_read
        if len(restore.answers) == self._state.block_format.ranks:
            counters["cache_restores_total"] += 1
            slowest_ms = max(one.read_ms for one in restore.answers.values())
            counters["cache_restore_ms_total"] += slowest_ms
        return restore

    def adopt_answered(self, now_s: float) -> None:
        """Close all restores that every rank has answered, and adopt their blocks.

        The plan being built tells the ranks how many items of each restore to adopt.

        Args:
            now_s: the scheduler's time in seconds; restores and spills pause from then on if a
                rank's store is off.
        """
        block_format = self._state.block_format
        for restore in [
            one for one in self._open.values() if len(one.answers) == block_format.ranks
        ]:
            learn_stored(self._state, restore)
            if any(one.stopped_by == "off" and not one.count for one in restore.answers.values()):
                # Blocks that one rank cannot read are of no use to the others.
                self._off_until_s = now_s + BACK_OFF_S
                self._spiller.back_off(now_s)
            differs = block_format.needs_checkpoints and restore.differs
            adopted = 0
            if not restore.is_late:
                self._release_memory(restore)
                adopted = 0 if differs else adopt_blocks(self._state, restore)
                self._free(restore)
            self._state.orders.adopted.append(
                AdoptedRestore(restore_id=restore.restore_id, count=adopted)
            )
            del self._open[restore.restore_id]
            for node in restore.nodes:
                node.open_restores -= 1
            blocks = restore.blocks
            if blocks is not None:
                blocks.restore_id = None
                if differs and restore.count and not restore.is_retry:
                    self._retry(restore, blocks, now_s)

    def take_outbox(self) -> list[RestoreBlocks]:
        """Return the restores to be sent to all ranks; a later call does not return them again."""
        taken, self._outbox = self._outbox, []
        return taken

    def end_epoch(self) -> None:
        """Forget all restores, which no rank will answer."""
        self._open.clear()
        self._reading.clear()
        self._outbox.clear()
        self._off_until_s = 0.0

    def check_invariants(self, waiting: list[SequenceBlocks]) -> None:
        """Assert that the memory reserved and the sequences waiting match the open restores."""
        waited_for = {one.restore_id for one in waiting if one.restore_id is not None}
        assert waited_for == {one.restore_id for one in self._open.values() if one.blocks}
        in_time = [one for one in self._open.values() if not one.is_late]
        assert sum(one.reserved_bytes for one in in_time) == self._state.reserved_bytes
        restored_nodes = sum(len(one.nodes) for one in self._open.values())
        assert sum(node.open_restores for node in self._state.index) == restored_nodes
        assert set(self._reading.values()) <= {one.restore_id for one in in_time}

    # --- requests ----------------------------------------------------------------------------

    def _find_restorable(
        self, blocks: SequenceBlocks, match: Match, *, may_evict: bool
    ) -> list[Node]:
        """Return the blocks after a match that may be stored, up to the first that is not."""
        chain, index = blocks.chain, self._state.index
        block_format = self._state.block_format
        usable_tokens = len(blocks.tokens) - 1
        first, parent = match.whole_blocks, index.root(chain.root)
        kept_blocks = self._state.kept_tokens_max(blocks) // block_format.block_tokens
        last = min(len(chain.hashes), -(-usable_tokens // block_format.block_tokens), kept_blocks)
        if block_format.needs_checkpoints:
            first = match.tokens // block_format.block_tokens
            last = usable_tokens // block_format.block_tokens
        found: list[Node] = []
        size_bytes = block_format.block_bytes(block_format.block_tokens)
        for number in range(min(last, limits.BLOCKS_PER_MESSAGE_MAX)):
            node = self._state.add_block(
                parent,
                chain.hashes[number],
                chain.packed[number],
                size_bytes,
                may_evict=may_evict,
            )
            if node is None or (
                number >= first and not node.is_resident and node.block.is_stored is False
            ):
                break
            if number >= first:
                found.append(node)
            parent = node
        index.touch(parent)
        while found and block_format.needs_checkpoints:
            if index.checkpoint(found[-1], block_format.checkpoint_bytes).is_stored is not False:
                break
            found.pop()
        return found

    def _make(
        self,
        blocks: SequenceBlocks,
        nodes: list[Node],
        now_s: float,
        deadline_s: float,
        *,
        is_retry: bool = False,
    ) -> RestoreOrder:
        """Return a restore of these blocks that holds the block before them."""
        self._last_id += 1
        restore = RestoreOrder(
            restore_id=self._last_id,
            nodes=nodes,
            items=[restore_item(self._state, node) for node in nodes],
            request_id=blocks.request.request_id,
            ordered_at_s=now_s,
            deadline_s=deadline_s,
            wait_until_s=now_s + deadline_s + _GRACE_S,
            reserved_bytes=restore_bytes(self._state, nodes),
            blocks=blocks,
            is_retry=is_retry,
        )
        anchor = restore.anchor
        self._state.pins.hold(("restore", restore.restore_id), *([anchor] if anchor else []))
        return restore

    def _fit_into_memory(self, restore: RestoreOrder, *, may_evict: bool) -> bool:
        """Make room for a restore and shorten it as needed; return False when nothing fits."""
        while restore.nodes:
            if restore.reserved_bytes <= self._state.free_bytes:
                return True
            if not may_evict:
                return False
            if self._state.make_room(restore.reserved_bytes):
                return True
            restore.nodes = restore.nodes[: len(restore.nodes) // 2]
            restore.items = restore.items[: len(restore.nodes)]
            restore.reserved_bytes = restore_bytes(self._state, restore.nodes)
        return False

    def _send(self, restore: RestoreOrder) -> None:
        assert restore.blocks is not None
        self._open[restore.restore_id] = restore
        self._state.reserved_bytes += restore.reserved_bytes
        for node in restore.nodes:
            node.open_restores += 1
            self._reading[node.hash] = restore.restore_id
        restore.blocks.restore_id = restore.restore_id
        restore.blocks.restores_requested += 1
        self._outbox.append(
            RestoreBlocks(
                epoch=self._state.epoch,
                restore_id=restore.restore_id,
                namespace=self._state.block_format.namespace,
                items=restore.items,
                deadline_s=restore.deadline_s,
            )
        )

    def _retry(self, restore: RestoreOrder, blocks: SequenceBlocks, now_s: float) -> None:
        """Request again the items that every rank can read.

        Needed because each rank has read only the checkpoint of its own last item.
        """
        nodes = restore.nodes[: restore.count]
        parent = nodes[0].parent
        if parent is None or not parent.is_resident:
            # Rows took the block before them; the sequence is looked up again.
            return
        retry = self._make(blocks, nodes, now_s, restore.deadline_s, is_retry=True)
        if retry.reserved_bytes <= self._state.free_bytes:
            self._send(retry)
        else:
            self._state.pins.release(("restore", retry.restore_id))

    def _release_memory(self, restore: RestoreOrder) -> None:
        self._state.reserved_bytes -= restore.reserved_bytes
        restore.reserved_bytes = 0

    def _free(self, restore: RestoreOrder) -> None:
        """Release a restore's memory and references, and let no other sequence wait for it."""
        self._release_memory(restore)
        self._state.pins.release(("restore", restore.restore_id))
        for node in restore.nodes:
            if self._reading.get(node.hash) == restore.restore_id:
                del self._reading[node.hash]
