"""The stored tier's interface for the rank. No call waits for disk or store."""

from collections.abc import Callable

from services.rank_worker.kv_cache.blocks.items import RestoredItem, SpillItem
from services.rank_worker.kv_cache.stored.context import TierSettings
from services.rank_worker.kv_cache.stored.record_files import Allocate, BlockBytes
from services.rank_worker.kv_cache.stored.restore_task import RestoreTask
from services.rank_worker.kv_cache.stored.staging import Staging
from services.rank_worker.kv_cache.stored.store_link import (
    ForgetRestore,
    SpillRequest,
    StoreLink,
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


class StoredTier:
    """Writes spilled blocks of one rank to SSD and restores stored ones, through the cache store.

    Every hash of a spill order is reported once (BlocksSpilled). Every restore is answered once, at
    its deadline at the latest (BlocksRestored). Disk and store errors only change these reports.
    """

    def __init__(
        self,
        settings: TierSettings,
        send_to_scheduler: Callable[[Message], None],
        allocate: Allocate,
        *,
        is_on: bool = True,
        clock: Clock | None = None,
    ) -> None:
        """Open the link to the store; `start` begins to use it.

        Args:
            settings: the tier's settings.
            send_to_scheduler: sends a message without waiting; called by any thread.
            allocate: allocates the memory that records are read into.
            is_on: use the store; otherwise orders are answered with "lost" and "off".
            clock: monotonic time.

        Raises:
            ConfigError: the store's address is not allowed.
        """
        self._settings = settings
        self._send_to_scheduler = send_to_scheduler
        self._clock = clock or SystemClock()
        self._staging = Staging()
        self._link: StoreLink | None = None
        if is_on:
            self._link = StoreLink(
                settings, send_to_scheduler, allocate, self._staging, self._clock
            )

    def start(self) -> None:
        """Connect to the store and start the threads, which run until the process ends."""
        if self._link is not None:
            self._link.start()

    def close(self) -> None:
        """Disconnect and end the threads. Only tests need this."""
        if self._link is not None:
            self._link.close()

    def expect(self, block_bytes: BlockBytes | None, staged_bytes_max: int) -> None:
        """Set the sizes that restored blocks must have, and the memory that they may take.

        Before the first call, restores are answered with 0 items, stopped by "full".

        Args:
            block_bytes: returns the payload bytes of a block of n tokens; blocks of other sizes are
                unreadable. None accepts every size.
            staged_bytes_max: most payload bytes that are being restored or not adopted yet.
        """
        self._staging.bytes_max = staged_bytes_max
        if self._link is not None:
            self._link.disk.block_bytes = block_bytes

    def spill(self, order: SpillOrder, items: list[SpillItem]) -> None:
        """Queue resident blocks to be written to SSD; for the main thread, after the plan's step.

        Args:
            order: the plan's spill order.
            items: the payloads that this rank holds; blocks without one are reported lost.
        """
        if self._link is not None:
            self._link.post(SpillRequest(order, items))
            return
        self._send_to_scheduler(
            BlocksSpilled(
                epoch=self._settings.epoch,
                rank=self._settings.rank,
                stored=[],
                lost=order.hashes,
            )
        )

    def restore(self, order: RestoreBlocks) -> None:
        """Queue stored blocks to be read from SSD; the thread of the scheduler link calls it.

        Args:
            order: the scheduler's order, with hashes and a deadline.
        """
        if self._link is not None:
            self._link.post(RestoreTask(order, self._clock.now()))
            return
        self._send_to_scheduler(
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
        """Remove and return the restored items that a plan adopts, in order. For the main thread.

        Args:
            adopted: the restore's id and the number of leading items; 0 discards the restore.

        Raises:
            InvariantBroken: this rank's answer had fewer items.
        """
        if adopted.count:
            return self._staging.take(adopted.restore_id, adopted.count)
        if self._link is not None:
            self._link.post(ForgetRestore(adopted.restore_id))
        return []
