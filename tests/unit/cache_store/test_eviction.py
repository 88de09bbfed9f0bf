"""The byte limit: what goes first, what never goes, what survives a restart."""

import os
from pathlib import Path

from shared.messages import BlocksCommitted, CommitBlocks, QuarantineBlocks
from tests.unit.cache_store.conftest import MakeStore
from tests.unit.cache_store.harness import RECORD_BYTES, Rank, block_hash


def test_the_least_recently_used_goes(make_store: MakeStore) -> None:
    """Past the limit the oldest file goes; having been located counts as use."""
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


def test_a_prefix_outlives_what_stands_on_it(make_store: MakeStore) -> None:
    """Of blocks that were located together the last ones go first: they need the others."""
    rank = Rank(make_store(bytes_max=3 * RECORD_BYTES))
    for number in (1, 2, 3):
        rank.commit(number)
    rank.has(1, 2, 3)

    rank.commit(4)

    assert rank.has(1, 2, 3) == [True, True, False]


def test_evict_first_in_order(make_store: MakeStore) -> None:
    """What the scheduler names goes before the least recently used, in the scheduler's order."""
    rank = Rank(make_store(bytes_max=4 * RECORD_BYTES))
    for number in (1, 2, 3, 4):
        rank.commit(number)

    rank.commit(5, evict_first=(4, 2))
    assert rank.has(1, 2, 3, 4, 5) == [True, True, True, False, True]
    rank.commit(6, 7, evict_first=(99, 2))

    assert rank.has(2, 6, 7) == [False, True, True]
    assert rank.has(1, 3, 5).count(True) == 2, "one more had to go: the least recently used"


def test_without_need_nothing_goes(make_store: MakeStore) -> None:
    """`evict_first` is about room, not about deleting."""
    rank = Rank(make_store())
    rank.commit(1)

    rank.commit(2, evict_first=(1,))

    assert rank.has(1, 2) == [True, True]


def test_a_file_is_worth_its_best_record(make_store: MakeStore) -> None:
    """A file of which only a part is named stays; one that is named in full goes."""
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


def test_pinned_files_never_go(make_store: MakeStore) -> None:
    """What was located stays until it is released, though it is the oldest and named first."""
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


def test_a_file_that_can_never_fit_evicts_nothing(make_store: MakeStore) -> None:
    """A file larger than the limit is refused, deleted, and costs nobody anything."""
    rank = Rank(make_store(bytes_max=3 * RECORD_BYTES))
    rank.commit(1, 2)

    answer = rank.commit(3, 4, 5, 6)

    assert not answer.accepted
    assert rank.has(1, 2) == [True, True]
    assert len(list(Path(rank.folder).iterdir())) == 1


def test_pins_end_with_the_session(make_store: MakeStore) -> None:
    """A rank that died holds nothing."""
    store = make_store(bytes_max=2 * RECORD_BYTES)
    lost = Rank(store, "lost")
    lost.commit(1, 2)
    lost.locate(1, 2)
    rank = Rank(store)
    assert not rank.commit(3).accepted

    lost.leave("silent")

    assert rank.commit(3).accepted


def test_two_questions_pin_twice(make_store: MakeStore) -> None:
    """A file that two questions named stays until both are released; a number used anew replaces
    what it had pinned."""
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


def test_recency_survives_a_restart(make_store: MakeStore) -> None:
    """Which file was used when is read from the files themselves."""
    rank = Rank(make_store())
    for number in range(6):
        rank.commit(number)
    rank.has(3, 0)

    rank = Rank(make_store(bytes_max=2 * RECORD_BYTES))

    assert rank.has(0, 1, 2, 3, 4, 5) == [True, False, False, True, False, False]
    rank = Rank(make_store(bytes_max=RECORD_BYTES))
    assert rank.has(3, 0) == [False, True], "3 was asked for after 0, as its continuation"


def test_a_commit_is_a_use(make_store: MakeStore) -> None:
    """A file counts as used when it was taken over, however long its rank took to write it."""
    rank = Rank(make_store())
    rank.commit(1)
    name, records = rank.write(2)
    os.utime(Path(rank.folder) / name, (1.0, 1.0))
    assert rank.tell(CommitBlocks(name=name, records=records), BlocksCommitted).accepted

    rank = Rank(make_store(bytes_max=RECORD_BYTES))

    assert rank.has(1, 2) == [False, True]


def test_a_lower_limit_is_kept_from_the_start(make_store: MakeStore) -> None:
    """A store that is started with less room evicts before it serves."""
    rank = Rank(make_store())
    for number in range(5):
        rank.commit(number)

    store = make_store(bytes_max=2 * RECORD_BYTES)

    assert len(store.files()) == 2
    assert store.report().bytes_used == 2 * RECORD_BYTES


def test_the_quarantine_counts_and_goes_first(make_store: MakeStore) -> None:
    """Bad files are kept as long as there is room: they are worth less than any block."""
    rank = Rank(make_store(bytes_max=3 * RECORD_BYTES))
    for number in (1, 2, 3):
        rank.commit(number)
    rank.say(QuarantineBlocks(hashes=[block_hash(2)], cause="damaged"))
    assert rank.store.report().bytes_used == 3 * RECORD_BYTES

    rank.commit(4)

    assert list((rank.store.directory.path / "quarantine").iterdir()) == []
    assert rank.has(1, 3, 4) == [True, True, True]


def test_an_evicted_folder_disappears(make_store: MakeStore) -> None:
    """Namespaces of models that nobody serves any more leave nothing behind."""
    store = make_store(bytes_max=RECORD_BYTES)
    old = Rank(store, "old", namespace="cd" * 32)
    old.commit(1)
    folder = Path(old.folder)
    old.leave()
    assert folder.exists()

    Rank(store).commit(1)

    assert not folder.parent.exists()


def test_a_clock_that_was_set_back(make_store: MakeStore) -> None:
    """Files from the future count as used now; nothing breaks."""
    rank = Rank(make_store())
    rank.commit(1)
    (file,) = rank.store.files()
    os.utime(file, (4e9, 4e9))

    rank = Rank(make_store())

    assert rank.has(1) == [True]
