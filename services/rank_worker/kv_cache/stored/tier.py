"""The stored tier as the rest of the rank sees it: calls that do not wait."""

from collections.abc import Callable

from services.rank_worker.kv_cache.blocks.transfer import RestoredItem, SpillItem
from services.rank_worker.kv_cache.stored.record_files import Allocate, BlockBytes
from services.rank_worker.kv_cache.stored.restore_task import RestoreTask
from services.rank_worker.kv_cache.stored.staging import Staging
from services.rank_worker.kv_cache.stored.store_link import (
    ForgetBlocks,
    SpillRequest,
    StoreLink,
    TierSettings,
)
from shared.clock import Clock, SystemClock
from shared.messages import (
    AdoptedRestore,
    BlocksRestored,
    BlocksSpilled,
    Message,
    RestoreBlocks,
    SpillOrder,
)

__all__ = ["StoredTier", "TierSettings"]


class StoredTier:
    """Spills and restores of one rank in one epoch.

    Every hash of a spill order is reported once (BlocksSpilled), every restore is answered once, at
    its deadline at the latest (BlocksRestored). Errors of disks and stores end in those reports.
    """

    def __init__(
        self,
        settings: TierSettings,
        say: Callable[[Message], None],
        allocate: Allocate,
        *,
        is_on: bool = True,
        clock: Clock | None = None,
    ) -> None:
        """Open the link to the store; `start` begins to use it.

        Args:
            settings: what to know.
            say: sends a message to the scheduler; any thread calls it, it must not wait.
            allocate: where records are read to.
            is_on: False: no link and no threads; orders are answered with "lost" and "off".
            clock: monotonic time.

        Raises:
            ConfigError: the store's address is not allowed.
        """
        self._settings = settings
        self._say = say
        self._clock = clock or SystemClock()
        self._staging = Staging()
        self._link: StoreLink | None = None
        if is_on:
            self._link = StoreLink(settings, say, allocate, self._staging, self._clock)

    def start(self) -> None:
        """Dial the store. Ends with the process: nothing needs saving."""
        if self._link is not None:
            self._link.start()

    def close(self) -> None:
        """Leave the store and end the threads. A rank has no need to: it ends with its process."""
        if self._link is not None:
            self._link.close()

    def expect(self, block_bytes: BlockBytes | None, staged_bytes_max: int) -> None:
        """Say what the model has shown; before this, restores are answered with "full".

        Args:
            block_bytes: how long payloads of blocks are here, others count as unreadable; None:
                any length will do.
            staged_bytes_max: bytes that were restored, or are being, and are not adopted.
        """
        self._staging.bytes_max = staged_bytes_max
        if self._link is not None:
            self._link.disk.block_bytes = block_bytes

    def spill(self, order: SpillOrder, items: list[SpillItem]) -> None:
        """Have resident blocks written. For the main thread, when their step is finished."""
        if self._link is not None:
            self._link.post(SpillRequest(order, items))
            return
        self._say(
            BlocksSpilled(
                epoch=self._settings.epoch,
                rank=self._settings.rank,
                stored=[],
                lost=order.hashes,
            )
        )

    def restore(self, order: RestoreBlocks) -> None:
        """Have stored blocks read. For the bus thread."""
        if self._link is not None:
            self._link.post(RestoreTask(order, self._clock.now()))
            return
        self._say(
            BlocksRestored(
                epoch=order.epoch,
                rank=self._settings.rank,
                restore_id=order.restore_id,
                count=0,
                stopped_by="off",
                bytes_read=0,
                read_ms=0.0,
            )
        )

    def take(self, adopted: AdoptedRestore) -> list[RestoredItem]:
        """Return what a plan adopts, in the order of the items; with count 0 forget the restore.

        For the main thread.

        Raises:
            InvariantBroken: this rank did not answer that restore with so many items.
        """
        if adopted.count:
            return self._staging.take(adopted.restore_id, adopted.count)
        if self._link is not None:
            self._link.post(ForgetBlocks(adopted.restore_id))
        return []
