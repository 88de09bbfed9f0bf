"""Record files of one rank. Owns their format on disk; decides nothing about blocks.

A record is read into its final memory and checked while it is read.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from services.rank_worker.kv_cache.blocks.items import CachedItem, ItemKind, SpillItem
from shared import block_record
from shared.block_record import HEADER_BYTES, RecordChecker, RecordIdentity, RecordUnreadable
from shared.messages import BlockPlace, WrittenRecord

Allocate = Callable[[int], tuple[memoryview, Any]]
"""Allocates `size` bytes; returns a writable view and the uint8 array [size] behind it.

Called in the tier's threads. Raises MemoryError or RuntimeError without memory.
"""

BlockBytes = Callable[[int], int]
"""Returns the payload bytes of a block of a number of tokens on this rank."""

PIECE_BYTES = 1024 * 1024
"""Bytes that are read before they are hashed, while they are in the processor's cache. Every read
takes the GIL afterwards, so smaller pieces are slower."""

_PARTS_PER_WRITE = 1_024
"""Most buffers that Linux and macOS accept in one call of writev."""


@dataclasses.dataclass(frozen=True, slots=True)
class NamespaceFolder:
    """The folder with one rank's record files in one namespace, as the store assigned it."""

    namespace: str
    rank: int
    world_size: int
    path: Path

    def identity(self, block_hash: bytes, kind: ItemKind, tokens: int) -> RecordIdentity:
        """Return the identity that the header of a record in this folder must have.

        Args:
            block_hash: hash of the block or checkpoint.
            kind: "block" or "checkpoint".
            tokens: tokens in the block, or before the checkpoint's state.
        """
        return RecordIdentity(
            namespace=self.namespace,
            rank=self.rank,
            world_size=self.world_size,
            hash=block_hash,
            kind=kind,
            tokens=tokens,
        )


class NoMemory(Exception):
    """Raised when there is no memory for a record's payload."""


def write(path: Path, folder: NamespaceFolder, items: Sequence[SpillItem]) -> list[WrittenRecord]:
    """Write a new file with one record per item, in order. An error leaves no file behind.

    Args:
        path: path of the file, which must not exist.
        folder: the namespace folder, which determines the records' identities.
        items: blocks and checkpoints.

    Returns:
        Hash, offset and size in bytes of each record.

    Raises:
        OSError: the disk is full, read-only or broken, or the folder is gone.
    """
    file = FileIO(path, "x", opener=lambda name, flags: os.open(name, flags, 0o600))
    try:
        # Some file systems report a full disk only when the file is closed.
        with file:
            return _write_records(file.fileno(), folder, items)
    except BaseException:
        delete(path)
        raise


def delete(path: Path) -> None:
    """Delete a partial file if possible; the store later deletes those for which this fails."""
    with contextlib.suppress(OSError):
        path.unlink()


def _write_records(
    descriptor: int, folder: NamespaceFolder, items: Sequence[SpillItem]
) -> list[WrittenRecord]:
    records: list[WrittenRecord] = []
    parts: list[memoryview] = []
    offset = 0
    for item in items:
        identity = folder.identity(item.hash, item.kind, item.tokens)
        header = block_record.build_header(identity, item.payload)
        parts += [memoryview(header), item.payload]
        size_bytes = len(header) + item.payload.nbytes
        records.append(WrittenRecord(hash=item.hash, offset=offset, size_bytes=size_bytes))
        offset += size_bytes
    _write_all(descriptor, parts)
    return records


def _write_all(descriptor: int, parts: list[memoryview]) -> None:
    """Write all parts with few calls, because this thread takes the GIL after each one."""
    first = 0
    while first < len(parts):
        # A full disk writes a part without an error; only the next write raises.
        written = os.writev(descriptor, parts[first : first + _PARTS_PER_WRITE])
        while first < len(parts) and written >= parts[first].nbytes:
            written -= parts[first].nbytes
            first += 1
        if written:
            parts[first] = parts[first][written:]


class RecordReader:
    """Reads blocks and checkpoints from the record files of one folder.

    The last file stays open, as neighbouring blocks share it.
    """

    def __init__(
        self, folder: NamespaceFolder, allocate: Allocate, block_bytes: BlockBytes | None = None
    ) -> None:
        self._folder = folder
        self._allocate = allocate
        self._block_bytes = block_bytes
        self._name = ""
        self._file: FileIO | None = None

    def read(
        self, place: BlockPlace, block_hash: bytes, kind: ItemKind, tokens: int | None
    ) -> CachedItem:
        """Read one record and compare its header and checksum with the expected identity.

        Args:
            place: file, offset and size of the record, as the store located it.
            block_hash: the expected hash.
            kind: the expected kind.
            tokens: the expected number of tokens; None when only the hash is known.

        Raises:
            RecordUnreadable: the bytes are not that record.
            OSError: the file is missing, or the disk cannot read it.
            NoMemory: there is no memory for the payload.
        """
        if place.size_bytes < HEADER_BYTES:
            raise RecordUnreadable(f"{place.size_bytes} bytes are too few for a record.", "torn")
        file = self._open(place.name)
        file.seek(place.offset)
        header = bytearray(HEADER_BYTES)
        _fill(memoryview(header), file)
        checker = RecordChecker(header, place.size_bytes)
        expected_tokens = checker.identity.tokens if tokens is None else tokens
        payload_bytes = expected_bytes = place.size_bytes - HEADER_BYTES
        if kind == "block" and self._block_bytes is not None:
            expected_bytes = self._block_bytes(expected_tokens)
        if payload_bytes != expected_bytes:
            raise RecordUnreadable(
                f"A block of {expected_tokens} tokens has {expected_bytes} bytes on this rank, the "
                f"record has {payload_bytes}.",
                "identity",
            )
        try:
            view, payload = self._allocate(payload_bytes)
        except (MemoryError, RuntimeError) as error:
            raise NoMemory(str(error)) from None
        with view:
            for start in range(0, payload_bytes, PIECE_BYTES):
                with view[start : start + PIECE_BYTES] as piece:
                    _fill(piece, file)
                    checker.add(piece)
        checker.finish(self._folder.identity(block_hash, kind, expected_tokens))
        return CachedItem(block_hash, kind, expected_tokens, payload)

    def close(self) -> None:
        """Close the file that is open for reading, if any."""
        if self._file is not None:
            file, self._file = self._file, None
            # All records that were needed from it were read and checked.
            with contextlib.suppress(OSError):
                file.close()

    def _open(self, name: str) -> FileIO:
        if self._file is None or self._name != name:
            self.close()
            self._file = FileIO(self._folder.path / name)
            self._name = name
        return self._file


def _fill(view: memoryview, file: FileIO) -> None:
    done = 0
    while done < view.nbytes:
        # readinto the final memory copies nothing and releases the GIL.
        count = file.readinto(view[done:])
        if not count:
            raise RecordUnreadable("The file ends before the record does.", "torn")
        done += count
