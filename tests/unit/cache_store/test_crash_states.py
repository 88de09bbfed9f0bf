"""Every state that a crash can leave of three writes.

Nothing is ever synced: any part of a file's data may be missing or hold another file's data, and
its final name may exist before its data, or never. The store opens every state, and the ranks' own
check reads it.
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

Damage = Callable[[bytes, bytes], bytes]

_DAMAGES: dict[str, Damage] = {
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
"""File contents after a crash, made from the file's own data and another write's data."""

FileState = tuple[str, str] | None
_STATES: tuple[FileState, ...] = (None, *itertools.product(("partial", "final"), _DAMAGES))
"""Of one write: nothing, or any damage under either name."""


class CrashedFolder:
    """One rank's folder, filled with one crash state after another by linking prepared files."""

    def __init__(self, root: Path, prepared: Path) -> None:
        self._folder = root / KEY.path
        self._folder.mkdir(parents=True)
        self._prepared = prepared
        prepared.mkdir()
        records = {n: record_of(identity_of(KEY, block_hash(n))) for w in WRITES for n in w}
        data = [b"".join(records[number] for number in write) for write in WRITES]
        for number, damage in itertools.product(range(len(WRITES)), _DAMAGES):
            content = _DAMAGES[damage](data[number], data[(number + 1) % len(data)])
            (prepared / f"{number} {damage}").write_bytes(content)

    def write_state(self, state: tuple[FileState, ...]) -> None:
        """Replace the folder's content by the files of one state."""
        for path in self._folder.iterdir():
            path.unlink()
        for number, file_state in enumerate(state):
            if file_state is None:
                continue
            place, damage = file_state
            final = next(file_names.file_names(block_hash(WRITES[number][0])))
            name = final if place == "final" else f"partial-{number}"
            os.link(self._prepared / f"{number} {damage}", self._folder / name)


def _served(rank: Rank) -> dict[int, bytes]:
    """Return every located block whose record passes the rank's check."""
    numbers = (1, 2, 3, 4)
    _, places = rank.locate(*numbers)
    found = {}
    for number, place in zip(numbers, places, strict=True):
        payload = rank.read(place, block_hash(number)) if place is not None else None
        if payload is not None:
            found[number] = payload
    return found


def _expected_blocks(state: tuple[FileState, ...]) -> set[int]:
    """Return the blocks of all files that are whole and have their final names."""
    return {
        number
        for write, file_state in zip(WRITES, state, strict=True)
        if file_state == ("final", "whole")
        for number in write
    }


@pytest.mark.proof
def test_restarted_cache_store_serves_no_wrong_block_after_any_simulated_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In all 12,167 states that a crash may leave, no wrong block is served, and no block of a
    whole file is missed."""
    monkeypatch.setattr(directory, "_PROBE_BYTES", 1)
    root = tmp_path / "blocks"
    folder = CrashedFolder(root, tmp_path / "prepared")
    root.chmod(0o700)
    states = list(itertools.product(_STATES, repeat=len(WRITES)))
    served = wrong = missed = 0
    for state in states:
        folder.write_state(state)
        store = Store(root)
        found = _served(Rank(store))
        store.close()
        served += len(found)
        wrong += sum(payload != payload_of(block_hash(n)) for n, payload in found.items())
        missed += len(_expected_blocks(state) - set(found))

    assert len(states) >= 10_000
    assert (wrong, missed) == (0, 0)
    assert served > len(states) / 4
