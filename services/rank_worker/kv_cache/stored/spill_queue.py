"""All spills of one rank: queued, cut into files, committed, reported. Link's thread only."""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from services.rank_worker.kv_cache.blocks.transfer import SpillItem
from services.rank_worker.kv_cache.stored.folder import NamespaceFolder
from services.rank_worker.kv_cache.stored.restore_queue import TierContext
from shared import limits
from shared.log import Log
from shared.messages import (
    BlocksCommitted,
    BlocksSpilled,
    CommitBlocks,
    SpillFailed,
    SpillOrder,
    WrittenRecord,
)

_log = Log("rank_worker.stored")

FILE_BYTES_MAX = 16 * 1024 * 1024
"""A file takes consecutive payloads of one order up to this size, or one larger block.

Read cold, blocks that share a file come faster than those with one each: read-ahead crosses their
borders. But the store evicts whole files, so not more."""

WRITE_S = 30.0
"""A write that takes longer is given up, and with it spilling until it ends."""

RESTORES_FIRST_SHARE = 0.5
"""While somebody waits for a restore nothing is written, unless so much of the bound is full."""


@dataclasses.dataclass(slots=True)
class SpillFile:
    """Blocks and checkpoints on their way into one file. One writing thread fills in the result."""

    folder: NamespaceFolder
    name: str
    items: list[SpillItem]
    hashes: list[bytes]
    payload_bytes: int
    evict_first: list[bytes]
    began_at_s: float
    is_given_up: bool = False
    """It was reported lost; what is still written is deleted."""
    records: list[WrittenRecord] = dataclasses.field(default_factory=list)
    write_s: float = 0.0
    error: str = ""
    """Why it was not written; "": it was."""
    is_disk_error: bool = False
    """The disk is to blame."""

    @property
    def path(self) -> Path:
        """Where it is written."""
        return self.folder.path / self.name


@dataclasses.dataclass(frozen=True, slots=True)
class _Queued:
    item: SpillItem
    order: SpillOrder
    is_first: bool
    """It brings along what the order wants evicted first."""


class SpillQueue:
    """Every hash of every order is reported exactly once, stored or lost."""

    def __init__(
        self,
        outside: TierContext,
        write: Callable[[SpillFile], None],
        delete: Callable[[Path], None],
        *,
        bytes_max: int,
        file_prefix: str,
    ) -> None:
        """Begin with nothing queued.

        Args:
            outside: what to act on.
            write: writes a file in another thread.
            delete: deletes a file in another thread.
            bytes_max: payloads that are queued or being written.
            file_prefix: of all file names; no other process uses it.
        """
        self._outside = outside
        self._write = write
        self._delete = delete
        self._bytes_max = bytes_max
        self._file_prefix = file_prefix
        self._file_number = 0
        self._queue: deque[_Queued] = deque()
        self._queued_bytes = 0
        self._writing: SpillFile | None = None
        self._committing: dict[str, SpillFile] = {}

    @property
    def next_deadline_at_s(self) -> float | None:
        """When a write will have taken too long; None: nothing is being written."""
        if self._writing is None or self._writing.is_given_up:
            return None
        return self._writing.began_at_s + WRITE_S

    def add(self, order: SpillOrder, items: Sequence[SpillItem], *, can_write: bool) -> None:
        """Queue what an order names; past the bound the oldest are lost, without a store all."""
        given = {item.hash for item in items}
        lost = [one for one in order.hashes if one not in given]
        is_stuck = self._writing is not None and self._writing.is_given_up
        for index, item in enumerate(items):
            if not can_write or is_stuck or item.payload.nbytes > self._bytes_max:
                lost.append(item.hash)
                continue
            self._queue.append(_Queued(item, order, is_first=index == 0))
            self._queued_bytes += item.payload.nbytes
        writing_bytes = self._writing.payload_bytes if self._writing is not None else 0
        while self._queue and self._queued_bytes + writing_bytes > self._bytes_max:
            lost.append(self._pop().item.hash)
        self._report_lost(lost)

    def go_on(self, folder: NamespaceFolder | None, *, is_restoring: bool) -> None:
        """Have the next file written, if it is time."""
        if folder is None or self._writing is not None:
            return
        self._lose_other_namespaces(folder.namespace)
        is_full = self._queued_bytes > RESTORES_FIRST_SHARE * self._bytes_max
        if self._queue and (is_full or not is_restoring):
            self._writing = self._next_file(folder)
            self._write(self._writing)

    def written(self, file: SpillFile, folder: NamespaceFolder | None) -> None:
        """Commit a file that the writing thread has left, if it still belongs into `folder`."""
        self._writing = None
        if file.error:
            _log.warning("spill_failed", file=file.name, cause=file.error)
            if file.is_disk_error:
                self._outside.tell(SpillFailed(detail=file.error[:4_000]))
            if not file.is_given_up:
                self._report_lost(file.hashes)
            return
        if not file.is_given_up and file.folder == folder:
            commit = CommitBlocks(
                name=file.name, records=file.records, evict_first=file.evict_first
            )
            if self._outside.tell(commit):
                self._committing[file.name] = file
                return
        self._give_up(file)
        self._delete(file.path)

    def committed(self, message: BlocksCommitted) -> None:
        """Report what the store has taken over or refused."""
        file = self._committing.pop(message.name, None)
        if file is None:
            _log.warning("unexpected_reply", file=message.name)
        elif not message.accepted:
            _log.warning("commit_refused", file=message.name, cause=message.detail)
            self._report_lost(file.hashes)
        else:
            self._outside.say(
                BlocksSpilled(
                    epoch=self._outside.epoch,
                    rank=self._outside.rank,
                    stored=file.hashes,
                    bytes_written=sum(record.size_bytes for record in file.records),
                    write_ms=file.write_s * 1e3,
                    store_bytes=message.store_bytes,
                )
            )

    def check_deadlines(self) -> None:
        """Give up a write that has taken too long, and all behind it."""
        at_s = self.next_deadline_at_s
        if at_s is not None and self._outside.clock.now() >= at_s and self._writing is not None:
            _log.warning("spill_hangs", file=self._writing.name, seconds=WRITE_S)
            self._give_up(self._writing)
            self.lose_queue()

    def lose_queue(self) -> None:
        """The store is off: nothing that waits will be written."""
        lost = [queued.item.hash for queued in self._queue]
        self._queue.clear()
        self._queued_bytes = 0
        self._report_lost(lost)

    def lose_session(self) -> None:
        """The store is gone: nothing that was written will be committed."""
        self.lose_queue()
        if self._writing is not None:
            self._give_up(self._writing)
        for file in self._committing.values():
            self._give_up(file)
            # If it was committed after all, it has another name by now.
            self._delete(file.path)
        self._committing.clear()

    def _next_file(self, folder: NamespaceFolder) -> SpillFile:
        taken = [self._pop()]
        size_bytes = taken[0].item.payload.nbytes
        while self._queue and self._queue[0].order is taken[0].order:
            size_bytes += self._queue[0].item.payload.nbytes
            if size_bytes > FILE_BYTES_MAX or len(taken) == limits.BLOCKS_PER_MESSAGE_MAX:
                break
            taken.append(self._pop())
        self._file_number += 1
        items = [queued.item for queued in taken]
        return SpillFile(
            folder=folder,
            name=f"{self._file_prefix}-{self._file_number}",
            items=items,
            hashes=[item.hash for item in items],
            payload_bytes=sum(item.payload.nbytes for item in items),
            evict_first=taken[0].order.evict_first if taken[0].is_first else [],
            began_at_s=self._outside.clock.now(),
        )

    def _pop(self) -> _Queued:
        queued = self._queue.popleft()
        self._queued_bytes -= queued.item.payload.nbytes
        return queued

    def _lose_other_namespaces(self, namespace: str) -> None:
        lost = []
        while self._queue and self._queue[0].order.namespace != namespace:
            lost.append(self._pop().item.hash)
        self._report_lost(lost)

    def _give_up(self, file: SpillFile) -> None:
        if not file.is_given_up:
            file.is_given_up = True
            self._report_lost(file.hashes)

    def _report_lost(self, hashes: Iterable[bytes]) -> None:
        lost = list(hashes)
        for first in range(0, len(lost), limits.BLOCKS_PER_MESSAGE_MAX):
            self._outside.say(
                BlocksSpilled(
                    epoch=self._outside.epoch,
                    rank=self._outside.rank,
                    stored=[],
                    lost=lost[first : first + limits.BLOCKS_PER_MESSAGE_MAX],
                )
            )
