"""The block cache as planner and core use it. Owns the cache's parts; computes no tokens.

Resident blocks change only between `begin_plan` and `finish_plan`, so the index describes what
ranks hold after all sent plans. Answers that arrive in between are only recorded. Without a block
format (the cache is off, or ranks cannot keep blocks) nothing is ordered.
"""

from collections.abc import Callable

from services.scheduler.cache.admission import Admission
from services.scheduler.cache.cache_state import CacheState, PlannedBlockOrders
from services.scheduler.cache.index.block_format import BlockFormat
from services.scheduler.cache.index.sequence_blocks import UNREACHABLE_TOKENS, SequenceBlocks
from services.scheduler.cache.keeper import Keeper
from services.scheduler.cache.kv_rows import Rows
from services.scheduler.cache.restorer import Restorer
from services.scheduler.cache.spiller import Spiller
from shared.configuration.settings import CacheConfig
from shared.errors import InvariantBroken


class BlockCache:
    """The prefix cache as planner and core use it: its parts, and calls that concern several."""

    def __init__(
        self,
        config: CacheConfig,
        rows: Rows,
        token_ms: Callable[[int], float],
        *,
        grid_tokens: int = 1,
    ) -> None:
        """Start without ranks: no block is resident.

        Args:
            config: the operator's cache settings.
            rows: the KV rows that share the memory budget.
            token_ms: returns the predicted milliseconds to compute the token at a position of a
                prompt; 0: unknown.
            grid_tokens: see `CacheState`.
        """
        self._ttl_s = config.ttl_s
        self.state = CacheState(rows, is_enabled=config.enabled, grid_tokens=grid_tokens)
        self.spiller = Spiller(config, self.state)
        self.restorer = Restorer(config, self.state, self.spiller, token_ms)
        self.admission = Admission(self.state, self.restorer)
        self._keeper = Keeper(self.state, self.spiller)
        self._checked_state: tuple[object, ...] = ()
        """The state at the last full check of the invariants, which is slow."""

    @property
    def block_format(self) -> BlockFormat | None:
        """The block format of this epoch; None when no blocks are kept."""
        return self.state.block_format if self.state.is_on else None

    def end_epoch(self) -> None:
        """Forget all resident blocks and open orders, because the ranks that held them are gone.

        The tokens of all blocks, and which are stored on SSD, stay known for the next epoch.
        """
        self.state.end_epoch()
        self.admission.pending.clear()
        self.spiller.end_epoch()
        self.restorer.end_epoch()

    # --- sequences ---------------------------------------------------------------------------

    def keep(self, blocks: SequenceBlocks, computed: int, *, ends: bool = False) -> None:
        """Order ranks to keep the blocks and the snapshot of a row that are not resident yet.

        The orders are part of the plan being built.

        Args:
            blocks: the record of the sequence.
            computed: number of leading tokens that may be kept: their ids are known, and the row
                contains them after all sent plans.
            ends: the plan being built drops the row.
        """
        if not self.state.is_on or blocks.epoch != self.state.epoch:
            return
        self._keeper.keep(blocks, computed, ends=ends)
        self.admission.pending.release(blocks, computed)
        if ends:
            # A preempted sequence starts again with a new lookup.
            blocks.epoch = 0

    def stop_running(self, blocks: SequenceBlocks) -> None:
        """Stop other sequences from waiting for blocks of this one, which will compute no more.

        The caller calls `keep` once more, with `ends`, before the row is dropped.
        """
        self.admission.pending.release(blocks)
        blocks.next_boundary = UNREACHABLE_TOKENS

    def cancel_wait(self, blocks: SequenceBlocks) -> None:
        """Detach a waiting sequence that will not be admitted from its restore and held blocks.

        A restore that ranks are reading goes on, and its blocks become resident.
        """
        if not self.state.is_on or blocks.epoch != self.state.epoch:
            return
        self.restorer.stop_waiting(blocks)
        self.state.pins.release(("waiting", blocks.sequence_id))

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

    def begin_plan(self, now_s: float) -> None:
        """Start the cache's part of a plan: blocks that all ranks have restored become resident.

        Args:
            now_s: the scheduler's time in seconds. Restores that are late are given up first.
        """
        if self.state.is_on:
            self.state.index.now_s = now_s
            self.restorer.expire(now_s)
            self.restorer.adopt_answered(now_s)
            if self._ttl_s:
                self.state.expire(now_s - self._ttl_s)

    def finish_plan(self, now_s: float) -> PlannedBlockOrders:
        """Order the spills that can start now, and return all block orders of the plan being built.

        Args:
            now_s: the scheduler's time in seconds; no spill starts during a pause after a failure.
        """
        if self.state.is_on:
            self.spiller.order_spills(now_s)
        return self.state.take_orders()

    # --- reports -----------------------------------------------------------------------------

    def report_gauges(self) -> dict[str, float]:
        """Return current values by name; memory in bytes per rank, stores in bytes of all hosts."""
        if not self.state.is_on:
            return {}
        index = self.state.index
        return {
            "cache_blocks_resident": float(index.resident_blocks),
            "cache_blocks_known": float(len(index)),
            "cache_blocks_known_max": float(index.nodes_max),
            "cache_resident_bytes": float(index.resident_bytes),
            "cache_resident_limit_bytes": float(self.state.limit_bytes),
            "cache_store_bytes": float(sum(self.spiller.store_bytes.values())),
        }

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
        self.admission.pending.check_invariants(running)
        if self.state.orders:
            raise InvariantBroken("block orders are left over between two plans")
        index = self.state.index
        state = (index.version, len(index), len(self.state.pins), self.spiller.is_busy)
        if state == self._checked_state:
            return
        self._checked_state = state
        self.state.check_invariants()
        if self.state.is_on:
            self.spiller.check_invariants()
            epoch = self.state.epoch
            self.restorer.check_invariants([one for one in waiting if one.epoch == epoch])
