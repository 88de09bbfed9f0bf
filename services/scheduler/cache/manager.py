"""The block cache as planner and core see it.

Everything that changes what is resident happens between `begin_plan` and `finish_plan`, so that the
index says what ranks hold once the plans sent are applied. Answers that arrive in between are only
remembered. Without a format (the cache is off, or ranks cannot keep blocks) nothing is done at all.
"""

from collections import defaultdict
from collections.abc import Callable

from services.scheduler.cache.admission import Admission, Reuse
from services.scheduler.cache.block_orders import PlannedBlockOrders
from services.scheduler.cache.index.block_format import BlockFormat
from services.scheduler.cache.index.block_index import BlockIndex
from services.scheduler.cache.index.sequence_blocks import NEVER, SequenceBlocks
from services.scheduler.cache.keeper import Keeper
from services.scheduler.cache.kv_rows import Rows
from services.scheduler.cache.memory import BlockMemory
from services.scheduler.cache.pending_blocks import PendingBlocks
from services.scheduler.cache.pins import BlockPins
from services.scheduler.cache.restorer import Restorer
from services.scheduler.cache.spiller import Spiller
from shared.configuration.settings import CacheConfig
from shared.errors import InvariantBroken
from shared.messages import BlocksRestored, BlocksSpilled, CachedPrefix, RestoreBlocks

_SQUEEZED_SHARE = 8
"""With less than an eighth of their bound free, blocks are short of memory."""

_COUNTERS = (
    "cache_blocks_kept_total",
    "cache_blocks_restored_total",
    "cache_blocks_spill_lost_total",
    "cache_blocks_spilled_total",
    "cache_checkpoints_kept_total",
    "cache_hit_tokens_memory_total",
    "cache_hit_tokens_ssd_total",
    *(
        f"cache_miss_tokens_{cause}_total"
        for cause in ("diverged", "end", "evicted", "new", "slow", "unreadable")
    ),
    "cache_restore_bytes_total",
    "cache_restore_ms_total",
    "cache_restores_late_total",
    "cache_restores_total",
    "cache_spill_bytes_total",
    "cache_spill_ms_total",
)
"""Reported from the start, so that whoever watches sees them begin at 0."""


class BlockCache:
    """Index, memory, and what is decided about blocks."""

    def __init__(self, config: CacheConfig, rows: Rows) -> None:
        """Begin without ranks: nothing is resident."""
        self.counters: defaultdict[str, float] = defaultdict(float)
        if config.enabled:
            self.counters.update(dict.fromkeys(_COUNTERS, 0.0))
        self._form: BlockFormat | None = None
        self._namespace = ""
        self._epoch = 0
        self._checked: tuple[object, ...] = ()
        """The state when invariants were looked at last: looking takes as long as all else."""
        self._rows = rows
        self._index = BlockIndex()
        self._pins = BlockPins()
        self._claims = PendingBlocks()
        self._orders = PlannedBlockOrders()
        self._memory = BlockMemory(self._index, self._pins, self._orders, rows)
        self._spilling = Spiller(config, self._index, self._orders, self.counters)
        self._keeper = Keeper(
            self._index, self._pins, self._memory, self._orders, self._spilling, self.counters
        )
        self._restoring = Restorer(
            config,
            self._index,
            self._pins,
            self._memory,
            self._orders,
            self._spilling,
            self.counters,
        )
        self._admission = Admission(
            self._index, self._pins, self._claims, self._restoring, self.counters
        )
        rows.share_with(self._memory)

    @property
    def form(self) -> BlockFormat | None:
        """What a block is in this epoch; None: nothing is kept."""
        return self._form

    @property
    def is_writing(self) -> bool:
        """Tell whether blocks are on their way to SSD."""
        return self._form is not None and self._spilling.is_busy

    @property
    def is_squeezed(self) -> bool:
        """Tell whether rows leave blocks so little that some must soon be evicted."""
        if self._form is None or self._rows.bytes_left >= self._form.bytes_max:
            return False
        return self._memory.free_bytes < self._form.bytes_max // _SQUEEZED_SHARE

    def start_epoch(self, form: BlockFormat | None, epoch: int) -> bool:
        """Begin with nothing resident; True when all that was known belongs to other blocks."""
        self._form, self._epoch = form, epoch
        if form is None:
            return False
        self._memory.bytes_max = form.bytes_max
        is_other = self._namespace not in ("", form.namespace)
        self._namespace = form.namespace
        if is_other:
            self._index.clear()
        return is_other

    def end_epoch(self) -> None:
        """No rank holds anything any more, and nobody will answer."""
        self._pins.clear()
        self._claims.clear()
        self._orders.take()
        self._index.end_epoch()
        self._spilling.end_epoch()
        self._restoring.end_epoch()
        self._form = None

    # --- sequences ---------------------------------------------------------------------------

    def must_wait(
        self,
        blocks: SequenceBlocks,
        now_s: float,
        token_ms: Callable[[int], float],
        *,
        may_evict: bool,
    ) -> bool:
        """See `Admission.must_wait`."""
        return self._form is not None and self._admission.must_wait(
            self._form, self._epoch, blocks, now_s, token_ms, may_evict=may_evict
        )

    def admit(self, blocks: SequenceBlocks) -> Reuse:
        """Return what a sequence's row begins with in the plan in the making."""
        if self._form is None:
            blocks.cached = blocks.cached or CachedPrefix(miss="off")
            self.counters["cache_miss_tokens_off_total"] += len(blocks.tokens)
            return Reuse()
        return self._admission.admit(self._form, blocks)

    def keep(self, blocks: SequenceBlocks, computed: int, *, ends: bool = False) -> None:
        """Keep what of a row is not resident yet, with the plan in the making.

        Args:
            blocks: a running sequence, or one that that plan drops.
            computed: tokens that are known, and in the row once the plans sent are applied.
            ends: that plan drops it.
        """
        if self._form is None or blocks.epoch != self._epoch:
            return
        self._keeper.keep(self._form, blocks, computed, ends=ends)
        self._claims.release(blocks, computed)
        if ends:
            # Whoever returns begins anew.
            blocks.epoch = 0

    def leave(self, blocks: SequenceBlocks) -> None:
        """A sequence does not run any more; `keep` is called once more for its row."""
        self._claims.release(blocks, NEVER)
        blocks.border = NEVER

    def forget(self, blocks: SequenceBlocks) -> None:
        """A sequence that waited will never run."""
        if self._form is None or blocks.epoch != self._epoch:
            return
        self._restoring.forget(blocks)
        self._pins.release(("waiting", blocks.sequence_id))

    def set_aside(self, blocks: SequenceBlocks, length: int, *, is_decode: bool) -> bool:
        """Tell whether a sequence's state is to be set aside when its row has this length."""
        form = self._form
        if form is None or not form.needs_checkpoints or length % form.block_tokens:
            return False
        if is_decode:
            wanted = form.checkpoint_bytes <= form.bytes_max
        else:
            wanted = bool(blocks.cuts) and blocks.cuts[0] == length
            if wanted:
                blocks.cuts.popleft()
        if wanted:
            blocks.set_aside, blocks.is_decode_state = length, is_decode
        return wanted

    # --- plans -------------------------------------------------------------------------------

    def give_up_late(self, now_s: float) -> None:
        """Let nobody wait any longer for restores whose time is over."""
        if self._form is not None:
            self._restoring.give_up_late(self._form, now_s)

    def begin_plan(self, now_s: float) -> None:
        """Begin the cache's part of a plan: what was restored becomes resident."""
        if self._form is not None:
            self._restoring.give_up_late(self._form, now_s)
            self._restoring.adopt_answered(self._form, self._epoch, now_s)

    def finish_plan(self, now_s: float) -> PlannedBlockOrders:
        """Return the cache's part of the plan that leaves now."""
        if self._form is not None:
            self._spilling.order(self._form, now_s)
            self._pins.release_plan()
        return self._orders.take()

    def take_restores(self) -> list[RestoreBlocks]:
        """Return the restores to ask all ranks for, once."""
        return self._restoring.take_outbox()

    # --- ranks -------------------------------------------------------------------------------

    def restored(self, rank: int, message: BlocksRestored) -> None:
        """Take in a rank's answer to a restore."""
        if self._form is not None:
            self._restoring.answer(self._form, rank, message)

    def spilled(self, rank: int, host: str, message: BlocksSpilled, now_s: float) -> None:
        """Take in what became of a spill on a rank."""
        if self._form is not None:
            self._spilling.report(self._form, rank, host, message, now_s)

    # --- reports -----------------------------------------------------------------------------

    def report_counters(self) -> dict[str, float]:
        """Return monotonic sums since start."""
        return {**self.counters, "cache_blocks_evicted_total": float(self._memory.evictions)}

    def report_gauges(self) -> dict[str, float]:
        """Return values of the moment; bytes of memory are per rank, those of stores of all."""
        if self._form is None:
            return {}
        return {
            "cache_blocks_resident": float(self._index.resident_blocks),
            "cache_blocks_known": float(len(self._index)),
            "cache_bytes_resident": float(self._index.resident_bytes),
            "cache_bytes_resident_max": float(self._memory.limit),
            "cache_store_bytes": float(sum(self._spilling.store_bytes.values())),
        }

    def check_invariants(
        self, running: list[SequenceBlocks], waiting: list[SequenceBlocks]
    ) -> None:
        """Raise InvariantBroken or AssertionError when the parts contradict each other (I9)."""
        self._claims.check_invariants(running)
        if self._orders:
            raise InvariantBroken("orders about blocks wait between two plans")
        state = (self._index.version, len(self._index), len(self._pins), self._spilling.is_busy)
        if state == self._checked:
            return
        self._checked = state
        self._pins.check_invariants(self._index.all_entries())
        self._index.check_invariants()
        if self._form is not None:
            self._memory.check_invariants()
            self._spilling.check_invariants()
            self._restoring.check_invariants([one for one in waiting if one.epoch == self._epoch])
