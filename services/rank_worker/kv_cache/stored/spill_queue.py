"""All spills of one rank. Owns queue, files and reports. For the tier's thread."""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from services.rank_worker.kv_cache.blocks.items import SpillItem
from services.rank_worker.kv_cache.stored.context import TierContext
from services.rank_worker.kv_cache.stored.record_files import NamespaceFolder
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
"""Most payload bytes of one file, which takes consecutive blocks of one order, or one larger block.

Cold reads of blocks that share a file are faster, thanks to read-ahead. But the store evicts whole
files, so files must not be larger."""

WRITE_S = 30.0
"""A write that takes longer is abandoned, and no block is spilled until it ends."""

RESTORES_FIRST_SHARE = 0.5
"""While a restore is open, files are written only above this share of the memory bound."""


@dataclasses.dataclass(slots=True)
class SpillFile:
    """A file of blocks and checkpoints to be written, and the result of writing it."""

    folder: NamespaceFolder
    name: str
    items: list[SpillItem]
    hashes: list[bytes]
    """Hashes of the items, in order."""
    payload_bytes: int
    evict_first: list[bytes]
    """Hashes of stored blocks that the store should evict first if it needs space for this file."""
    began_at_s: float
    """When writing began, in clock seconds."""
    is_abandoned: bool = False
    """It was reported lost; the file is deleted when the write ends."""
    records: list[WrittenRecord] = dataclasses.field(default_factory=list)
    write_s: float = 0.0
    error: str = ""
    """Why it was not written; "" when it was."""
    is_disk_error: bool = False
    """The error is the disk's."""

    @property
    def path(self) -> Path:
        """Full path of the file."""
        return self.folder.path / self.name


@dataclasses.dataclass(frozen=True, slots=True)
class _Queued:
    item: SpillItem
    order: SpillOrder
    is_first: bool
    """It carries the order's `evict_first`."""


@dataclasses.dataclass(slots=True)
class SpillQueue:
    """The blocks and checkpoints that plans spill, until the store has taken over their files.

    Every hash of every order is reported to the scheduler exactly once, stored or lost.
    """

    context: TierContext
    """Clock, scheduler and store."""
    write: Callable[[SpillFile], None]
    """Writes a file in another thread."""
    delete: Callable[[Path], None]
    """Deletes a file in another thread."""
    bytes_max: int
    """Most payload bytes that are queued or being written."""
    file_prefix: str
    """The prefix of all file names, unique to this process."""
    _file_number: int = 0
    _queue: deque[_Queued] = dataclasses.field(default_factory=deque)
    _queued_bytes: int = 0
    _writing: SpillFile | None = None
    _committing: dict[str, SpillFile] = dataclasses.field(default_factory=dict)

    @property
    def next_deadline_at_s(self) -> float | None:
        """When the present write will be abandoned, in clock seconds; None without a write."""
        if self._writing is None or self._writing.is_abandoned:
            return None
        return self._writing.began_at_s + WRITE_S

    def add(self, order: SpillOrder, items: Sequence[SpillItem], *, can_write: bool) -> None:
        """Queue the blocks of a spill order. If memory is short, the oldest are reported lost.

        Args:
            order: the order; blocks without a payload in `items` are reported lost.
            items: the payloads that this rank holds.
            can_write: a store is on or being opened; otherwise all blocks are lost.
        """
        held = {item.hash for item in items}
        lost = [one for one in order.hashes if one not in held]
        is_stuck = self._writing is not None and self._writing.is_abandoned
        for index, item in enumerate(items):
            if not can_write or is_stuck or item.payload.nbytes > self.bytes_max:
                lost.append(item.hash)
                continue
            self._queue.append(_Queued(item, order, is_first=index == 0))
            self._queued_bytes += item.payload.nbytes
        writing_bytes = self._writing.payload_bytes if self._writing is not None else 0
        while self._queue and self._queued_bytes + writing_bytes > self.bytes_max:
            lost.append(self._pop().item.hash)
        self._report_lost(lost)

    def write_next(self, folder: NamespaceFolder | None, *, is_restoring: bool) -> None:
        """Start to write the next file, unless one is being written or an open restore delays it.

        Args:
            folder: folder of the open namespace; None: nothing is written.
            is_restoring: whether a restore is open. Reading goes first then, until the queue takes
                half of its memory limit.
        """
        if folder is None or self._writing is not None:
            return
        self._lose_other_namespaces(folder.namespace)
        is_full = self._queued_bytes > RESTORES_FIRST_SHARE * self.bytes_max
        if self._queue and (is_full or not is_restoring):
            self._writing = self._next_file(folder)
            self.write(self._writing)

    def finish_write(self, file: SpillFile, folder: NamespaceFolder | None) -> None:
        """Ask the store to take over a written file, or report its blocks lost.

        Args:
            file: the file with its records or its error.
            folder: folder of the open namespace; a file of another folder is deleted.
        """
        self._writing = None
        if file.error:
            _log.warning("spill_failed", file=file.name, cause=file.error)
            if file.is_disk_error:
                self.context.send_to_store(SpillFailed(detail=file.error[:4_000]))
            self._abandon(file)
            return
        if not file.is_abandoned and file.folder == folder:
            commit = CommitBlocks(
                name=file.name, records=file.records, evict_first=file.evict_first
            )
            if self.context.send_to_store(commit):
                self._committing[file.name] = file
                return
        self._abandon(file)
        self.delete(file.path)

    def handle_committed(self, message: BlocksCommitted) -> None:
        """Report a file's blocks as stored if the store took it over, otherwise as lost."""
        file = self._committing.pop(message.name, None)
        if file is None:
            _log.warning("unexpected_reply", file=message.name)
        elif not message.accepted:
            _log.warning("commit_refused", file=message.name, cause=message.detail)
            self._report_lost(file.hashes)
        else:
            self.context.send_to_scheduler(
                BlocksSpilled(
                    epoch=self.context.epoch,
                    rank=self.context.rank,
                    stored=file.hashes,
                    bytes_written=sum(record.size_bytes for record in file.records),
                    write_ms=file.write_s * 1e3,
                    store_bytes=message.store_bytes,
                )
            )

    def check_deadlines(self) -> None:
        """After `WRITE_S` of writing one file, report its blocks and all queued ones lost."""
        at_s = self.next_deadline_at_s
        if at_s is not None and self.context.clock.now() >= at_s and self._writing is not None:
            _log.warning("spill_hangs", file=self._writing.name, seconds=WRITE_S)
            self._abandon(self._writing)
            self.lose_queue()

    def lose_queue(self) -> None:
        """Report all queued blocks lost, because the store is off."""
        self._report_lost([self._pop().item.hash for _ in range(len(self._queue))])

    def lose_session(self) -> None:
        """Report all blocks lost that the store has not taken over, and delete their files.

        To be called when the connection to the store is lost.
        """
        self.lose_queue()
        if self._writing is not None:
            self._abandon(self._writing)
        for file in self._committing.values():
            self._abandon(file)
            # A file that was committed has another name by now and stays.
            self.delete(file.path)
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
            name=f"{self.file_prefix}-{self._file_number}",
            items=items,
            hashes=[item.hash for item in items],
            payload_bytes=sum(item.payload.nbytes for item in items),
            evict_first=taken[0].order.evict_first if taken[0].is_first else [],
            began_at_s=self.context.clock.now(),
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

    def _abandon(self, file: SpillFile) -> None:
        if not file.is_abandoned:
            file.is_abandoned = True
            self._report_lost(file.hashes)

    def _report_lost(self, hashes: Iterable[bytes]) -> None:
        lost = list(hashes)
        for first in range(0, len(lost), limits.BLOCKS_PER_MESSAGE_MAX):
            self.context.send_to_scheduler(
                BlocksSpilled(
                    epoch=self.context.epoch,
                    rank=self.context.rank,
                    stored=[],
                    lost=lost[first : first + limits.BLOCKS_PER_MESSAGE_MAX],
                )
            )
