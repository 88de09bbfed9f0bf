"""The threads that read and write record files, so that no other thread waits for the disk."""

import errno
import queue
import threading
from collections.abc import Callable
from pathlib import Path

from services.rank_worker.kv_cache.blocks.items import CachedItem, ItemKind
from services.rank_worker.kv_cache.stored import record_files
from services.rank_worker.kv_cache.stored.record_files import (
    Allocate,
    BlockBytes,
    NoMemory,
    RecordReader,
)
from services.rank_worker.kv_cache.stored.restore_task import CLAIM_BYTES, Cause, RestoreTask
from services.rank_worker.kv_cache.stored.spill_queue import SpillFile
from shared.block_record import RecordUnreadable
from shared.clock import Clock
from shared.log import Log

_log = Log("rank_worker.stored")

READERS = 3
"""Threads that share the reading of a restore: while one waits for the disk, another one checks or
gets memory, whose first touch costs as much as the read. Cold, one thread reached 45 to 68 % of a
plain read of the same files, two 66 to 84 %, three 75 to 96 %, four no more. A file that hangs
stops only one of them."""

_OUT_OF_MEMORY = frozenset({errno.ENOMEM, errno.EFAULT})
"""EFAULT: without memory, MLX on a CPU returns memory at address 0."""

_NOT_DAMAGED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOENT})
"""Errors that do not concern the record: no free descriptor, or a deleted file, which the store
notices itself. Quarantining the record would remove its older copy."""


class DiskThreads:
    """One thread that writes record files, and three that read them without waiting for it."""

    def __init__(
        self, clock: Clock, allocate: Allocate, on_done: Callable[[RestoreTask | SpillFile], None]
    ) -> None:
        """Create the threads' queues.

        Args:
            clock: monotonic time.
            allocate: allocates the memory that records are read into.
            on_done: called with finished work, in the thread that did it.
        """
        self.block_bytes: BlockBytes | None = None
        """Returns the payload bytes of a block of n tokens; once set, a block of another size is
        unreadable."""
        self._clock = clock
        self._allocate = allocate
        self._on_done = on_done
        self._to_read: queue.SimpleQueue[RestoreTask | None] = queue.SimpleQueue()
        self._to_write: queue.SimpleQueue[SpillFile | Path | None] = queue.SimpleQueue()

    def start(self) -> None:
        """Start the threads, which run until `close` or the end of the process."""
        for number in range(READERS):
            name = f"stored-read-{number}"
            threading.Thread(target=self._run_reads, name=name, daemon=True).start()
        threading.Thread(target=self._run_writes, name="stored-write", daemon=True).start()

    def read(self, restore: RestoreTask) -> None:
        """Queue a restore for the reading threads: one, and one more per 16 MiB, at most three.

        Args:
            restore: the restore, whose items to read are selected.
        """
        for _ in range(min(READERS, 1 + restore.planned_bytes // CLAIM_BYTES)):
            self._to_read.put(restore)

    def write(self, file: SpillFile) -> None:
        """Queue a spill file for writing; the thread adds records, duration or error to it."""
        self._to_write.put(file)

    def delete(self, path: Path) -> None:
        """Queue the deletion of a partial file of this process."""
        self._to_write.put(path)

    def close(self) -> None:
        """End the threads after the queued work."""
        for _ in range(READERS):
            self._to_read.put(None)
        self._to_write.put(None)

    def _run_reads(self) -> None:
        while (restore := self._to_read.get()) is not None:
            if restore.enter():
                self._read_share(restore)
            # Frees its memory when it is adopted or forgotten, not when the next restore comes.
            del restore

    def _read_share(self, restore: RestoreTask) -> None:
        assert restore.folder is not None
        reader = RecordReader(restore.folder, self._allocate, self.block_bytes)
        is_last = False
        try:
            _read_blocks(restore, reader, self._clock)
            is_last = restore.leave()
            if is_last and restore.needs_checkpoint:
                _read_checkpoint(restore, reader, self._clock)
        except Exception:  # noqa: BLE001 - no error of this tier may end the rank
            _log.exception("restore_failed", restore_id=restore.order.restore_id)
            restore.stop_before(0, "unreadable")
            is_last = is_last or restore.leave()
        reader.close()
        if is_last:
            self._on_done(restore)

    def _run_writes(self) -> None:
        while (job := self._to_write.get()) is not None:
            if isinstance(job, SpillFile):
                self._write_file(job)
                self._on_done(job)
            else:
                record_files.delete(job)
            del job

    def _write_file(self, file: SpillFile) -> None:
        started_s = self._clock.now()
        try:
            file.records = record_files.write(file.path, file.folder, file.items)
        except OSError as error:
            file.error = f"Writing {file.path} failed: {error.strerror}."
            file.is_disk_error = True
        except Exception as error:  # noqa: BLE001 - no error of this tier may end the rank
            _log.exception("spill_failed", file=file.name)
            file.error = f"{type(error).__name__}: {error}"
        file.write_s = self._clock.now() - started_s
        # Frees the blocks' memory; they may have been evicted meanwhile.
        file.items = []


def _read_blocks(restore: RestoreTask, reader: RecordReader, clock: Clock) -> None:
    """Read blocks that no other thread has claimed, until all are claimed or time is over."""
    while claimed := restore.claim():
        for index in claimed:
            item = restore.items[index]
            assert item.block is not None
            if index >= restore.target_items:
                return
            if _must_stop(restore, clock):
                restore.stop_before(index, "late")
                return
            record = _read_record(restore, reader, index, item.block, "block", item.length)
            if record is None:
                return
            restore.put(index, record)


def _read_checkpoint(restore: RestoreTask, reader: RecordReader, clock: Clock) -> None:
    """Read the last checkpoint that the blocks reach, or an earlier one if it is unreadable."""
    for count in range(restore.prefix, 0, -1):
        checkpoint = restore.items[count - 1].checkpoint
        if checkpoint is None or checkpoint not in restore.places:
            continue
        if _is_over(restore, clock.now()):
            restore.stop_before(count - 1, "late")
            return
        # The position of a checkpoint may be unknown here; its hash identifies it.
        record = _read_record(restore, reader, count - 1, checkpoint, "checkpoint", None)
        if record is not None:
            restore.put_checkpoint(count, record)
            return


def _read_record(
    restore: RestoreTask,
    reader: RecordReader,
    index: int,
    entry_hash: bytes,
    kind: ItemKind,
    tokens: int | None,
) -> CachedItem | None:
    cause: Cause = "unreadable"
    try:
        return reader.read(restore.places[entry_hash], entry_hash, kind, tokens)
    except NoMemory:
        cause = "full"
    except RecordUnreadable as error:
        restore.unreadable.append((entry_hash, f"{error.cause}: {error}"))
    except OSError as error:
        if error.errno in _OUT_OF_MEMORY:
            cause = "full"
        elif error.errno not in _NOT_DAMAGED:
            restore.unreadable.append((entry_hash, f"{error.strerror}"))
    restore.stop_before(index, cause)
    return None


def _must_stop(restore: RestoreTask, clock: Clock) -> bool:
    """Return True when reading blocks must stop to leave time for the checkpoint after them.

    Blocks without it would be useless. Checkpoints of one model have about the same size, and the
    records read so far show the present speed of the disk.
    """
    now_s = clock.now()
    checkpoint_s = 0.0
    if restore.needs_checkpoint and restore.bytes_read:
        bytes_per_s = restore.bytes_read / max(now_s - restore.read_began_at_s, 1e-6)
        checkpoint_s = restore.checkpoint_bytes(restore.target_items) / bytes_per_s
    return _is_over(restore, now_s + checkpoint_s)


def _is_over(restore: RestoreTask, now_s: float) -> bool:
    return restore.is_answered or now_s >= restore.deadline_at_s
