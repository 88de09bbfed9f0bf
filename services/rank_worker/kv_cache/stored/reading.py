"""What a reading thread does for a restore: claim, read, verify, until nothing is left or late."""

import errno

from services.rank_worker.kv_cache.blocks.transfer import Kind
from services.rank_worker.kv_cache.stored.record_files import NoMemory, ReadRecord, RecordReader
from services.rank_worker.kv_cache.stored.restore_task import Cause, RestoreTask
from shared.block_record import RecordUnreadable
from shared.clock import Clock

_NO_MEMORY = frozenset({errno.ENOMEM, errno.EFAULT})
"""EFAULT: when there is none, MLX on a CPU gives memory at address 0."""

_NO_DAMAGE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOENT})
"""Errors that say nothing about the record: no descriptor is left, or somebody has deleted the
file, which the store finds out by itself. Named as bad, its older copy would go in its place."""


def read_share(restore: RestoreTask, reader: RecordReader, clock: Clock) -> None:
    """Read blocks of a restore that no other thread reads, as many as there are and time allows."""
    while claimed := restore.claim():
        for index in claimed:
            item = restore.items[index]
            assert item.block is not None
            if index >= restore.target_items:
                return
            if _is_late(restore, clock):
                restore.stop_before(index, "late")
                return
            record = _read(restore, reader, index, item.block, "block", item.length)
            if record is None:
                return
            restore.put(index, record)


def read_checkpoint(restore: RestoreTask, reader: RecordReader, clock: Clock) -> None:
    """Read the last checkpoint that the blocks reach; if it is unreadable, the one before it."""
    for number in range(restore.prefix, 0, -1):
        name = restore.items[number - 1].checkpoint
        if name is None or name not in restore.places:
            continue
        if _is_over(restore, clock.now()):
            restore.stop_before(number - 1, "late")
            return
        # Where its position is not known, the hash names it: no other state has the same one.
        record = _read(restore, reader, number - 1, name, "checkpoint", None)
        if record is not None:
            restore.put_checkpoint(number, record)
            return


def _read(
    restore: RestoreTask,
    reader: RecordReader,
    index: int,
    name: bytes,
    kind: Kind,
    tokens: int | None,
) -> ReadRecord | None:
    cause: Cause = "unreadable"
    try:
        return reader.read(restore.places[name], name, kind, tokens)
    except NoMemory:
        cause = "full"
    except RecordUnreadable as error:
        restore.unreadable.append((name, f"{error.cause}: {error}"))
    except OSError as error:
        if error.errno in _NO_MEMORY:
            cause = "full"
        elif error.errno not in _NO_DAMAGE:
            restore.unreadable.append((name, f"{error.strerror}"))
    restore.stop_before(index, cause)
    return None


def _is_late(restore: RestoreTask, clock: Clock) -> bool:
    """Tell whether to stop with blocks, so that there is time for the checkpoint behind them.

    Blocks alone would be worth nothing. Checkpoints of one model are of about one size, and the
    records so far say how fast this disk is at the moment.
    """
    now_s = clock.now()
    reserve_s = 0.0
    if restore.needs_checkpoint and restore.bytes_read:
        rate = restore.bytes_read / max(now_s - restore.read_began_at_s, 1e-6)
        reserve_s = restore.checkpoint_bytes(restore.target_items) / rate
    return _is_over(restore, now_s + reserve_s)


def _is_over(restore: RestoreTask, now_s: float) -> bool:
    return restore.closed or now_s >= restore.deadline_at_s
