"""Restorer: stored blocks are read on all ranks while steps go on, and become resident together.

A restore goes to every rank at once. When all have answered, the next plan adopts what all of them
have, or nothing. The sequence that it was asked for waits no longer than computing the same tokens
would take; whatever comes later is forgotten.
"""

from collections import defaultdict
from collections.abc import Callable
from enum import Enum

from services.scheduler.cache.adoption import Adopter
from services.scheduler.cache.block_orders import PlannedBlockOrders
from services.scheduler.cache.index.block_format import BlockFormat
from services.scheduler.cache.index.block_index import BlockIndex, Node
from services.scheduler.cache.index.prefix_match import Match
from services.scheduler.cache.index.sequence_blocks import SequenceBlocks
from services.scheduler.cache.memory import BlockMemory
from services.scheduler.cache.pins import BlockPins
from services.scheduler.cache.restore_order import RestoreOrder, restore_bytes, restore_item
from services.scheduler.cache.spiller import BACK_OFF_S, Spiller
from shared import limits
from shared.configuration.settings import CacheConfig
from shared.messages import AdoptedRestore, BlocksRestored, RestoreBlocks

RESTORES_MAX = 8
"""Restores that are not adopted yet, at once; who would be one more waits for its turn."""
_RESTORES_PER_SEQUENCE = 3
_UNKNOWN_S = 10.0
"""Time for a restore while nothing is known of what computing takes."""
_LEAST_S = 0.05
_MOST_S = 120.0
"""A store that needs longer has failed, however long computing may seem to take."""
_GRACE_S = 0.05
"""An answer that left a rank in time may be on its way."""
_WORTH_MS = 5.0
"""What is computed faster is not asked for."""


class RestoreDecision(Enum):
    """Whether a restore was asked for."""

    YES = "yes"
    NO = "no"
    LATER = "later"
    """It will be, with the next plan or when others have ended."""


class Restorer:
    """The restores of an epoch."""

    def __init__(
        self,
        config: CacheConfig,
        index: BlockIndex,
        pins: BlockPins,
        memory: BlockMemory,
        orders: PlannedBlockOrders,
        spilling: Spiller,
        counters: defaultdict[str, float],
    ) -> None:
        self._outbox: list[RestoreBlocks] = []
        self._config = config
        self._index = index
        self._pins = pins
        self._memory = memory
        self._orders = orders
        self._spilling = spilling
        self._counters = counters
        self._adopter = Adopter(index, pins, memory, orders, counters)
        self._open: dict[int, RestoreOrder] = {}
        self._reading: dict[bytes, int] = {}
        """Restores that others may wait for, by block hash."""
        self._numbers = 0
        self._off_until_s = 0.0

    def __contains__(self, block_hash: bytes) -> bool:
        """Tell whether this block, or the checkpoint at its end, is being read in time."""
        return block_hash in self._reading

    @property
    def _is_stuck(self) -> bool:
        """Some rank owes an answer whose time is over: until it comes it is asked for nothing."""
        return any(restore.is_late for restore in self._open.values())

    def ask(
        self,
        form: BlockFormat,
        epoch: int,
        blocks: SequenceBlocks,
        match: Match,
        now_s: float,
        token_ms: Callable[[int], float],
        *,
        may_evict: bool,
    ) -> RestoreDecision:
        """Ask for what may be stored behind a match, if reading it is worth while.

        Args:
            form: what a block is.
            epoch: of the ranks.
            blocks: the sequence that will wait.
            match: what is resident of it.
            now_s: the time.
            token_ms: predicted milliseconds to compute a token at a place in a prompt.
            may_evict: a plan is in the making, which can carry evictions.
        """
        if (
            not self._config.ssd
            or now_s < self._off_until_s
            or blocks.restores >= _RESTORES_PER_SEQUENCE
            or blocks.restore_miss == "slow"
        ):
            return RestoreDecision.NO
        if self._is_stuck:
            blocks.restore_miss = "slow"
            return RestoreDecision.NO
        nodes = self._wanted(form, blocks, match)
        missing = min(nodes[-1].end, len(blocks.tokens) - 1) - match.tokens if nodes else 0
        if missing < form.block_tokens:
            return RestoreDecision.NO
        predicted_ms = missing * token_ms(match.tokens + missing // 2)
        if 0.0 < predicted_ms < _WORTH_MS:
            return RestoreDecision.NO
        deadline_s = _UNKNOWN_S
        if predicted_ms:
            deadline_s = min(max(predicted_ms / 1_000.0, _LEAST_S), _MOST_S)
        if len(self._open) >= RESTORES_MAX:
            blocks.patience_until_s = blocks.patience_until_s or now_s + deadline_s
            return RestoreDecision.LATER if self.must_queue(blocks, now_s) else RestoreDecision.NO
        restore = self._make(form, blocks, nodes, now_s, deadline_s)
        if not self._make_room(form, restore, may_evict=may_evict):
            self._pins.release(("restore", restore.restore_id))
            return RestoreDecision.NO if may_evict else RestoreDecision.LATER
        self._send(form, epoch, restore)
        return RestoreDecision.YES

    def must_queue(self, blocks: SequenceBlocks, now_s: float) -> bool:
        """Tell whether a sequence waits until other restores end; give its own up when too long."""
        if not blocks.patience_until_s or len(self._open) < RESTORES_MAX:
            return False
        if now_s <= blocks.patience_until_s and not self._is_stuck:
            return True
        blocks.restore_miss = "slow"
        return False

    def give_up_late(self, form: BlockFormat, now_s: float) -> None:
        """Let nobody wait any longer for restores whose time is over."""
        for restore in self._open.values():
            is_answered = len(restore.answers) == form.ranks
            if restore.is_late or is_answered or now_s <= restore.until_s:
                continue
            self._counters["cache_restores_late_total"] += 1
            self._let_go(restore)
            restore.is_late = True
            if restore.blocks is not None:
                restore.blocks.restore_miss = "slow"
                self.forget(restore.blocks)

    def forget(self, blocks: SequenceBlocks) -> None:
        """Nobody waits for this sequence's restore any more."""
        if blocks.restore_id is not None:
            self._open[blocks.restore_id].blocks = None
            blocks.restore_id = None

    def answer(self, form: BlockFormat, rank: int, message: BlocksRestored) -> None:
        """Take in what one rank can have."""
        restore = self._open.get(message.restore_id)
        if restore is None or rank in restore.answers or message.count > len(restore.items):
            self._counters["cache_answers_refused_total"] += 1
            return
        restore.answers[rank] = message
        self._counters["cache_restore_bytes_total"] += message.bytes_read
        if len(restore.answers) == form.ranks:
            self._counters["cache_restores_total"] += 1
            slowest = max(one.read_ms for one in restore.answers.values())
            self._counters["cache_restore_ms_total"] += slowest

    def adopt_answered(self, form: BlockFormat, epoch: int, now_s: float) -> None:
        """Adopt or forget, with the plan in the making, what all ranks have answered."""
        for restore in [one for one in self._open.values() if len(one.answers) == form.ranks]:
            self._adopter.learn(form, restore)
            if any(one.stopped_by == "off" and not one.count for one in restore.answers.values()):
                # What one rank cannot have is of no use to the others.
                self._off_until_s = now_s + BACK_OFF_S
                self._spilling.back_off(now_s)
            differ = form.needs_checkpoints and restore.differs
            adopted = 0
            if not restore.is_late:
                self._memory.reserved_bytes -= restore.reserved_bytes
                restore.reserved_bytes = 0
                adopted = 0 if differ else self._adopter.adopt(form, restore)
                self._let_go(restore)
            self._orders.adopted.append(
                AdoptedRestore(restore_id=restore.restore_id, count=adopted)
            )
            del self._open[restore.restore_id]
            for node in restore.nodes:
                node.awaited -= 1
            blocks = restore.blocks
            if blocks is not None:
                blocks.restore_id = None
                if differ and restore.count and not restore.is_limited:
                    self._ask_again(form, epoch, restore, blocks, now_s)

    def take_outbox(self) -> list[RestoreBlocks]:
        """Return the orders that are to be sent to all ranks, once."""
        taken = self._outbox
        if taken:
            self._outbox = []
        return taken

    def end_epoch(self) -> None:
        """Forget all restores: their ranks are gone."""
        self._open.clear()
        self._reading.clear()
        self._outbox.clear()
        self._memory.reserved_bytes = 0
        self._off_until_s = 0.0

    def check_invariants(self, waiting: list[SequenceBlocks]) -> None:
        """Assert that memory is set apart for open restores, and that nobody waits for others."""
        waited_for = {one.restore_id for one in waiting if one.restore_id is not None}
        assert waited_for == {one.restore_id for one in self._open.values() if one.blocks}
        in_time = [one for one in self._open.values() if not one.is_late]
        assert sum(one.reserved_bytes for one in in_time) == self._memory.reserved_bytes
        awaited = sum(len(one.nodes) for one in self._open.values())
        assert sum(node.awaited for node in self._index) == awaited
        assert set(self._reading.values()) <= {one.restore_id for one in in_time}

    # --- asking ------------------------------------------------------------------------------

    def _wanted(self, form: BlockFormat, blocks: SequenceBlocks, match: Match) -> list[Node]:
        """Return the blocks behind a match that may be stored, up to the first that is not."""
        chain = blocks.chain
        assert chain is not None
        tokens_max = len(blocks.tokens) - 1
        first, at = match.whole_blocks, self._index.root(chain.root)
        last = min(len(chain.hashes), -(-tokens_max // form.block_tokens))
        if form.needs_checkpoints:
            first, last = match.tokens // form.block_tokens, tokens_max // form.block_tokens
        found: list[Node] = []
        size_bytes = form.block_bytes(form.block_tokens)
        for number in range(min(last, limits.BLOCKS_PER_MESSAGE_MAX)):
            name, packed = chain.hashes[number], chain.packed[number]
            node = self._index.add(at, name, packed, size_bytes)
            if node is None or (
                number >= first and not node.is_resident and node.block.is_stored is False
            ):
                break
            if number >= first:
                found.append(node)
            at = node
        self._index.touch(at)
        while found and form.needs_checkpoints:
            if self._index.checkpoint(found[-1], form.checkpoint_bytes).is_stored is not False:
                break
            found.pop()
        return found

    def _make(
        self,
        form: BlockFormat,
        blocks: SequenceBlocks,
        nodes: list[Node],
        now_s: float,
        deadline_s: float,
        *,
        is_limited: bool = False,
    ) -> RestoreOrder:
        """Return a restore of these blocks that holds the one that they follow."""
        self._numbers += 1
        restore = RestoreOrder(
            self._numbers,
            nodes,
            [restore_item(self._index, form, node) for node in nodes],
            deadline_s,
            now_s + deadline_s + _GRACE_S,
            restore_bytes(form, nodes),
            blocks,
            is_limited,
        )
        anchor = restore.anchor
        self._pins.hold(("restore", restore.restore_id), *([anchor] if anchor else []))
        return restore

    def _make_room(self, form: BlockFormat, restore: RestoreOrder, *, may_evict: bool) -> bool:
        """Make room for as much of a restore as memory can hold; False: for nothing, or not now."""
        while restore.nodes:
            if restore.reserved_bytes <= self._memory.free_bytes:
                return True
            if not may_evict:
                return False
            if self._memory.make_room(restore.reserved_bytes):
                return True
            restore.nodes = restore.nodes[: len(restore.nodes) // 2]
            restore.items = restore.items[: len(restore.nodes)]
            restore.reserved_bytes = restore_bytes(form, restore.nodes)
        return False

    def _send(self, form: BlockFormat, epoch: int, restore: RestoreOrder) -> None:
        assert restore.blocks is not None
        self._open[restore.restore_id] = restore
        self._memory.reserved_bytes += restore.reserved_bytes
        for node in restore.nodes:
            node.awaited += 1
            self._reading[node.hash] = restore.restore_id
        restore.blocks.restore_id = restore.restore_id
        restore.blocks.restores += 1
        self._outbox.append(
            RestoreBlocks(
                epoch=epoch,
                restore_id=restore.restore_id,
                namespace=form.namespace,
                items=restore.items,
                deadline_s=restore.deadline_s,
            )
        )

    def _ask_again(
        self,
        form: BlockFormat,
        epoch: int,
        restore: RestoreOrder,
        blocks: SequenceBlocks,
        now_s: float,
    ) -> None:
        """Ask for what every rank can have: each has read the state of its own last item only."""
        nodes = restore.nodes[: restore.count]
        parent = nodes[0].parent
        if parent is None or not parent.is_resident:
            # Rows took what these follow; whoever waits looks again.
            return
        again = self._make(form, blocks, nodes, now_s, restore.deadline_s, is_limited=True)
        if again.reserved_bytes <= self._memory.free_bytes:
            self._send(form, epoch, again)
        else:
            self._pins.release(("restore", again.restore_id))

    def _let_go(self, restore: RestoreOrder) -> None:
        """Hold nothing for a restore any more, and let nobody wait for it."""
        self._memory.reserved_bytes -= restore.reserved_bytes
        restore.reserved_bytes = 0
        self._pins.release(("restore", restore.restore_id))
        for node in restore.nodes:
            if self._reading.get(node.hash) == restore.restore_id:
                del self._reading[node.hash]
