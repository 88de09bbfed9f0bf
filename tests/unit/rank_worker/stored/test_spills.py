"""Spills: into files, to the store, reported once, whatever disk and store do."""

import random
import resource
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from services.rank_worker.kv_cache.blocks.items import SpillItem
from services.rank_worker.kv_cache.stored import record_files, spill_queue
from services.rank_worker.kv_cache.stored.record_files import NamespaceFolder
from shared.block_record import HEADER_BYTES
from shared.messages import BlocksSpilled, CommitBlocks, OpenNamespace, SpillFailed, SpillOrder
from tests.unit.rank_worker.stored.scripted_store import ScriptedStore, until
from tests.unit.rank_worker.stored.stored_rank import (
    MIB,
    NAMESPACE,
    Rank,
    block_hash,
    blocks,
    partial_files,
    payload,
    spilled,
)


class HungWrites:
    """Writes that wait until they are let go, as on a disk that hangs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.begun: list[list[bytes]] = []
        self._write: Callable[..., Any] = record_files.write
        monkeypatch.setattr(record_files, "write", self._wait)

    def _wait(self, path: Path, folder: NamespaceFolder, items: Sequence[SpillItem]) -> Any:
        self.begun.append([item.hash for item in items])
        assert self.go.wait(30.0)
        return self._write(path, folder, items)


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[HungWrites]:
    made = HungWrites(monkeypatch)
    yield made
    made.go.set()


def test_blocks_of_one_order_share_a_file_and_are_reported_when_committed(
    store: ScriptedStore,
) -> None:
    """One order of small blocks is one file, one commit and one report with its size and time."""
    rank = Rank(store.address)
    items = [spilled(block_hash(number)) for number in range(5)]
    rank.spill(*items, evict_first=[block_hash(99)])
    until(lambda: len(rank.stored) == 5)

    (opened,) = store.of(OpenNamespace)
    (commit,) = store.of(CommitBlocks)
    (report,) = rank.of(BlocksSpilled)
    assert (opened.namespace, opened.rank, opened.world_size) == (NAMESPACE, 1, 2)
    assert commit.name.startswith("partial-")
    assert commit.evict_first == [block_hash(99)]
    assert report.stored == [item.hash for item in items]
    assert report.lost == []
    assert report.bytes_written == report.store_bytes == 5 * (HEADER_BYTES + 4_096)
    assert (report.epoch, report.rank) == (3, 1)
    assert report.write_ms > 0.0
    assert partial_files(store) == []


def test_a_file_holds_at_most_its_bound_or_one_block(
    store: ScriptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orders are cut where a file would get too long; a block that is longer stands alone."""
    monkeypatch.setattr(spill_queue, "FILE_BYTES_MAX", 3_000)
    rank = Rank(store.address)
    sizes = [1_000, 1_000, 1_000, 1_000, 9_000, 1_000]
    rank.spill(*(spilled(block_hash(n), size) for n, size in enumerate(sizes)))
    rank.spill(spilled(block_hash(6), 1_000))
    until(lambda: len(rank.stored) == 7)

    assert [len(one.records) for one in store.of(CommitBlocks)] == [3, 1, 1, 1, 1]


@pytest.mark.parametrize("size_bytes", [1, 3_000, 17 * MIB])
def test_what_was_written_is_what_was_handed_over(store: ScriptedStore, size_bytes: int) -> None:
    """Records lie behind each other, each its header and then its payload to the byte."""
    rank = Rank(store.address)
    rank.store(range(2), size_bytes)

    for number in range(2):
        place = store.places[block_hash(number)]
        data = (store.folder / place.name).read_bytes()
        record = data[place.offset : place.offset + place.size_bytes]
        assert record[HEADER_BYTES:] == payload(block_hash(number), size_bytes)


def test_files_belong_to_their_user(store: ScriptedStore) -> None:
    """Nobody else can read the KV of somebody's prompt."""
    rank = Rank(store.address)
    rank.store(range(1))

    path = store.folder / store.places[block_hash(0)].name
    assert path.stat().st_mode & 0o777 == 0o600


def test_without_a_store_everything_is_lost_at_once(tmp_path: Path) -> None:
    """Nobody listens: the order is answered, nothing waits for better times."""
    rank = Rank(ScriptedStore(tmp_path).address, connects=False)
    rank.spill(spilled(block_hash(0)), spilled(block_hash(1)))
    until(lambda: len(rank.lost) == 2)


def test_a_tier_that_is_off_answers_and_does_nothing(store: ScriptedStore) -> None:
    """With the setting off no store is spoken to, and every hash is still reported."""
    rank = Rank(store.address, is_on=False)
    rank.spill(spilled(block_hash(0)))

    assert rank.lost == [block_hash(0)]
    assert store.heard == []


def test_a_hash_that_the_rank_does_not_hold_is_lost(store: ScriptedStore) -> None:
    """What an order names and nobody hands over is reported too."""
    rank = Rank(store.address)
    order = SpillOrder(namespace=NAMESPACE, hashes=[block_hash(0), block_hash(1)])
    rank.tier.spill(order, [spilled(block_hash(1))])
    until(lambda: len(rank.reports()) == 2)

    assert (rank.stored, rank.lost) == ([block_hash(1)], [block_hash(0)])


def test_past_the_bound_the_oldest_are_given_up(store: ScriptedStore, hung: HungWrites) -> None:
    """While the disk is slow, memory stays bounded, and what is dropped was there longest."""
    rank = Rank(store.address, spill_bytes_max=MIB)
    for number in range(10):
        rank.spill(spilled(block_hash(number), 256 * 1024))
        until(lambda: bool(hung.begun))
    until(lambda: len(rank.lost) == 6)
    hung.go.set()
    until(lambda: len(rank.stored) == 4)

    # The first is being written and counts; behind it there is room for three.
    assert rank.lost == [block_hash(number) for number in range(1, 7)]
    assert rank.stored == [block_hash(number) for number in (0, 7, 8, 9)]


def test_a_block_larger_than_the_bound_costs_no_other(store: ScriptedStore) -> None:
    """It is lost by itself."""
    rank = Rank(store.address, spill_bytes_max=MIB)
    rank.spill(spilled(block_hash(0)), spilled(block_hash(1), 2 * MIB), spilled(block_hash(2)))
    until(lambda: len(rank.reports()) == 3)

    assert rank.lost == [block_hash(1)]


def test_a_disk_that_takes_a_part_loses_the_file_and_says_so(store: ScriptedStore) -> None:
    """A short write without an error, then an error: nothing stays behind, the store is told."""
    rank = Rank(store.address)
    rank.store(range(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, before[1]))
    try:
        rank.spill(spilled(block_hash(1), 600_000), spilled(block_hash(2), 600_000))
        until(lambda: len(rank.lost) == 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    until(lambda: len(store.of(SpillFailed)) == 1)

    assert "File too large" in store.of(SpillFailed)[0].detail
    assert partial_files(store) == []
    rank.store(range(3, 4))
    assert len(store.of(CommitBlocks)) == 2


def test_a_folder_that_is_gone_loses_the_file_and_says_so(store: ScriptedStore) -> None:
    """Deleted under the rank: lost, told, and good again when it is there again."""
    rank = Rank(store.address)
    rank.store(range(1))
    shutil.rmtree(store.folder)
    rank.spill(spilled(block_hash(1)))
    until(lambda: len(store.of(SpillFailed)) == 1)
    store.folder.mkdir()
    rank.store(range(2, 3))

    assert rank.lost == [block_hash(1)]


def test_a_refused_commit_is_lost(store: ScriptedStore) -> None:
    """What the store does not take over was not stored."""
    rank = Rank(store.address)
    store.refuses_commits = True
    rank.spill(spilled(block_hash(0)))
    until(lambda: rank.lost == [block_hash(0)])


def test_a_store_that_is_off_costs_nothing_and_comes_back(store: ScriptedStore) -> None:
    """While it is off everything is lost at once, without a file; afterwards it is stored."""
    rank = Rank(store.address)
    rank.store(range(1))
    store.switch(off=True)
    until(lambda: rank.store_is == "off")
    rank.spill(spilled(block_hash(1)))
    until(lambda: rank.lost == [block_hash(1)])
    store.switch(off=False)
    until(lambda: rank.store_is == "on")
    rank.store(range(2, 3))

    assert len(store.of(CommitBlocks)) == 2
    assert partial_files(store) == []


def test_what_is_queued_when_the_store_goes_off_is_lost(
    store: ScriptedStore, hung: HungWrites
) -> None:
    """Queued blocks are given up at once, the file being written when it is done."""
    rank = Rank(store.address)
    rank.spill(spilled(block_hash(0)))
    until(lambda: bool(hung.begun))
    rank.spill(spilled(block_hash(1)))
    store.switch(off=True)
    until(lambda: rank.lost == [block_hash(1)])
    hung.go.set()
    until(lambda: rank.lost == [block_hash(1), block_hash(0)])
    until(lambda: partial_files(store) == [])

    assert store.of(CommitBlocks) == []


@pytest.mark.parametrize("with_goodbye", [True, False])
def test_a_store_killed_during_a_write_loses_it_and_the_next_one_goes_on(
    store: ScriptedStore, hung: HungWrites, *, with_goodbye: bool
) -> None:
    """Everything outstanding is lost once, the file is deleted, and the next store is used."""
    rank = Rank(store.address)
    rank.spill(spilled(block_hash(0)))
    until(lambda: bool(hung.begun))
    rank.spill(spilled(block_hash(1)))
    store.kill(with_goodbye=with_goodbye)
    store.start()
    until(lambda: len(rank.lost) == 2)
    hung.go.set()
    until(lambda: rank.store_is == "on")
    until(lambda: not rank.is_writing)
    rank.store(range(2, 3))
    until(lambda: partial_files(store) == [])

    assert set(rank.reports().values()) == {1}
    assert len(store.of(OpenNamespace)) == 2


def test_a_store_killed_before_it_answers_a_commit_loses_it(store: ScriptedStore) -> None:
    """Nobody knows what became of the file, so it is lost, and deleted if it is still there."""
    rank = Rank(store.address)
    rank.store(range(1))
    store.is_mute = True
    rank.spill(spilled(block_hash(1)))
    until(lambda: len(store.of(CommitBlocks)) == 2)
    assert len(partial_files(store)) == 1
    store.kill()
    store.is_mute = False
    store.start()
    until(lambda: rank.lost == [block_hash(1)])
    until(lambda: partial_files(store) == [])


def test_a_write_that_hangs_is_given_up_with_all_behind_it(
    store: ScriptedStore, hung: HungWrites, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that hangs costs the spills, each reported; when it is back, spilling goes on."""
    monkeypatch.setattr(spill_queue, "WRITE_S", 0.2)
    rank = Rank(store.address)
    rank.spill(spilled(block_hash(0)))
    until(lambda: bool(hung.begun))
    rank.spill(spilled(block_hash(1)))
    until(lambda: rank.lost == [block_hash(0), block_hash(1)])
    rank.spill(spilled(block_hash(2)))
    until(lambda: rank.lost[2:] == [block_hash(2)])
    hung.go.set()
    until(lambda: not rank.is_writing)
    rank.store(range(3, 4))
    until(lambda: partial_files(store) == [])

    assert set(rank.reports().values()) == {1}


def test_another_namespace_is_opened_and_the_old_one_s_blocks_are_lost(
    store: ScriptedStore, hung: HungWrites
) -> None:
    """Blocks never get into a folder of another namespace."""
    rank = Rank(store.address)
    rank.spill(spilled(block_hash(0)))
    until(lambda: bool(hung.begun))
    rank.spill(spilled(block_hash(1)))
    hung.go.set()
    other = SpillOrder(namespace="aa", hashes=[block_hash(2)])
    rank.tier.spill(other, [spilled(block_hash(2))])
    until(lambda: len(rank.reports()) == 3)

    assert block_hash(2) in rank.stored
    assert block_hash(1) in rank.lost
    assert store.folder.parent.name == "aa"
    assert set(rank.reports().values()) == {1}
    until(lambda: partial_files(store) == [])


def test_a_bug_of_the_tier_switches_it_off_and_ends_nothing(
    store: ScriptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that nobody foresaw: what is open is answered, and so is all that comes."""
    rank = Rank(store.address)
    rank.store(range(1))

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(spill_queue.SpillQueue, "write_next", fail)
    rank.spill(spilled(block_hash(1)))
    until(lambda: rank.lost == [block_hash(1)])
    rank.spill(spilled(block_hash(2)))
    until(lambda: rank.lost == [block_hash(1), block_hash(2)])

    assert rank.restore(blocks(range(1)), deadline_s=1_000.0).stopped_by == "off"


def test_every_hash_is_reported_once_under_load(store: ScriptedStore) -> None:
    """Random orders while the store is killed, refuses, switches off and the folder goes."""
    draw = random.Random(7)
    rank = Rank(store.address, spill_bytes_max=MIB)
    number = 0
    for _ in range(150):
        count = draw.randint(1, 20)
        sizes = [draw.choice((100, 30_000, 200_000)) for _ in range(count)]
        rank.spill(*(spilled(block_hash(number + n), size) for n, size in enumerate(sizes)))
        number += count
        _trouble(store, draw)
    store.refuses_commits = False
    until(lambda: len(rank.reports()) == number, 30.0)

    assert set(rank.reports().values()) == {1}
    assert rank.stored
    assert rank.lost
    for one in rank.stored:
        assert one in store.places


def _trouble(store: ScriptedStore, draw: random.Random) -> None:
    match draw.randint(0, 19):
        case 0:
            store.kill(with_goodbye=draw.random() < 0.5)
            store.start()
        case 1:
            store.refuses_commits = not store.refuses_commits
        case 2 if store.of(OpenNamespace):
            store.switch(off=not store.is_off)
        case 3:
            shutil.rmtree(store.folder, ignore_errors=True)
            store.folder.mkdir(parents=True, exist_ok=True)
        case _:
            threading.Event().wait(draw.random() * 0.005)
