"""One restore on this rank. Owns which items can be read and which were read.

The tier's thread creates, prepares and answers it. Meanwhile reading threads claim parts of
it and add the records read, so the link can answer at any moment with these.
"""

import threading
from typing import Literal

from services.rank_worker.kv_cache.blocks.items import CachedItem
from services.rank_worker.kv_cache.stored.record_files import NamespaceFolder
from shared.block_record import HEADER_BYTES
from shared.messages import BlockPlace, RestoreBlocks

Cause = Literal["", "absent", "unreadable", "late", "off", "full"]
"""Why fewer items than ordered were restored: the store lacks one, its record is damaged, the
deadline passed, the store is off, or memory is full; "": all were restored."""

CLAIM_BYTES = 16 * 1024 * 1024
"""Most payload bytes that one thread reads in a row from one file: a whole file as spills write
them, so that the system's read-ahead works. With 4 MiB cold reads were a quarter slower."""


class RestoreTask:
    """One order to read stored blocks, and the records read so far.

    Times are monotonic seconds, sizes bytes. An item is one block of a prefix, and the checkpoint
    at its end if rows need one. A block that is resident already is not read.
    """

    def __init__(self, order: RestoreBlocks, arrived_at_s: float) -> None:
        self.order = order
        self.items = order.items
        self.arrived_at_s = arrived_at_s
        self.deadline_at_s = arrived_at_s + order.deadline_s
        self.needs_checkpoint = any(item.checkpoint is not None for item in order.items)
        """Whether the order names checkpoints: restored items are then useful only up to a
        checkpoint."""
        self.folder: NamespaceFolder | None = None
        self.session = 0
        """The session with the store that the queries belong to."""
        self.pinning_queries: list[int] = []
        """Answered queries, whose records the store keeps until they are released."""
        self.open_queries: set[int] = set()
        """The queries that the store has not answered."""
        self.places: dict[bytes, BlockPlace] = {}
        """Places of the located records by hash."""
        self.target_items = 0
        """Number of leading items to read."""
        self.planned_bytes = 0
        """Payload bytes of the target items; 0 after the answer."""
        self.stopped_by: Cause = ""
        """Why the target is not all items, or was not reached."""
        self.adoptable = 0
        """Number of leading items that a plan may adopt, once the restore is answered."""
        self.is_answered = False
        """The answer was sent; records read later are discarded."""
        self.is_reading = False
        self.read_began_at_s = 0.0
        self.unreadable: list[tuple[bytes, str]] = []
        """Hash and cause of each unreadable record."""
        self.bytes_read = 0
        """Bytes of the records that were read and checked."""
        self._lock = threading.Lock()
        self._next = 0
        """Index of the next item to claim."""
        self._readers = 0
        self._is_done = False
        self._records: dict[int, CachedItem] = {}
        """By item index."""
        self._prefix = 0
        """Number of leading items that were read or were already resident."""
        self._checkpoint: tuple[int, CachedItem] | None = None
        """A checkpoint that was read, and the number of items before its end."""

    # --- before reading ----------------------------------------------------------------------

    def record_hashes(self) -> list[bytes]:
        """Return the hashes of all blocks and checkpoints in the order, each once."""
        hashes = (one for item in self.items for one in (item.block, item.checkpoint))
        return list(dict.fromkeys(one for one in hashes if one is not None))

    def select_prefix(self, room_bytes: int) -> None:
        """Set `target_items`, the number of leading items to read.

        These are as many as the store has and memory allows, up to a checkpoint where rows need
        one.

        Args:
            room_bytes: limit for the payload bytes of these items.
        """
        block_bytes = 0
        cause: Cause = "absent"
        for count, item in enumerate(self.items, 1):
            if item.block is not None:
                place = self.places.get(item.block)
                if place is None:
                    break
                block_bytes += _payload_bytes(place)
            total_bytes = block_bytes + self.checkpoint_bytes(count)
            if total_bytes > room_bytes:
                cause = "full"
                if block_bytes > room_bytes:
                    break
            elif not self.needs_checkpoint or item.checkpoint in self.places:
                self.target_items, self.planned_bytes = count, total_bytes
        self.stopped_by = "" if self.target_items == len(self.items) else cause
        self._advance()

    def checkpoint_bytes(self, count: int) -> int:
        """Return the payload bytes of the checkpoint after the first `count` items; 0: none."""
        checkpoint = self.items[count - 1].checkpoint
        place = self.places.get(checkpoint) if checkpoint is not None else None
        return _payload_bytes(place) if place is not None else 0

    # --- while reading: any thread -----------------------------------------------------------

    def enter(self) -> bool:
        """Register the calling thread as a reader of this restore.

        Returns:
            False, without registering it, when all readers have left already.
        """
        with self._lock:
            if self._is_done:
                return False
            self._readers += 1
            return True

    def leave(self) -> bool:
        """Remove the calling thread from the readers of this restore.

        Returns:
            True for the last reader: no thread reads this restore any more.
        """
        with self._lock:
            self._readers -= 1
            if self._readers == 0:
                self._is_done = True
            return self._is_done

    def claim(self) -> list[int]:
        """Reserve the next unread items of one file for the calling thread: one, or up to 16 MiB.

        Returns:
            Indices in the order of items whose blocks the caller reads; empty when none are left.
        """
        with self._lock:
            claimed: list[int] = []
            size_bytes, file_name = 0, ""
            while self._next < self.target_items:
                block = self.items[self._next].block
                if block is not None:
                    place = self.places[block]
                    size_bytes += _payload_bytes(place)
                    if claimed and (place.name != file_name or size_bytes > CLAIM_BYTES):
                        break
                    file_name = place.name
                    claimed.append(self._next)
                self._next += 1
            return claimed

    def put(self, index: int, record: CachedItem) -> None:
        """Add the block that was read for an item; drop it if the restore was answered.

        Args:
            index: index of the item in the order, from 0.
            record: the block's record.
        """
        with self._lock:
            self.bytes_read += HEADER_BYTES + record.payload.nbytes
            if not self.is_answered:
                self._records[index] = record
                self._advance()

    def put_checkpoint(self, count: int, record: CachedItem) -> None:
        """Add the checkpoint after the first `count` items; drop it if the restore was answered."""
        with self._lock:
            self.bytes_read += HEADER_BYTES + record.payload.nbytes
            if not self.is_answered:
                self._checkpoint = (count, record)

    def stop_before(self, index: int, cause: Cause) -> None:
        """Limit the items to read to those before an item; no later one is claimed any more.

        Args:
            index: index in the order of the first item that is not read.
            cause: the reason, reported to the scheduler.
        """
        with self._lock:
            if index < self.target_items:
                self.target_items = index
                self.stopped_by = cause

    @property
    def prefix(self) -> int:
        """Number of leading items of the order that were read or were already resident."""
        return self._prefix

    # --- results -----------------------------------------------------------------------------

    def finish(self, *, keep: bool) -> None:
        """Mark the restore as answered, set `adoptable`, and free the payloads of other items.

        Args:
            keep: keep the payloads of the items that can be adopted; otherwise free all.
        """
        with self._lock:
            self.is_answered = True
            self.planned_bytes = 0
            if keep:
                checkpoint_at = self._checkpoint[0] if self._checkpoint is not None else 0
                self.adoptable = checkpoint_at if self.needs_checkpoint else self._prefix
            for index in [one for one in self._records if one >= self.adoptable]:
                del self._records[index]

    def restored_items(self, count: int) -> list[CachedItem]:
        """Return the blocks read for the first `count` items, then the checkpoint after them.

        Args:
            count: number of items, at most `adoptable`.
        """
        items = enumerate(self.items[:count])
        restored = [self._records[index] for index, item in items if item.block is not None]
        if self._checkpoint is not None and self._checkpoint[0] == count:
            restored.append(self._checkpoint[1])
        return restored

    def _advance(self) -> None:
        while self._prefix < self.target_items and (
            self.items[self._prefix].block is None or self._prefix in self._records
        ):
            self._prefix += 1


def _payload_bytes(place: BlockPlace) -> int:
    return max(0, place.size_bytes - HEADER_BYTES)
