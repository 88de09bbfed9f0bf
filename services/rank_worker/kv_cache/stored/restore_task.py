"""One restore: which of its items can be had, what was read of them, and what it comes to.

The link's thread makes, aims, answers and closes it. In between reading threads claim parts of it
and put in what they have read; so the link can answer at any moment with what is there.
"""

import threading
from typing import Literal

from services.rank_worker.kv_cache.blocks.transfer import RestoredItem
from services.rank_worker.kv_cache.stored.folder import NamespaceFolder
from services.rank_worker.kv_cache.stored.record_files import ReadRecord
from shared.block_record import HEADER_BYTES
from shared.messages import BlockPlace, RestoreBlocks

Cause = Literal["", "absent", "unreadable", "late", "off", "full"]

CLAIM_BYTES = 16 * 1024 * 1024
"""Payloads that one thread reads in a row if they lie in one file: a whole file as spills write
them, so that the system's read-ahead works. With 4 MiB cold reads were a quarter slower."""


class RestoreTask:
    """A RestoreBlocks on its way. Times are monotonic seconds, sizes bytes."""

    def __init__(self, order: RestoreBlocks, arrived_at_s: float) -> None:
        self.order = order
        self.items = order.items
        self.arrived_at_s = arrived_at_s
        self.deadline_at_s = arrived_at_s + order.deadline_s
        self.needs_checkpoint = any(item.checkpoint is not None for item in order.items)
        """It must end at a checkpoint."""
        self.folder: NamespaceFolder | None = None
        self.session = 0
        """With the store, in which it asked."""
        self.query_ids: list[int] = []
        """Questions to the store whose pins are not released."""
        self.unanswered: set[int] = set()
        """Those of them that the store has not answered."""
        self.places: dict[bytes, BlockPlace] = {}
        self.target_items = 0
        """Items to read."""
        self.planned_bytes = 0
        """Of the payloads up to the target_items; 0 once it is answered."""
        self.stopped_by: Cause = ""
        """Why the target_items is not all, then why it was not reached."""
        self.closed = False
        """It is answered: what is still read is discarded."""
        self.is_reading = False
        self.read_began_at_s = 0.0
        self.unreadable: list[tuple[bytes, str]] = []
        """Hash and cause of the records that are not what they should be."""
        self.bytes_read = 0
        """Of the records that were read and verified."""
        self._lock = threading.Lock()
        self._next = 0
        """Item that is claimed next."""
        self._readers = 0
        self._is_ended = False
        self._records: dict[int, ReadRecord] = {}
        """By index of the item."""
        self._prefix = 0
        """So many first items are there."""
        self._checkpoint: tuple[int, ReadRecord] | None = None
        """Of the item with this number, counted from 1."""

    # --- before reading ----------------------------------------------------------------------

    def wanted(self) -> list[bytes]:
        """Return the hashes of all records that may be read, each once."""
        hashes = (one for item in self.items for one in (item.block, item.checkpoint))
        return list(dict.fromkeys(one for one in hashes if one is not None))

    def select_prefix(self, room_bytes: int) -> None:
        """Set the target_items: the longest prefix that is located and fits into `room_bytes`."""
        block_bytes = 0
        cause: Cause = "absent"
        for number, item in enumerate(self.items, 1):
            if item.block is not None:
                place = self.places.get(item.block)
                if place is None:
                    break
                block_bytes += _payload_bytes(place)
            total = block_bytes + self.checkpoint_bytes(number)
            if total > room_bytes:
                cause = "full"
                if block_bytes > room_bytes:
                    break
            elif not self.needs_checkpoint or item.checkpoint in self.places:
                self.target_items, self.planned_bytes = number, total
        self.stopped_by = "" if self.target_items == len(self.items) else cause
        self._advance()

    def checkpoint_bytes(self, number: int) -> int:
        """Return the payload bytes of the checkpoint behind the first `number` items."""
        name = self.items[number - 1].checkpoint
        place = self.places.get(name) if name is not None else None
        return _payload_bytes(place) if place is not None else 0

    # --- while reading: any thread -----------------------------------------------------------

    def enter(self) -> bool:
        """Join the threads that read this; False when it is over already."""
        with self._lock:
            if self._is_ended:
                return False
            self._readers += 1
            return True

    def leave(self) -> bool:
        """Leave; True for the last one, when all that was claimed is there."""
        with self._lock:
            self._readers -= 1
            if self._readers == 0:
                self._is_ended = True
            return self._is_ended

    def claim(self) -> list[int]:
        """Return the indices of the items to read next, at least one; empty: there are none."""
        with self._lock:
            claimed: list[int] = []
            size_bytes, name = 0, ""
            while self._next < self.target_items:
                block = self.items[self._next].block
                if block is not None:
                    place = self.places[block]
                    size_bytes += _payload_bytes(place)
                    if claimed and (place.name != name or size_bytes > CLAIM_BYTES):
                        break
                    name = place.name
                    claimed.append(self._next)
                self._next += 1
            return claimed

    def put(self, index: int, record: ReadRecord) -> None:
        """Put in the block of an item, unless the answer is out."""
        with self._lock:
            self.bytes_read += record.size_bytes
            if not self.closed:
                self._records[index] = record
                self._advance()

    def put_checkpoint(self, number: int, record: ReadRecord) -> None:
        """Put in the checkpoint behind the first `number` items, as `put` a block."""
        with self._lock:
            self.bytes_read += record.size_bytes
            if not self.closed:
                self._checkpoint = (number, record)

    def stop_before(self, index: int, cause: Cause) -> None:
        """Say that the prefix ends before this item; nothing behind it is claimed any more."""
        with self._lock:
            if index < self.target_items:
                self.target_items = index
                self.stopped_by = cause

    @property
    def prefix(self) -> int:
        """How many first items have their block."""
        return self._prefix

    # --- what it comes to --------------------------------------------------------------------

    def close(self, *, keep: bool) -> int:
        """Say that the answer leaves now; return how many items can be adopted.

        Args:
            keep: hold these items; else nothing, and the count is 0.
        """
        with self._lock:
            self.closed = True
            self.planned_bytes = 0
            count = self._prefix if keep else 0
            if self.needs_checkpoint:
                count = self._checkpoint[0] if keep and self._checkpoint is not None else 0
            for index in [one for one in self._records if one >= count]:
                del self._records[index]
            return count

    def restored(self, count: int) -> list[RestoredItem]:
        """Return what the first `count` items, at most what `close` said, consist of, in order."""
        found: list[RestoredItem] = []
        for index, item in enumerate(self.items[:count]):
            if item.block is not None:
                record = self._records[index]
                found.append(RestoredItem(item.block, "block", record.tokens, record.payload))
        if self._checkpoint is not None and self._checkpoint[0] == count:
            name, record = self.items[count - 1].checkpoint, self._checkpoint[1]
            assert name is not None
            found.append(RestoredItem(name, "checkpoint", record.tokens, record.payload))
        return found

    def _advance(self) -> None:
        while self._prefix < self.target_items and (
            self.items[self._prefix].block is None or self._prefix in self._records
        ):
            self._prefix += 1


def _payload_bytes(place: BlockPlace) -> int:
    return max(0, place.size_bytes - HEADER_BYTES)
