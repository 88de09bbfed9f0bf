"""Spills: files, commits, one report per hash, and faults of disk and store."""

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
from tests.support.waiting import wait_until
from tests.unit.rank_worker.stored.scripted_store import ScriptedStore
from tests.unit.rank_worker.stored.stored_rank import (
    MIB,
    NAMESPACE,
    Rank,
    block_hash,
    partial_files,
    payload,
    restore_items,
    spill_item,
)


class HangingWrites:
    """Writes that block, as on a hanging disk, until `go_on` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on = threading.Event()
        self.started: list[list[bytes]] = []
        self._write: Callable[..., Any] = record_files.write
        monkeypatch.setattr(record_files, "write", self._wait)

    def _wait(self, path: Path, folder: NamespaceFolder, items: Sequence[SpillItem]) -> Any:
        self.started.append([item.hash for item in items])
        assert self.go_on.wait(30.0)
        return self._write(path, folder, items)


@pytest.fixture
def hanging_writes(monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingWrites]:
    """Make all spill writes hang until the test releases them."""
    made = HangingWrites(monkeypatch)
    yield made
    made.go_on.set()


def test_small_blocks_of_one_spill_order_share_file_and_commit(
    store: ScriptedStore,
) -> None:
    """Small blocks of one order become one file, one commit, and one report of size and time."""
    rank = Rank(store.address)
    items = [spill_item(block_hash(number)) for number in range(5)]
    rank.spill(*items, evict_first=[block_hash(99)])
    wait_until(lambda: len(rank.stored) == 5)

    (opened,) = store.messages_of(OpenNamespace)
    (commit,) = store.messages_of(CommitBlocks)
    (report,) = rank.messages_of(BlocksSpilled)
    assert (opened.namespace, opened.rank, opened.world_size) == (NAMESPACE, 1, 2)
    assert commit.name.startswith("partial-")
    assert commit.evict_first == [block_hash(99)]
    assert report.stored == [item.hash for item in items]
    assert report.lost == []
    assert report.bytes_written == report.store_bytes == 5 * (HEADER_BYTES + 4_096)
    assert (report.epoch, report.rank) == (3, 1)
    assert report.write_ms > 0.0
    assert partial_files(store) == []


def test_spill_order_is_split_into_files_at_size_limit(
    store: ScriptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An order is split at the file limit; a block over the limit has a file of its own."""
    monkeypatch.setattr(spill_queue, "FILE_BYTES_MAX", 3_000)
    rank = Rank(store.address)
    sizes = [1_000, 1_000, 1_000, 1_000, 9_000, 1_000]
    rank.spill(*(spill_item(block_hash(n), size) for n, size in enumerate(sizes)))
    rank.spill(spill_item(block_hash(6), 1_000))
    wait_until(lambda: len(rank.stored) == 7)

    assert [len(one.records) for one in store.messages_of(CommitBlocks)] == [3, 1, 1, 1, 1]


@pytest.mark.parametrize("size_bytes", [1, 3_000, 17 * MIB])
def test_spill_file_contains_record_headers_and_payloads_byte_for_byte(
    store: ScriptedStore, size_bytes: int
) -> None:
    """The file contains each record's header and payload, one after the other."""
    rank = Rank(store.address)
    rank.store(range(2), size_bytes)

    for number in range(2):
        place = store.places[block_hash(number)]
        data = (store.folder / place.name).read_bytes()
        record = data[place.offset : place.offset + place.size_bytes]
        assert record[HEADER_BYTES:] == payload(block_hash(number), size_bytes)


def test_spill_files_have_mode_0600(store: ScriptedStore) -> None:
    """Other users cannot read the KV of a prompt."""
    rank = Rank(store.address)
    rank.store(range(1))

    path = store.folder / store.places[block_hash(0)].name
    assert path.stat().st_mode & 0o777 == 0o600


def test_spill_is_reported_lost_at_once_when_no_store_runs(tmp_path: Path) -> None:
    """Without a store process a spill is reported as lost at once."""
    rank = Rank(ScriptedStore(tmp_path).address, connects=False)
    rank.spill(spill_item(block_hash(0)), spill_item(block_hash(1)))
    wait_until(lambda: len(rank.lost) == 2)


def test_spilled_blocks_are_reported_lost_with_ssd_cache_off(store: ScriptedStore) -> None:
    """With the SSD cache off nothing is sent to the store and each hash is reported as lost."""
    rank = Rank(store.address, is_on=False)
    rank.spill(spill_item(block_hash(0)))

    assert rank.lost == [block_hash(0)]
    assert store.messages == []


def test_spill_order_naming_hash_without_block_reports_it_lost(store: ScriptedStore) -> None:
    """A hash that the spill order names without a block is reported as lost."""
    rank = Rank(store.address)
    order = SpillOrder(namespace=NAMESPACE, hashes=[block_hash(0), block_hash(1)])
    rank.tier.spill(order, [spill_item(block_hash(1))])
    wait_until(lambda: len(rank.report_counts()) == 2)

    assert (rank.stored, rank.lost) == ([block_hash(1)], [block_hash(0)])


def test_oldest_queued_spills_are_dropped_at_memory_limit(
    store: ScriptedStore, hanging_writes: HangingWrites
) -> None:
    """While the disk is slow, the oldest queued blocks are dropped at the memory limit."""
    rank = Rank(store.address, spill_bytes_max=MIB)
    for number in range(10):
        rank.spill(spill_item(block_hash(number), 256 * 1024))
        wait_until(lambda: bool(hanging_writes.started))
    wait_until(lambda: len(rank.lost) == 6)
    hanging_writes.go_on.set()
    wait_until(lambda: len(rank.stored) == 4)

    # The block being written counts too, which leaves room for three more.
    assert rank.lost == [block_hash(number) for number in range(1, 7)]
    assert rank.stored == [block_hash(number) for number in (0, 7, 8, 9)]


def test_only_block_above_memory_limit_is_lost_from_spill_order(store: ScriptedStore) -> None:
    """A block larger than the memory limit is lost; the others are stored."""
    rank = Rank(store.address, spill_bytes_max=MIB)
    rank.spill(
        spill_item(block_hash(0)), spill_item(block_hash(1), 2 * MIB), spill_item(block_hash(2))
    )
    wait_until(lambda: len(rank.report_counts()) == 3)

    assert rank.lost == [block_hash(1)]


def test_short_write_deletes_spill_file_and_notifies_store(store: ScriptedStore) -> None:
    """After a short write the file is deleted, its blocks are lost, and the store is told."""
    rank = Rank(store.address)
    rank.store(range(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, before[1]))
    try:
        rank.spill(spill_item(block_hash(1), 600_000), spill_item(block_hash(2), 600_000))
        wait_until(lambda: len(rank.lost) == 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    wait_until(lambda: len(store.messages_of(SpillFailed)) == 1)

    assert "File too large" in store.messages_of(SpillFailed)[0].detail
    assert partial_files(store) == []
    rank.store(range(3, 4))
    assert len(store.messages_of(CommitBlocks)) == 2


def test_spill_into_deleted_folder_is_lost_and_store_is_notified(store: ScriptedStore) -> None:
    """A write into a deleted folder is lost and the store is told; later writes succeed."""
    rank = Rank(store.address)
    rank.store(range(1))
    shutil.rmtree(store.folder)
    rank.spill(spill_item(block_hash(1)))
    wait_until(lambda: len(store.messages_of(SpillFailed)) == 1)
    store.folder.mkdir()
    rank.store(range(2, 3))

    assert rank.lost == [block_hash(1)]


def test_blocks_of_refused_commit_are_reported_lost(store: ScriptedStore) -> None:
    """Blocks of a refused commit are reported as lost."""
    rank = Rank(store.address)
    store.refuses_commits = True
    rank.spill(spill_item(block_hash(0)))
    wait_until(lambda: rank.lost == [block_hash(0)])


def test_spill_is_lost_without_writing_file_while_store_is_off(store: ScriptedStore) -> None:
    """While the store is off spills are lost without writing; afterwards they are stored."""
    rank = Rank(store.address)
    rank.store(range(1))
    store.switch(off=True)
    wait_until(lambda: rank.store_state == "off")
    rank.spill(spill_item(block_hash(1)))
    wait_until(lambda: rank.lost == [block_hash(1)])
    store.switch(off=False)
    wait_until(lambda: rank.store_state == "on")
    rank.store(range(2, 3))

    assert len(store.messages_of(CommitBlocks)) == 2
    assert partial_files(store) == []


def test_queued_spills_are_lost_at_once_when_store_switches_off(
    store: ScriptedStore, hanging_writes: HangingWrites
) -> None:
    """Queued blocks are lost at once, and the block being written when its write ends."""
    rank = Rank(store.address)
    rank.spill(spill_item(block_hash(0)))
    wait_until(lambda: bool(hanging_writes.started))
    rank.spill(spill_item(block_hash(1)))
    store.switch(off=True)
    wait_until(lambda: rank.lost == [block_hash(1)])
    hanging_writes.go_on.set()
    wait_until(lambda: rank.lost == [block_hash(1), block_hash(0)])
    wait_until(lambda: partial_files(store) == [])

    assert store.messages_of(CommitBlocks) == []


@pytest.mark.parametrize("with_goodbye", [True, False])
def test_open_spills_are_lost_when_store_is_killed_during_write(
    store: ScriptedStore, hanging_writes: HangingWrites, *, with_goodbye: bool
) -> None:
    """Open spills are lost once, their file is deleted, and the next store is used."""
    rank = Rank(store.address)
    rank.spill(spill_item(block_hash(0)))
    wait_until(lambda: bool(hanging_writes.started))
    rank.spill(spill_item(block_hash(1)))
    store.kill(with_goodbye=with_goodbye)
    store.start()
    wait_until(lambda: len(rank.lost) == 2)
    hanging_writes.go_on.set()
    wait_until(lambda: rank.store_state == "on")
    wait_until(lambda: not rank.is_writing)
    rank.store(range(2, 3))
    wait_until(lambda: partial_files(store) == [])

    assert set(rank.report_counts().values()) == {1}
    assert len(store.messages_of(OpenNamespace)) == 2


def test_spill_file_is_deleted_when_store_dies_before_commit_answer(store: ScriptedStore) -> None:
    """A commit without an answer is lost, and its file is deleted if it still exists."""
    rank = Rank(store.address)
    rank.store(range(1))
    store.is_mute = True
    rank.spill(spill_item(block_hash(1)))
    wait_until(lambda: len(store.messages_of(CommitBlocks)) == 2)
    assert len(partial_files(store)) == 1
    store.kill()
    store.is_mute = False
    store.start()
    wait_until(lambda: rank.lost == [block_hash(1)])
    wait_until(lambda: partial_files(store) == [])


def test_hanging_write_loses_queued_spills_but_no_later_ones(
    store: ScriptedStore, hanging_writes: HangingWrites, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hanging write loses the queued spills, each reported once; later spills are stored."""
    monkeypatch.setattr(spill_queue, "WRITE_S", 0.2)
    rank = Rank(store.address)
    rank.spill(spill_item(block_hash(0)))
    wait_until(lambda: bool(hanging_writes.started))
    rank.spill(spill_item(block_hash(1)))
    wait_until(lambda: rank.lost == [block_hash(0), block_hash(1)])
    rank.spill(spill_item(block_hash(2)))
    wait_until(lambda: rank.lost[2:] == [block_hash(2)])
    hanging_writes.go_on.set()
    wait_until(lambda: not rank.is_writing)
    rank.store(range(3, 4))
    wait_until(lambda: partial_files(store) == [])

    assert set(rank.report_counts().values()) == {1}


def test_queued_blocks_of_old_namespace_are_lost_after_namespace_change(
    store: ScriptedStore, hanging_writes: HangingWrites
) -> None:
    """Queued blocks are not written into the folder of another namespace."""
    rank = Rank(store.address)
    rank.spill(spill_item(block_hash(0)))
    wait_until(lambda: bool(hanging_writes.started))
    rank.spill(spill_item(block_hash(1)))
    hanging_writes.go_on.set()
    other = SpillOrder(namespace="aa", hashes=[block_hash(2)])
    rank.tier.spill(other, [spill_item(block_hash(2))])
    wait_until(lambda: len(rank.report_counts()) == 3)

    assert block_hash(2) in rank.stored
    assert block_hash(1) in rank.lost
    assert store.folder.parent.name == "aa"
    assert set(rank.report_counts().values()) == {1}
    wait_until(lambda: partial_files(store) == [])


def test_unexpected_error_makes_open_and_later_spills_lost_and_restores_off(
    store: ScriptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an unexpected error open and later spills are lost, and restores return the cause
    `off`.
    """
    rank = Rank(store.address)
    rank.store(range(1))

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(spill_queue.SpillQueue, "write_next", fail)
    rank.spill(spill_item(block_hash(1)))
    wait_until(lambda: rank.lost == [block_hash(1)])
    rank.spill(spill_item(block_hash(2)))
    wait_until(lambda: rank.lost == [block_hash(1), block_hash(2)])

    assert rank.restore(restore_items(range(1)), deadline_s=1_000.0).stopped_by == "off"


def test_each_spilled_hash_is_reported_once_under_random_store_faults(store: ScriptedStore) -> None:
    """Each hash is reported once while the store is killed, refuses, is off or loses its folder."""
    rng = random.Random(7)
    rank = Rank(store.address, spill_bytes_max=MIB)
    number = 0
    for _ in range(150):
        count = rng.randint(1, 20)
        sizes = [rng.choice((100, 30_000, 200_000)) for _ in range(count)]
        rank.spill(*(spill_item(block_hash(number + n), size) for n, size in enumerate(sizes)))
        number += count
        _cause_fault(store, rng)
    store.refuses_commits = False
    wait_until(lambda: len(rank.report_counts()) == number, 30.0)

    assert set(rank.report_counts().values()) == {1}
    assert rank.stored
    assert rank.lost
    for one in rank.stored:
        assert one in store.places


def _cause_fault(store: ScriptedStore, rng: random.Random) -> None:
    match rng.randint(0, 19):
        case 0:
            store.kill(with_goodbye=rng.random() < 0.5)
            store.start()
        case 1:
            store.refuses_commits = not store.refuses_commits
        case 2 if store.messages_of(OpenNamespace):
            store.switch(off=not store.is_off)
        case 3:
            shutil.rmtree(store.folder, ignore_errors=True)
            store.folder.mkdir(parents=True, exist_ok=True)
        case _:
            threading.Event().wait(rng.random() * 0.005)
