"""The block cache as planner and core use it. Owns the cache's parts; computes no tokens.

Resident blocks change only between `begin_plan` and `finish_plan`, so the index describes what
ranks hold after all sent plans. Answers that arrive in between are only recorded. Without a block
format (the cache is off, or ranks cannot keep blocks) every call does nothing.
"""

from collections.abc import Callable

from services.scheduler.cache.admission import Admission, PrefixLookup, Reuse
from services.scheduler.cache.cache_state import CacheState, PlannedBlockOrders
from services.scheduler.cache.index.block_format import BlockFormat
from services.scheduler.cache.index.sequence_blocks import UNREACHABLE_TOKENS, SequenceBlocks
from services.scheduler.cache.keeper import Keeper
from services.scheduler.cache.kv_rows import Rows
from services.scheduler.cache.restorer import RestoreDecision, Restorer
from services.scheduler.cache.spiller import Spiller
from shared.configuration.settings import CacheConfig
from shared.errors import InvariantBroken
from shared.messages import BlocksRestored, BlocksSpilled, CachedPrefix, RestoreBlocks


class BlockCache:
    """The prefix cache as planner and core use it: lookups, reuse, keeping, restores and spills."""

    def __init__(self, config: CacheConfig, rows: Rows) -> None:
        """Start without ranks: no block is resident."""
        self._state = CacheState(rows, is_enabled=config.enabled)
        self._spiller = Spiller(config, self._state)
        self._keeper = Keeper(self._state, self._spiller)
        self._restorer = Restorer(config, self._state, self._spiller)
        self._admission = Admission(self._state, self._restorer)
        self._checked_state: tuple[object, ...] = ()
        """The state at the last full check of the invariants, which is slow."""

    @property
    def block_format(self) -> BlockFormat | None:
        """The block format of this epoch; None when no blocks are kept."""
        return self._state.block_format if self._state.is_on else None

    @property
    def is_spilling(self) -> bool:
        """Whether a spill to SSD is ordered and not reported, or blocks wait for their spill.

        Blocks that wait while a store that failed is tried again do not count.
        """
        return self._state.is_on and self._spiller.is_busy

    @property
    def is_memory_low(self) -> bool:
        """Whether rows limit the blocks' memory and less than an eighth of their bound is free."""
        return self._state.is_memory_low

    def start_epoch(self, block_format: BlockFormat | None, epoch: int) -> bool:
        """Start an epoch without resident blocks.

        Args:
            block_format: format of blocks; None: no blocks are kept in this epoch.
            epoch: number of the epoch.

        Returns:
            True when the namespace changed, so that all known blocks were forgotten.
        """
        return self._state.start_epoch(block_format, epoch)

    def end_epoch(self) -> None:
        """Forget all resident blocks and open orders, because the ranks that held them are gone.

        The tokens of all blocks, and which are stored on SSD, stay known for the next epoch.
        """
        self._state.end_epoch()
        self._admission.end_epoch()
        self._spiller.end_epoch()
        self._restorer.end_epoch()

    # --- sequences ---------------------------------------------------------------------------

    def look_up(self, blocks: SequenceBlocks, now_s: float) -> PrefixLookup:
        """Decide whether a waiting sequence can be admitted, waits, or needs a restore.

        It changes no block and sends nothing; only `blocks` remembers the result. Arguments and
        result are those of `Admission.look_up`.
        """
        if not self._state.is_on:
            return PrefixLookup(RestoreDecision.ADMIT)
        return self._admission.look_up(blocks, now_s)

    def request_restore(
        self,
        blocks: SequenceBlocks,
        lookup: PrefixLookup,
        now_s: float,
        token_ms: Callable[[int], float],
        *,
        may_evict: bool,
    ) -> RestoreDecision:
        """Request a restore of stored blocks when it is faster than computing them.

        Args:
            blocks: the record of the waiting sequence.
            lookup: the result of `look_up` for it, whose decision is REQUEST.
            now_s: the scheduler's time in seconds, from which the restore's deadline counts.
            token_ms: returns the predicted milliseconds to compute the token at a position of a
                prompt.
            may_evict: a plan is being built, so blocks can be evicted to make room.

        Returns:
            WAIT when the sequence waits for a restore or must ask again later, else ADMIT.
        """
        assert lookup.match is not None
        return self._admission.request_restore(
            blocks, lookup.match, now_s, token_ms, may_evict=may_evict
        )

    def admit(self, blocks: SequenceBlocks) -> Reuse:
        """Admit a sequence with the plan being built; return what its row reuses.

        The blocks it reuses cannot be evicted by that plan. Other sequences with the same prefix
        can wait for the blocks that it will compute.
        """
        if not self._state.is_on:
            blocks.cached = blocks.cached or CachedPrefix(miss="off")
            self._state.counters["cache_miss_tokens_off_total"] += len(blocks.tokens)
            return Reuse()
        return self._admission.admit(blocks)

    def keep(self, blocks: SequenceBlocks, computed: int, *, ends: bool = False) -> None:
        """Order ranks to keep the blocks and the snapshot of a row that are not resident yet.

        The orders are part of the plan being built.

        Args:
            blocks: the record of the sequence.
            computed: number of leading tokens that may be kept: their ids are known, and the row
                contains them after all sent plans.
            ends: the plan being built drops the row.
        """
        if not self._state.is_on or blocks.epoch != self._state.epoch:
            return
        self._keeper.keep(blocks, computed, ends=ends)
        self._admission.release_pending(blocks, computed)
        if ends:
            # A preempted sequence starts again with a new lookup.
            blocks.epoch = 0

    def stop_running(self, blocks: SequenceBlocks) -> None:
        """Stop other sequences from waiting for blocks of this one, which will compute no more.

        The caller calls `keep` once more, with `ends`, before the row is dropped.
        """
        self._admission.release_pending(blocks)
        blocks.next_boundary = UNREACHABLE_TOKENS

    def cancel_wait(self, blocks: SequenceBlocks) -> None:
        """Detach a waiting sequence that will not be admitted from its restore and held blocks.

        A restore that ranks are reading goes on, and its blocks become resident.
        """
        if not self._state.is_on or blocks.epoch != self._state.epoch:
            return
        self._restorer.stop_waiting(blocks)
        self._state.release(("waiting", blocks.sequence_id))

    def snapshot_state(self, blocks: SequenceBlocks, length: int, *, is_decode: bool) -> bool:
        """Decide whether ranks must snapshot a sequence's state; record the snapshot if they must.

        Nothing is sent: for True the caller adds the sequence to the plan's checkpoints. Ranks
        snapshot only where rows need checkpoints, at the end of a whole block: while decoding at
        every block if a checkpoint fits into the cache, in prefill at the lengths chosen at
        admission, each of which counts once.

        Args:
            blocks: the sequence.
            length: tokens in its row after the plan being built.
            is_decode: that plan decodes it; else it prefills a chunk.
        """
        block_format = self.block_format
        if (
            block_format is None
            or not block_format.needs_checkpoints
            or length % block_format.block_tokens
        ):
            return False
        if is_decode:
            is_needed = block_format.checkpoint_bytes <= block_format.bytes_max
        else:
            is_needed = bool(blocks.snapshot_stops) and blocks.snapshot_stops[0] == length
            if is_needed:
                blocks.snapshot_stops.popleft()
        if is_needed:
            blocks.snapshot_tokens, blocks.is_decode_snapshot = length, is_decode
        return is_needed

    # --- plans -------------------------------------------------------------------------------

    def expire_restores(self, now_s: float) -> None:
        """Let sequences stop waiting for restores that some rank has not answered in time.

        Args:
            now_s: the scheduler's time in seconds, which is compared with the restores' deadlines.
        """
        if self._state.is_on:
            self._restorer.expire(now_s)

    def begin_plan(self, now_s: float) -> None:
        """Start the cache's part of a plan: blocks that all ranks have restored become resident.

        Args:
            now_s: the scheduler's time in seconds. Restores that are late are given up first.
        """
        if self._state.is_on:
            self._restorer.expire(now_s)
            self._restorer.adopt_answered(now_s)

    def finish_plan(self, now_s: float) -> PlannedBlockOrders:
        """Order the spills that can start now, and return all block orders of the plan being built.

        Args:
            now_s: the scheduler's time in seconds; no spill starts during a pause after a failure.
        """
        if self._state.is_on:
            self._spiller.order_spills(now_s)
        return self._state.take_orders()

    def take_restores(self) -> list[RestoreBlocks]:
        """Return the restores to be sent to all ranks; a later call does not return them again."""
        return self._restorer.take_outbox()

    # --- ranks -------------------------------------------------------------------------------

    def handle_restored(self, rank: int, message: BlocksRestored) -> None:
        """Record which blocks a rank has read for a restore.

        Args:
            rank: the rank.
            message: its answer.
        """
        if self._state.is_on:
            self._restorer.handle_restored(rank, message)

    def handle_spilled(self, rank: int, host: str, message: BlocksSpilled, now_s: float) -> None:
        """Record which blocks one rank has stored, and which are lost because it could not.

        Args:
            rank: the rank.
            host: the rank's machine, which has a cache store of its own.
            message: the rank's report.
            now_s: the scheduler's time in seconds. If the report names lost blocks and no stored
                ones, spills pause for a while, counted from this time.
        """
        if self._state.is_on:
            self._spiller.handle_spilled(rank, host, message, now_s)

    # --- reports -----------------------------------------------------------------------------

    def report_counters(self) -> dict[str, float]:
        """Return counters of blocks, tokens, bytes and milliseconds since start, by name."""
        return self._state.report_counters()

    def report_gauges(self) -> dict[str, float]:
        """Return current values by name; memory in bytes per rank, stores in bytes of all hosts."""
        if not self._state.is_on:
            return {}
        store_bytes = float(sum(self._spiller.store_bytes.values()))
        return {**self._state.report_gauges(), "cache_store_bytes": store_bytes}

    def check_invariants(
        self, running: list[SequenceBlocks], waiting: list[SequenceBlocks]
    ) -> None:
        """Compare what the parts of the cache record about the same blocks (I9).

        Args:
            running: the running sequences.
            waiting: the waiting sequences.

        Raises:
            InvariantBroken: they contradict each other.
            AssertionError: the same.
        """
        self._admission.check_invariants(running)
        if self._state.orders:
            raise InvariantBroken("block orders are left over between two plans")
        index = self._state.index
        state = (index.version, len(index), len(self._state.pins), self._spiller.is_busy)
        if state == self._checked_state:
            return
        self._checked_state = state
        self._state.check_invariants()
        if self._state.is_on:
            self._spiller.check_invariants()
            epoch = self._state.epoch
            self._restorer.check_invariants([one for one in waiting if one.epoch == epoch])
