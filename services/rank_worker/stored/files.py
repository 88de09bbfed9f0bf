"""Records in files: written in one go, read into the memory that they stay in, then verified."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from services.rank_worker.blocks.transfer import Kind, SpillItem
from services.rank_worker.stored.folder import NamespaceFolder
from shared import block_record
from shared.block_record import HEADER_BYTES, RecordUnreadable
from shared.messages import BlockPlace, WrittenRecord

Allocate = Callable[[int, int], tuple[memoryview, Any]]
"""(bytes, n) -> a writable view of so many fresh bytes, and the array in the same memory that
begins n bytes behind its start. Called in threads of the tier.

Raises MemoryError or RuntimeError when there is no memory.
"""

BlockBytes = Callable[[int], int]
"""Bytes that the payload of a block of so many tokens has on this rank."""


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
        head = block_record.header(folder.identity(item.hash, item.kind, item.tokens), item.payload)
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
        try:
            view, payload = self._allocate(place.size_bytes, HEADER_BYTES)
        except (MemoryError, RuntimeError) as error:
            raise NoMemory(str(error)) from None
        with view:
            _fill(view, file, place.offset)
            said = self._verify(view, block_hash, kind, tokens)
        return ReadRecord(said, payload, place.size_bytes)

    def close(self) -> None:
        """Close the file that is still open."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, name: str) -> FileIO:
        if self._file is None or self._name != name:
            self.close()
            self._file = FileIO(self._folder.path / name)
            self._name = name
        return self._file

    def _verify(self, view: memoryview, block_hash: bytes, kind: Kind, tokens: int | None) -> int:
        if tokens is None:
            tokens = block_record.read_header(view)[0].tokens
        expected = self._folder.identity(block_hash, kind, tokens)
        _, payload = block_record.check(view, expected)
        with payload:
            if kind == "block" and self._block_bytes is not None:
                wanted = self._block_bytes(tokens)
                if payload.nbytes != wanted:
                    raise RecordUnreadable(
                        f"A block of {tokens} tokens has {wanted} bytes here, the record "
                        f"{payload.nbytes}.",
                        "identity",
                    )
        return tokens


def _fill(view: memoryview, file: FileIO, offset: int) -> None:
    file.seek(offset)
    done = 0
    while done < view.nbytes:
        # Straight into memory that stays: nothing is copied, and the GIL is free meanwhile.
        count = file.readinto(view[done:])
        if not count:
            raise RecordUnreadable(
                f"The file ends {view.nbytes - done} bytes before the record does.", "torn"
            )
        done += count
