"""The threads that wait for the disk, so that nobody else does."""

import queue
import threading
from collections.abc import Callable
from pathlib import Path

from services.rank_worker.kv_cache.stored import record_files
from services.rank_worker.kv_cache.stored.reading import read_checkpoint, read_share
from services.rank_worker.kv_cache.stored.record_files import Allocate, BlockBytes, RecordReader
from services.rank_worker.kv_cache.stored.restore_task import CLAIM_BYTES, RestoreTask
from services.rank_worker.kv_cache.stored.spill_queue import SpillFile
from shared.clock import Clock
from shared.log import Log

_log = Log("rank_worker.stored")

READERS = 3
"""Threads that read and share a restore: while one waits for the disk, another verifies or gets
memory, whose first touch costs as much as the read. Cold, one alone reached 45 to 68 % of a plain
read of the same files, two 66 to 84 %, three 75 to 96 %, four no more. And one hung file stops only
one of them."""


class DiskThreads:
    """One thread that writes and a few that read; neither kind waits for the other.

    Results go to `ended`, in the thread that did the work.
    """

    def __init__(
        self, clock: Clock, allocate: Allocate, ended: Callable[[RestoreTask | SpillFile], None]
    ) -> None:
        self.block_bytes: BlockBytes | None = None
        """Once known, a block of another size is unreadable."""
        self._clock = clock
        self._allocate = allocate
        self._ended = ended
        self._to_read: queue.SimpleQueue[RestoreTask | None] = queue.SimpleQueue()
        self._to_write: queue.SimpleQueue[SpillFile | Path | None] = queue.SimpleQueue()

    def start(self) -> None:
        """Work until `close` or the end of the process."""
        for number in range(READERS):
            name = f"stored-read-{number}"
            threading.Thread(target=self._run_reads, name=name, daemon=True).start()
        threading.Thread(target=self._run_writes, name="stored-write", daemon=True).start()

    def read(self, restore: RestoreTask) -> None:
        """Read what `restore` aims at, by as many threads as it is worth."""
        for _ in range(min(READERS, 1 + restore.planned_bytes // CLAIM_BYTES)):
            self._to_read.put(restore)

    def write(self, file: SpillFile) -> None:
        """Write a file; what became of it stands in it."""
        self._to_write.put(file)

    def delete(self, path: Path) -> None:
        """Delete a file that this process wrote and nobody took over."""
        self._to_write.put(path)

    def close(self) -> None:
        """End the threads when they have done what is queued."""
        for _ in range(READERS):
            self._to_read.put(None)
        self._to_write.put(None)

    def _run_reads(self) -> None:
        while (restore := self._to_read.get()) is not None:
            if restore.enter():
                self._read_share(restore)
            # What it holds is freed when it is taken or forgotten, not when the next one comes.
            del restore

    def _read_share(self, restore: RestoreTask) -> None:
        assert restore.folder is not None
        reader = RecordReader(restore.folder, self._allocate, self.block_bytes)
        is_last = False
        try:
            read_share(restore, reader, self._clock)
            is_last = restore.leave()
            if is_last and restore.needs_checkpoint:
                read_checkpoint(restore, reader, self._clock)
        except Exception:  # noqa: BLE001 - no error of this tier may end the rank
            _log.exception("restore_failed", restore_id=restore.order.restore_id)
            restore.stop_before(0, "unreadable")
            is_last = is_last or restore.leave()
        reader.close()
        if is_last:
            self._ended(restore)

    def _run_writes(self) -> None:
        while (job := self._to_write.get()) is not None:
            if isinstance(job, SpillFile):
                self._write_one(job)
                self._ended(job)
            else:
                record_files.delete(job)
            del job

    def _write_one(self, file: SpillFile) -> None:
        before_s = self._clock.now()
        try:
            file.records = record_files.write(file.path, file.folder, file.items)
        except OSError as error:
            file.error = f"Writing {file.path} failed: {error.strerror}."
            file.is_disk_error = True
        except Exception as error:  # noqa: BLE001 - no error of this tier may end the rank
            _log.exception("spill_failed", file=file.name)
            file.error = f"{type(error).__name__}: {error}"
        file.write_s = self._clock.now() - before_s
        # The memory of the blocks; they may have been evicted meanwhile.
        file.items = []
