"""What was restored and waits for a plan to adopt it. The main thread takes, the link's adds."""

import dataclasses
import threading

from services.rank_worker.kv_cache.blocks.transfer import RestoredItem
from services.rank_worker.kv_cache.stored.restore_task import RestoreTask
from shared.errors import InvariantBroken


@dataclasses.dataclass(frozen=True, slots=True)
class _Staged:
    restore: RestoreTask
    count: int
    size_bytes: int


class Staging:
    """Restores that were answered with more than nothing, by their id. Thread-safe."""

    def __init__(self) -> None:
        self.bytes_max = 0
        """Of payloads that wait or are being read. Until it is set nothing is restored."""
        self._staged: dict[int, _Staged] = {}
        self._lock = threading.Lock()

    def put(self, restore: RestoreTask, count: int) -> None:
        """Hold the first `count` items, 1 or more, until they are taken or forgotten."""
        size_bytes = sum(item.payload.nbytes for item in restore.restored(count))
        with self._lock:
            self._staged[restore.order.restore_id] = _Staged(restore, count, size_bytes)

    def take(self, restore_id: int, count: int) -> list[RestoredItem]:
        """Give up a restore and return what its first `count` items, 1 or more, consist of.

        Raises:
            InvariantBroken: it was not answered with so many, or lacks the checkpoint there.
        """
        with self._lock:
            staged = self._staged.pop(restore_id, None)
        if staged is None or count > staged.count:
            raise InvariantBroken(
                f"restore {restore_id} is adopted with {count} items, this rank holds "
                f"{staged.count if staged is not None else 0}"
            )
        if staged.restore.needs_checkpoint and count != staged.count:
            # Ranks would differ in which checkpoints they hold.
            raise InvariantBroken(
                f"restore {restore_id} is adopted with {count} items, this rank read the "
                f"checkpoint behind item {staged.count} only"
            )
        return staged.restore.restored(count)

    def forget(self, restore_id: int) -> None:
        """Give up a restore that may be here."""
        with self._lock:
            self._staged.pop(restore_id, None)

    @property
    def size_bytes(self) -> int:
        """Bytes of all payloads that wait."""
        with self._lock:
            return sum(staged.size_bytes for staged in self._staged.values())
