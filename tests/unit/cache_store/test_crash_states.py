"""No state that a crash can leave serves wrong bytes: all states of three writes, enumerated.

Nothing is ever synced, so of each file any part of its data may be missing or another file's, and
its new name may have come before its data, or never. The store's own code opens every state, the
ranks' own check reads it.
"""

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from services.cache_store import file_names
from services.cache_store.file_names import FolderKey
from services.cache_store.files import directory
from shared.block_record import HEADER_BYTES
from tests.unit.cache_store.harness import (
    NAMESPACE,
    RECORD_BYTES,
    Rank,
    Store,
    block_hash,
    identity_of,
    payload_of,
    record_of,
)

WRITES = ((1, 2), (3,), (2, 4))
"""Blocks of each write; block 2 is written twice."""

KEY = FolderKey(NAMESPACE, 0, 1)

Shape = Callable[[bytes, bytes], bytes]

_SHAPES: dict[str, Shape] = {
    "whole": lambda data, _: data,
    "empty": lambda _data, _: b"",
    "half": lambda data, _: data[: len(data) // 2],
    "header": lambda data, _: data[:HEADER_BYTES],
    "one record": lambda data, _: data[:RECORD_BYTES],
    "one byte less": lambda data, _: data[:-1],
    "zeros": lambda data, _: bytes(len(data)),
    "zeros behind": lambda data, _: (
        data[: HEADER_BYTES + 50] + bytes(len(data) - HEADER_BYTES - 50)
    ),
    "zeros before": lambda data, _: bytes(HEADER_BYTES // 2) + data[HEADER_BYTES // 2 :],
    "another's": lambda _, other: other,
    "another's behind": lambda data, other: data[:HEADER_BYTES] + other[HEADER_BYTES:],
}
"""What may be on the disk of a file's data, given another write's data."""

Left = tuple[str, str] | None
_STATES: tuple[Left, ...] = (None, *itertools.product(("partial", "final"), _SHAPES))
"""Of one write: nothing, or any shape under either name."""


class CrashedFolder:
    """One rank's folder, made to look like state after state. Files are links to prepared ones."""

    def __init__(self, root: Path, stock: Path) -> None:
        self._folder = root / KEY.path
        self._folder.mkdir(parents=True)
        self._stock = stock
        stock.mkdir()
        records = {n: record_of(identity_of(KEY, block_hash(n))) for w in WRITES for n in w}
        data = [b"".join(records[number] for number in write) for write in WRITES]
        for number, shape in itertools.product(range(len(WRITES)), _SHAPES):
            content = _SHAPES[shape](data[number], data[(number + 1) % len(data)])
            (stock / f"{number} {shape}").write_bytes(content)

    def lay(self, state: tuple[Left, ...]) -> None:
        """Put the files of one state into the folder, and nothing else."""
        for path in self._folder.iterdir():
            path.unlink()
        for number, left in enumerate(state):
            if left is None:
                continue
            place, shape = left
            final = next(file_names.file_names(block_hash(WRITES[number][0])))
            name = final if place == "final" else f"partial-{number}"
            os.link(self._stock / f"{number} {shape}", self._folder / name)


def _served(rank: Rank) -> dict[int, bytes]:
    """Return every block that the store locates and the rank's check lets pass."""
    numbers = (1, 2, 3, 4)
    _, places = rank.locate(*numbers)
    found = {}
    for number, place in zip(numbers, places, strict=True):
        payload = rank.read(place, block_hash(number)) if place is not None else None
        if payload is not None:
            found[number] = payload
    return found


def _must_be_served(state: tuple[Left, ...]) -> set[int]:
    """Return the blocks of the files that are whole and have their final names."""
    return {
        number
        for write, left in zip(WRITES, state, strict=True)
        if left == ("final", "whole")
        for number in write
    }


@pytest.mark.proof
def test_no_crash_state_serves_wrong_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 12,167 states: 0 blocks wrong, and none missed of a file that is whole."""
    monkeypatch.setattr(directory, "_PROBE_BYTES", 1)
    root = tmp_path / "blocks"
    folder = CrashedFolder(root, tmp_path / "stock")
    root.chmod(0o700)
    states = list(itertools.product(_STATES, repeat=len(WRITES)))
    served = wrong = missed = 0
    for state in states:
        folder.lay(state)
        store = Store(root)
        found = _served(Rank(store))
        store.close()
        served += len(found)
        wrong += sum(payload != payload_of(block_hash(n)) for n, payload in found.items())
        missed += len(_must_be_served(state) - set(found))

    assert len(states) >= 10_000
    assert (wrong, missed) == (0, 0)
    assert served > len(states) / 4
