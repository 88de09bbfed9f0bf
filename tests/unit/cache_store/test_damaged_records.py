"""100,000 damaged records (flipped, torn, swapped, renamed), read by the ranks' own reader."""

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


def _records() -> dict[RecordIdentity, bytes]:
    """Return the records of ten blocks in each of four folders, with four payload lengths."""
    identities = [
        identity_of(folder, block_hash(number)) for folder in _FOLDERS for number in range(10)
    ]
    return {
        identity: record_of(identity, _SIZES[place % len(_SIZES)])
        for place, identity in enumerate(identities)
    }


def _flip(rng: random.Random, data: bytes, other: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8, 64))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _tear(rng: random.Random, data: bytes, other: bytes) -> bytes:
    cut = rng.randrange(len(data) + 1)
    tail = rng.choice((b"", bytes(len(data) - cut), data[: len(data) - cut], bytes(4_096)))
    return data[:cut] + tail


def _swap(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Replace a part of this record by a part of another one."""
    if rng.random() < 0.5:
        return data[:HEADER_BYTES] + other[HEADER_BYTES:]
    first, last = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return data[:first] + other[first:last] + data[last:]


def _rename(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Replace the record by another one, or start it at a wrong offset."""
    if rng.random() < 0.5:
        return other
    both = other + data
    start = rng.randrange(len(other) + 1)
    return both[start : start + len(data)]


def _allocate(size_bytes: int) -> tuple[memoryview, bytearray]:
    """Return memory with other content, in place of MLX."""
    memory = bytearray(b"\xaa" * size_bytes)
    return memoryview(memory), memory


class _RecordFile:
    """One file whose content is replaced for each try, and a rank's reader of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = os.open(folder / "file", os.O_RDWR | os.O_CREAT)

    def read(self, content: bytes, expected: RecordIdentity) -> bytes | None:
        """Write `content` and return the payload that a rank reads, or None for a miss."""
        # The rest of an earlier, longer content stays behind it, as in a file with more records.
        os.pwrite(self._file, content, 0)
        place = BlockPlace(name="file", offset=0, size_bytes=len(content))
        folder = NamespaceFolder(
            expected.namespace, expected.rank, expected.world_size, self._folder
        )
        reader = RecordReader(folder, _allocate)
        try:
            return bytes(reader.read(place, expected.hash, "block", expected.tokens).payload)
        except RecordUnreadable:
            return None
        finally:
            reader.close()

    def close(self) -> None:
        os.close(self._file)


@pytest.mark.proof
def test_reader_refuses_every_block_record_whose_bytes_were_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged record is refused, unless the damage changed no byte."""
    # Small enough that most records are read in several pieces.
    monkeypatch.setattr(record_files, "PIECE_BYTES", 50)
    rng = random.Random(SEED)
    records = _records()
    identities = list(records)
    file = _RecordFile(tmp_path)
    served = wrong = 0
    for number in range(TRIES):
        expected, other = rng.choice(identities), rng.choice(identities)
        damage = (_flip, _tear, _swap, _rename)[number % 4]
        data = damage(rng, records[expected], records[other])
        payload = file.read(data, expected)
        if payload is None:
            continue
        served += 1
        payload_expected = payload_of(expected.hash, len(records[expected]) - HEADER_BYTES)
        wrong += payload != payload_expected or data != records[expected]
    file.close()

    assert wrong == 0
    assert 0 < served < TRIES / 10, "some damage changes nothing, and only that passes"
