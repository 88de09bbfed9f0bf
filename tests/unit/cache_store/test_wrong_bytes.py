"""100,000 damaged records: flipped, torn, swapped, renamed. Whatever a rank reads is right.

The reader is the ranks' own, on a real file.
"""

import os
import random
from pathlib import Path

import pytest

from services.cache_store.file_names import FolderKey
from services.rank_worker.kv_cache.stored import record_files
from services.rank_worker.kv_cache.stored.record_files import NamespaceFolder, RecordReader
from shared.block_record import HEADER_BYTES, RecordIdentity, RecordUnreadable
from shared.messages import BlockPlace
from tests.unit.cache_store.harness import block_hash, identity_of, payload_of, record_of

TRIES = 100_000
SEED = 20_260_715

_FOLDERS = [
    FolderKey("ab" * 32, 0, 1),
    FolderKey("ab" * 32, 0, 2),
    FolderKey("ab" * 32, 1, 2),
    FolderKey("cd" * 32, 0, 1),
]
_SIZES = (0, 1, 64, 300)


def _stock() -> dict[RecordIdentity, bytes]:
    """Return the record of ten blocks in each of four folders, payloads of four lengths."""
    identities = [
        identity_of(folder, block_hash(number)) for folder in _FOLDERS for number in range(10)
    ]
    return {
        identity: record_of(identity, _SIZES[place % len(_SIZES)])
        for place, identity in enumerate(identities)
    }


def _flip(chance: random.Random, data: bytes, other: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 8, 64))):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _tear(chance: random.Random, data: bytes, other: bytes) -> bytes:
    cut = chance.randrange(len(data) + 1)
    tail = chance.choice((b"", bytes(len(data) - cut), data[: len(data) - cut], bytes(4_096)))
    return data[:cut] + tail


def _swap(chance: random.Random, data: bytes, other: bytes) -> bytes:
    """Put a part of another record into this one: from any place, or payload under header."""
    if chance.random() < 0.5:
        return data[:HEADER_BYTES] + other[HEADER_BYTES:]
    first, last = sorted(chance.randrange(len(data) + 1) for _ in range(2))
    return data[:first] + other[first:last] + data[last:]


def _rename(chance: random.Random, data: bytes, other: bytes) -> bytes:
    """Put another record, whole, in this one's place; or begin at a wrong offset."""
    if chance.random() < 0.5:
        return other
    both = other + data
    start = chance.randrange(len(other) + 1)
    return both[start : start + len(data)]


def _allocate(size_bytes: int) -> tuple[memoryview, bytearray]:
    """Stand for MLX: memory that holds something else."""
    memory = bytearray(b"\xaa" * size_bytes)
    return memoryview(memory), memory


class _File:
    """One file whose content is replaced again and again, and a rank's way to read it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = os.open(folder / "file", os.O_RDWR | os.O_CREAT)

    def read(self, content: bytes, asked: RecordIdentity) -> bytes | None:
        """Return the payload that a rank gets of a record with this content; None: a miss."""
        # What an earlier one has left behind it is another record's, as in a store's file.
        os.pwrite(self._file, content, 0)
        place = BlockPlace(name="file", offset=0, size_bytes=len(content))
        folder = NamespaceFolder(asked.namespace, asked.rank, asked.world_size, self._folder)
        reader = RecordReader(folder, _allocate)
        try:
            return bytes(reader.read(place, asked.hash, "block", asked.tokens).payload)
        except RecordUnreadable:
            return None
        finally:
            reader.close()

    def close(self) -> None:
        os.close(self._file)


@pytest.mark.proof
def test_nothing_wrong_is_ever_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every damaged record is refused, or is what was asked for to the last byte."""
    # So that most records here are read in several pieces.
    monkeypatch.setattr(record_files, "PIECE_BYTES", 50)
    chance = random.Random(SEED)
    stock = _stock()
    identities = list(stock)
    file = _File(tmp_path)
    served = wrong = 0
    for number in range(TRIES):
        asked, another = chance.choice(identities), chance.choice(identities)
        damage = (_flip, _tear, _swap, _rename)[number % 4]
        data = damage(chance, stock[asked], stock[another])
        payload = file.read(data, asked)
        if payload is None:
            continue
        served += 1
        right = payload_of(asked.hash, len(stock[asked]) - HEADER_BYTES)
        wrong += payload != right or data != stock[asked]
    file.close()

    assert wrong == 0
    assert 0 < served < TRIES / 10, "some damage changes nothing, and only that passes"
