"""Eviction under the byte limit: order, pins, recency across restarts."""

import os
from pathlib import Path

from shared.messages import BlocksCommitted, CommitBlocks, QuarantineBlocks
from tests.unit.cache_store.conftest import MakeStore
from tests.unit.cache_store.harness import RECORD_BYTES, Rank, block_hash


def test_cache_store_evicts_least_recently_used_file_over_size_limit(make_store: MakeStore) -> None:
    """Over the limit the least recently used file is evicted; a locate counts as use."""
    rank = Rank(make_store(bytes_max=3 * RECORD_BYTES))
    for number in (1, 2, 3):
        rank.commit(number)
    rank.has(1)

    answer = rank.commit(4)

    assert (answer.accepted, answer.store_bytes) == (True, 3 * RECORD_BYTES)
    assert rank.has(1, 2, 3, 4) == [True, False, True, True]
    assert len(rank.store.files()) == 3
    report = rank.store.report()
    assert (report.bytes_used, report.bytes_max) == (3 * RECORD_BYTES, 3 * RECORD_BYTES)
    assert report.counters["evicted_files_total"] == 1
    assert report.counters["evicted_bytes_total"] == RECORD_BYTES


def test_last_blocks_of_prefix_are_evicted_before_its_first_blocks(make_store: MakeStore) -> None:
    """Of blocks located together the last ones are evicted first, because they need the others."""
    rank = Rank(make_store(bytes_max=3 * RECORD_BYTES))
    for number in (1, 2, 3):
        rank.commit(number)
    rank.has(1, 2, 3)

    rank.commit(4)

    assert rank.has(1, 2, 3) == [True, True, False]


def test_blocks_named_in_evict_first_are_evicted_in_given_order(make_store: MakeStore) -> None:
    """Blocks that the scheduler names are evicted in its order, before the least recently used."""
    rank = Rank(make_store(bytes_max=4 * RECORD_BYTES))
    for number in (1, 2, 3, 4):
        rank.commit(number)

    rank.commit(5, evict_first=(4, 2))
    assert rank.has(1, 2, 3, 4, 5) == [True, True, True, False, True]
    rank.commit(6, 7, evict_first=(99, 2))

    assert rank.has(2, 6, 7) == [False, True, True]
    assert rank.has(1, 3, 5).count(True) == 2, "one more had to go: the least recently used"


def test_blocks_named_in_evict_first_stay_while_cache_is_below_limit(make_store: MakeStore) -> None:
    """`evict_first` sets an order and deletes nothing while there is room."""
    rank = Rank(make_store())
    rank.commit(1)

    rank.commit(2, evict_first=(1,))

    assert rank.has(1, 2) == [True, True]


def test_block_file_stays_while_one_record_is_not_in_evict_first(make_store: MakeStore) -> None:
    """A file stays while one of its records is not named; using one record uses its file."""
    rank = Rank(make_store(bytes_max=4 * RECORD_BYTES))
    rank.commit(1, 2)
    rank.commit(3, 4)

    rank.commit(5, evict_first=(1, 3, 4))

    assert rank.has(1, 2, 3, 4, 5) == [True, True, False, False, True]
    rank = Rank(make_store(bytes_max=4 * RECORD_BYTES), "later")
    rank.commit(6)
    rank.has(1)
    rank.commit(7)
    assert rank.has(1, 2, 5) == [True, True, False], "using one record has used its file"


def test_located_block_is_not_evicted_before_its_release(make_store: MakeStore) -> None:
    """A located block stays until its release, even if it is the oldest and named first."""
    rank = Rank(make_store(bytes_max=2 * RECORD_BYTES))
    rank.commit(1)
    rank.commit(2)
    query_id, places = rank.locate(1)

    rank.commit(3, evict_first=(1,))
    assert rank.has(1, 2, 3) == [True, False, True]
    second, _ = rank.locate(3)
    refused = rank.commit(4)

    assert not refused.accepted
    assert "no room" in refused.detail
    assert places[0] is not None
    assert rank.read(places[0], block_hash(1)) is not None
    rank.release(query_id)
    assert rank.commit(4).accepted
    assert rank.has(1, 3, 4) == [False, True, True]
    rank.release(second)


def test_commit_of_file_larger_than_limit_is_refused_without_eviction(
    make_store: MakeStore,
) -> None:
    """A file larger than the limit is refused and deleted, and no other file is evicted."""
    rank = Rank(make_store(bytes_max=3 * RECORD_BYTES))
    rank.commit(1, 2)

    answer = rank.commit(3, 4, 5, 6)

    assert not answer.accepted
    assert rank.has(1, 2) == [True, True]
    assert len(list(Path(rank.folder).iterdir())) == 1


def test_located_blocks_can_be_evicted_after_their_session_ends(make_store: MakeStore) -> None:
    """A session that ended pins no files."""
    store = make_store(bytes_max=2 * RECORD_BYTES)
    lost = Rank(store, "lost")
    lost.commit(1, 2)
    lost.locate(1, 2)
    rank = Rank(store)
    assert not rank.commit(3).accepted

    lost.leave("silent")

    assert rank.commit(3).accepted


def test_block_file_is_not_evicted_until_all_queries_release_it(make_store: MakeStore) -> None:
    """A file located by two queries stays until both release it; reusing a query id replaces its
    pins."""
    store = make_store(bytes_max=RECORD_BYTES)
    rank, other = Rank(store), Rank(store, "other")
    rank.commit(1)
    first, _ = rank.locate(1)
    second, _ = other.locate(1)

    rank.release(first)
    assert not rank.commit(2).accepted
    other._queries = second - 1
    other.locate(7)

    assert rank.commit(2).accepted


def test_order_of_eviction_survives_restart_of_cache_store(make_store: MakeStore) -> None:
    """The order of use is read from the files after a restart."""
    rank = Rank(make_store())
    for number in range(6):
        rank.commit(number)
    rank.has(3, 0)

    rank = Rank(make_store(bytes_max=2 * RECORD_BYTES))

    assert rank.has(0, 1, 2, 3, 4, 5) == [True, False, False, True, False, False]
    rank = Rank(make_store(bytes_max=RECORD_BYTES))
    assert rank.has(3, 0) == [False, True], "3 was asked for after 0, as its continuation"


def test_eviction_order_uses_commit_time_and_not_write_time(make_store: MakeStore) -> None:
    """A file's last use is its commit, not the time at which its rank wrote it."""
    rank = Rank(make_store())
    rank.commit(1)
    name, records = rank.write(2)
    os.utime(Path(rank.folder) / name, (1.0, 1.0))
    assert rank.ask(CommitBlocks(name=name, records=records), BlocksCommitted).accepted

    rank = Rank(make_store(bytes_max=RECORD_BYTES))

    assert rank.has(1, 2) == [False, True]


def test_cache_store_started_with_lower_limit_evicts_down_to_it(make_store: MakeStore) -> None:
    """A store started with a lower limit evicts before it serves."""
    rank = Rank(make_store())
    for number in range(5):
        rank.commit(number)

    store = make_store(bytes_max=2 * RECORD_BYTES)

    assert len(store.files()) == 2
    assert store.report().bytes_used == 2 * RECORD_BYTES


def test_quarantined_files_are_evicted_before_any_valid_block(make_store: MakeStore) -> None:
    """Quarantined files count towards the limit and are evicted before any block."""
    rank = Rank(make_store(bytes_max=3 * RECORD_BYTES))
    for number in (1, 2, 3):
        rank.commit(number)
    rank.send(QuarantineBlocks(hashes=[block_hash(2)], cause="damaged"))
    assert rank.store.report().bytes_used == 3 * RECORD_BYTES

    rank.commit(4)

    assert list((rank.store.directory.path / "quarantine").iterdir()) == []
    assert rank.has(1, 3, 4) == [True, True, True]


def test_namespace_folder_is_deleted_when_its_last_file_is_evicted(make_store: MakeStore) -> None:
    """The folder of a namespace is deleted with its last file."""
    store = make_store(bytes_max=RECORD_BYTES)
    old = Rank(store, "old", namespace="cd" * 32)
    old.commit(1)
    folder = Path(old.folder)
    old.leave()
    assert folder.exists()

    Rank(store).commit(1)

    assert not folder.parent.exists()


def test_block_file_with_modification_time_in_future_is_located(make_store: MakeStore) -> None:
    """After the clock was set back, files with a future time are still located."""
    rank = Rank(make_store())
    rank.commit(1)
    (file,) = rank.store.files()
    os.utime(file, (4e9, 4e9))

    rank = Rank(make_store())

    assert rank.has(1) == [True]


def test_records_unused_for_their_time_to_live_are_deleted(make_store: MakeStore) -> None:
    """A locate counts as use; a record that a rank reads stays until the rank has released it."""
    rank = Rank(make_store(ttl_s=60.0))
    for number in (1, 2, 3):
        rank.commit(number)
    rank.store.advance_time(40.0)
    rank.has(2)
    query_id, _ = rank.locate(3)
    rank.store.advance_time(40.0)

    assert rank.has(1, 2) == [False, True]
    assert len(rank.store.files()) == 2
    rank.store.advance_time(40.0)
    assert len(rank.store.files()) == 2, "the third is still read"
    rank.release(query_id)
    rank.store.advance_time(40.0)
    assert rank.store.files() == []

    report = rank.store.report()
    assert (report.records, report.bytes_used, report.ttl_s) == (0, 0, 60.0)
    assert report.counters["expired_records_total"] == 3
    assert report.counters["expired_bytes_total"] == 3 * RECORD_BYTES
    assert "records_expired" in rank.store.log_events()


def test_records_expire_after_restart_by_their_last_use(make_store: MakeStore) -> None:
    """Time in which no store ran counts too: the age of a file is on the disk."""
    rank = Rank(make_store(ttl_s=3_600.0))
    rank.commit(1)
    rank.commit(2)
    (old, _) = rank.store.files()
    day_ago_s = old.stat().st_mtime - 86_400.0
    os.utime(old, (day_ago_s, day_ago_s))

    rank = Rank(make_store(ttl_s=3_600.0))
    rank.store.advance_time(1.0)

    assert rank.has(1, 2).count(True) == 1
    assert not old.exists()
