"""Restored items until a plan adopts them: the tier's thread adds, the main thread takes them."""

import threading

from services.rank_worker.kv_cache.blocks.items import CachedItem
from services.rank_worker.kv_cache.stored.restore_task import RestoreTask
from shared.errors import InvariantBroken


class Staging:
    """Restored blocks and checkpoints that this rank has reported, until a plan adopts them.

    They are kept by restore id. Thread-safe.
    """

    def __init__(self) -> None:
        self.bytes_max = 0
        """Most payload bytes that wait or are being read. While it is 0, no block is restored."""
        self._staged: dict[int, RestoreTask] = {}
        self._lock = threading.Lock()

    def put(self, restore: RestoreTask) -> None:
        """Keep the adoptable items of an answered restore until a plan adopts or drops them."""
        with self._lock:
            self._staged[restore.order.restore_id] = restore

    def take(self, restore_id: int, count: int) -> list[CachedItem]:
        """Remove a restore and return the blocks and checkpoint of its first items.

        Args:
            restore_id: id of the restore.
            count: number of items that a plan adopts, at least 1.

        Raises:
            InvariantBroken: this rank has fewer items, or not the checkpoint after them.
        """
        with self._lock:
            restore = self._staged.pop(restore_id, None)
        if restore is None or count > restore.adoptable:
            raise InvariantBroken(
                f"restore {restore_id} is adopted with {count} items, but this rank holds "
                f"{restore.adoptable if restore is not None else 0}"
            )
        if restore.needs_checkpoint and count != restore.adoptable:
            # Otherwise ranks would hold different checkpoints.
            raise InvariantBroken(
                f"restore {restore_id} is adopted with {count} items, but this rank read only "
                f"the checkpoint after item {restore.adoptable}"
            )
        return restore.restored_items(count)

    def forget(self, restore_id: int) -> None:
        """Drop a restore and its items, because no plan will adopt them; ignore an unknown one."""
        with self._lock:
            self._staged.pop(restore_id, None)

    @property
    def size_bytes(self) -> int:
        """Payload bytes of all restored items that no plan has adopted yet."""
        with self._lock:
            items = [one.restored_items(one.adoptable) for one in self._staged.values()]
        return sum(item.payload.nbytes for restored in items for item in restored)
