"""Records in files: written in one go, read into the memory that they stay in, then verified."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from services.rank_worker.kv_cache.blocks.transfer import Kind, SpillItem
from services.rank_worker.kv_cache.stored.folder import NamespaceFolder
from shared import block_record
from shared.block_record import HEADER_BYTES, RecordChecker, RecordUnreadable
from shared.messages import BlockPlace, WrittenRecord

Allocate = Callable[[int], tuple[memoryview, Any]]
"""Bytes -> a writable view of so many fresh bytes, and the array that they are. Called in threads
of the tier.

Raises MemoryError or RuntimeError when there is no memory.
"""

BlockBytes = Callable[[int], int]
"""Bytes that the payload of a block of so many tokens has on this rank."""


PIECE_BYTES = 1024 * 1024
"""What is read before it is hashed: it is still in the processor's cache then. After every call the
GIL is needed, so not less."""

_PARTS_PER_WRITE = 1_024
"""What Linux and macOS take at once."""


class NoMemory(Exception):
    """There is no room for what would be read."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReadRecord:
    """A record that was read and verified."""

    tokens: int
    """As its header says, and as it was asked for where that is known."""
    payload: Any
    """What `Allocate` gave: uint8 [payload bytes]."""
    size_bytes: int
    """With its header."""


def write(path: Path, folder: NamespaceFolder, items: Sequence[SpillItem]) -> list[WrittenRecord]:
    """Write a new file with a record per item, in order. Nothing is left behind on an error.

    Raises:
        OSError: the disk refuses: full, read-only, broken, or the folder is gone.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        records = _write_records(descriptor, folder, items)
        # Some file systems say only now that the disk is full.
        open_descriptor, descriptor = descriptor, -1
        os.close(open_descriptor)
    except BaseException:
        if descriptor >= 0:
            os.close(descriptor)
        delete(path)
        raise
    return records


def delete(path: Path) -> None:
    """Delete a file that nobody has taken over. What cannot be deleted is the store's to find."""
    with contextlib.suppress(OSError):
        path.unlink()


def _write_records(
    descriptor: int, folder: NamespaceFolder, items: Sequence[SpillItem]
) -> list[WrittenRecord]:
    records: list[WrittenRecord] = []
    parts: list[memoryview] = []
    offset = 0
    for item in items:
        head = block_record.build_header(
            folder.identity(item.hash, item.kind, item.tokens), item.payload
        )
        parts += [memoryview(head), item.payload]
        size_bytes = len(head) + item.payload.nbytes
        records.append(WrittenRecord(hash=item.hash, offset=offset, size_bytes=size_bytes))
        offset += size_bytes
    _write_all(descriptor, parts)
    return records


def _write_all(descriptor: int, parts: list[memoryview]) -> None:
    """Write all parts by as few calls as it takes: after each one this thread needs the GIL."""
    first = 0
    while first < len(parts):
        # A full disk takes a part and says nothing; only the next write raises.
        written = os.writev(descriptor, parts[first : first + _PARTS_PER_WRITE])
        while first < len(parts) and written >= parts[first].nbytes:
            written -= parts[first].nbytes
            first += 1
        if written:
            parts[first] = parts[first][written:]


class RecordReader:
    """Reads records of one folder. The file of the last one stays open: neighbours share it."""

    def __init__(
        self, folder: NamespaceFolder, allocate: Allocate, block_bytes: BlockBytes | None = None
    ) -> None:
        self._folder = folder
        self._allocate = allocate
        self._block_bytes = block_bytes
        self._name = ""
        self._file: FileIO | None = None

    def read(
        self, place: BlockPlace, block_hash: bytes, kind: Kind, tokens: int | None
    ) -> ReadRecord:
        """Read one record and verify every byte of it.

        Args:
            place: where it lies.
            block_hash: whose record it must be.
            kind: what it must be.
            tokens: how many it must say; None: its hash says it all.

        Raises:
            RecordUnreadable: these bytes are not that record.
            OSError: there is no such file, or the disk does not give it.
            NoMemory: there is no room.
        """
        if place.size_bytes < HEADER_BYTES:
            raise RecordUnreadable(f"{place.size_bytes} bytes are too few for a record.", "torn")
        file = self._open(place.name)
        file.seek(place.offset)
        head = bytearray(HEADER_BYTES)
        _fill(memoryview(head), file)
        proof = RecordChecker(head, place.size_bytes)
        said = proof.identity.tokens if tokens is None else tokens
        payload_bytes = place.size_bytes - HEADER_BYTES
        self._check_length(kind, said, payload_bytes)
        try:
            view, payload = self._allocate(payload_bytes)
        except (MemoryError, RuntimeError) as error:
            raise NoMemory(str(error)) from None
        with view:
            for start in range(0, payload_bytes, PIECE_BYTES):
                with view[start : start + PIECE_BYTES] as piece:
                    _fill(piece, file)
                    proof.add(piece)
        proof.finish(self._folder.identity(block_hash, kind, said))
        return ReadRecord(said, payload, place.size_bytes)

    def close(self) -> None:
        """Close the file that is still open."""
        if self._file is not None:
            file, self._file = self._file, None
            # All that was wanted of it was read and verified.
            with contextlib.suppress(OSError):
                file.close()

    def _open(self, name: str) -> FileIO:
        if self._file is None or self._name != name:
            self.close()
            self._file = FileIO(self._folder.path / name)
            self._name = name
        return self._file

    def _check_length(self, kind: Kind, tokens: int, payload_bytes: int) -> None:
        if kind == "checkpoint" or self._block_bytes is None:
            return
        wanted = self._block_bytes(tokens)
        if payload_bytes != wanted:
            raise RecordUnreadable(
                f"A block of {tokens} tokens has {wanted} bytes here, the record {payload_bytes}.",
                "identity",
            )


def _fill(view: memoryview, file: FileIO) -> None:
    done = 0
    while done < view.nbytes:
        # Straight into memory that stays: nothing is copied, and the GIL is free meanwhile.
        count = file.readinto(view[done:])
        if not count:
            raise RecordUnreadable("The file ends before the record does.", "torn")
        done += count
