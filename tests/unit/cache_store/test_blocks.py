"""Committing, locating, releasing: the store's core on a real directory."""

import os
import stat
from pathlib import Path

import pytest

from shared.messages import (
    BlocksCleared,
    BlocksCommitted,
    BlocksListed,
    ClearBlocks,
    CommitBlocks,
    ListBlocks,
    NamespaceOpened,
    OpenNamespace,
    QuarantineBlocks,
    WrittenRecord,
)
from tests.unit.cache_store.conftest import MakeStore
from tests.unit.cache_store.harness import NAMESPACE, RECORD_BYTES, Rank, Store, block_hash


def test_what_is_committed_can_be_read(store: Store, rank: Rank) -> None:
    """A file of three records, then one of one: each is found at its place, nothing else is."""
    assert rank.commit(1, 2, 3).accepted
    answer = rank.commit(4)

    assert (answer.accepted, answer.detail, answer.store_bytes) == (True, "", 4 * RECORD_BYTES)
    assert rank.has(1, 2, 3, 4, 5) == [True, True, True, True, False]
    _, places = rank.locate(2)
    assert places[0] is not None
    assert (places[0].offset, places[0].size_bytes) == (RECORD_BYTES, RECORD_BYTES)
    report = store.report()
    assert (report.on, report.records, report.bytes_used) == (True, 4, 4 * RECORD_BYTES)
    assert report.namespaces == 1


def test_the_folder_is_private(store: Store, rank: Rank) -> None:
    """Directory, namespace and rank folder have mode 0700, and lie where the layout says."""
    folder = Path(rank.folder)

    assert folder == store.directory.path / NAMESPACE / "rank-0-of-1"
    for path in (folder, folder.parent, folder.parent.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_restart_finds_everything_again(make_store: MakeStore) -> None:
    """The index is made from the files: the same records at the same places."""
    rank = Rank(make_store())
    rank.commit(1, 2, 3)
    rank.commit(4)
    before = rank.locate(1, 2, 3, 4)[1]

    again = Rank(make_store())

    assert again.locate(1, 2, 3, 4)[1] == before
    assert again.has(1, 2, 3, 4) == [True] * 4


def test_ranks_and_namespaces_do_not_mix(store: Store, rank: Rank) -> None:
    """Another rank, world size or namespace has its own folder: the same hash is a clean miss."""
    rank.commit(1)

    others = [
        Rank(store, "a", rank=1, world_size=2),
        Rank(store, "b", rank=0, world_size=2),
        Rank(store, "c", namespace="cd" * 32),
    ]

    assert [other.has(1) for other in others] == [[False]] * 3
    assert rank.has(1) == [True]
    assert others[0].commit(1).accepted
    assert others[1].has(1) == [False]
    assert store.report().namespaces == 1
    opened = [say.fields for say in store.said if say.event == "namespace_opened"]
    assert [(one["records"], one["other_records"]) for one in opened] == [(0, 0)] + [(0, 1)] * 3


@pytest.mark.parametrize(
    ("namespace", "rank", "world_size"),
    [("", 0, 1), (NAMESPACE, 1, 1), (NAMESPACE, 5, 2)],
)
def test_an_impossible_folder_is_refused(
    store: Store, namespace: str, rank: int, world_size: int
) -> None:
    """No namespace, or a rank outside its world: no folder, and the log says so."""
    asks = Rank(store, "asks")
    order = OpenNamespace(namespace=namespace, rank=rank, world_size=world_size)

    assert asks.tell(order, NamespaceOpened).folder == ""
    assert "namespace_refused" in store.events()


def _commit(rank: Rank, name: str, records: list[WrittenRecord]) -> BlocksCommitted:
    return rank.tell(CommitBlocks(name=name, records=records), BlocksCommitted)


def test_a_commit_must_say_what_the_file_holds(store: Store, rank: Rank) -> None:
    """Fewer, more, other or shifted records than the file has: refused, and the file deleted."""
    for change in ("fewer", "more", "other", "shifted", "reordered"):
        name, records = rank.write(1, 2)
        if change == "fewer":
            records = records[:1]
        elif change == "more":
            records.append(WrittenRecord(hash=block_hash(3), offset=712, size_bytes=356))
        elif change == "other":
            records[0] = WrittenRecord(hash=block_hash(9), offset=0, size_bytes=RECORD_BYTES)
        elif change == "shifted":
            records[1] = WrittenRecord(hash=block_hash(2), offset=355, size_bytes=357)
        else:
            records.reverse()

        answer = _commit(rank, name, records)

        assert (answer.accepted, "other records" in answer.detail) == (False, True), change
        assert list(Path(rank.folder).iterdir()) == []
    assert rank.has(1, 2, 9) == [False] * 3
    assert store.report().counters["commits_refused_total"] == 5


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("cut", "ends before"),
        ("padded", "fewer than"),
        ("empty", "fewer than"),
        ("zeros", "not start"),
    ],
)
def test_a_commit_of_a_torn_file_is_refused(rank: Rank, damage: str, says: str) -> None:
    """The size on disk must be what the records add up to."""
    name, records = rank.write(1)
    path = Path(rank.folder) / name
    data = path.read_bytes()
    path.write_bytes(
        {"cut": data[:-1], "padded": data + b"\0", "empty": b"", "zeros": bytes(len(data))}[damage]
    )

    answer = _commit(rank, name, records)

    assert not answer.accepted
    assert says in answer.detail
    assert not path.exists()


def test_a_commit_of_another_ranks_record_is_refused(store: Store, rank: Rank) -> None:
    """A record that says another rank is not taken into this one's folder."""
    other = Rank(store, "other", rank=1, world_size=2)
    name, records = other.write(1)
    (Path(other.folder) / name).rename(Path(rank.folder) / name)

    answer = _commit(rank, name, records)

    assert (answer.accepted, answer.detail) == (False, "A record belongs to another folder.")


def test_only_partial_files_are_taken_over_or_deleted(store: Store, rank: Rank) -> None:
    """A commit that names a file which is the store's already is refused, and the file stays."""
    rank.commit(1)
    (file,) = store.files()
    record = WrittenRecord(hash=block_hash(1), offset=0, size_bytes=RECORD_BYTES)

    answer = _commit(rank, file.name, [record])

    assert not answer.accepted
    assert "partial-" in answer.detail
    assert rank.has(1) == [True]


def test_links_and_folders_are_no_files(rank: Rank, tmp_path: Path) -> None:
    """What leads out of the folder is refused, and what it leads to stays."""
    name, records = rank.write(1)
    elsewhere = tmp_path / "elsewhere"
    (Path(rank.folder) / name).rename(elsewhere)
    (Path(rank.folder) / "partial-link").symlink_to(elsewhere)
    os.mkfifo(Path(rank.folder) / "partial-pipe")

    assert _commit(rank, "partial-link", records).detail == "It is a symbolic link."
    assert _commit(rank, "partial-pipe", records).detail == "It is not a regular file."
    assert _commit(rank, "partial-nowhere", records).detail == "There is no such file."
    assert elsewhere.exists()


def test_a_foreign_folder_with_our_name(store: Store, rank: Rank) -> None:
    """A folder that stands where a file should go costs that file, and nothing else."""
    (Path(rank.folder) / f"{block_hash(1).hex()}.blocks" / "mine").mkdir(parents=True)

    answer = rank.commit(1)

    assert (answer.accepted, "foreign folder" in answer.detail) == (False, True)
    assert store.core.is_on
    assert rank.commit(2).accepted


def test_without_a_namespace_nothing_is_taken_or_found(store: Store) -> None:
    """Before OpenNamespace every question has an answer: no."""
    rank = Rank(store)
    name, records = rank.write(1)
    other = Rank(store, "other", namespace="")

    assert _commit(other, name, records).detail == "No namespace is open."
    assert other.locate(1, 2)[1] == [None, None]


def test_the_same_record_again_supersedes(store: Store, rank: Rank) -> None:
    """A block that is spilled once more is found in the newer file; an empty older one goes."""
    rank.commit(1, 2)
    (first,) = store.files()

    rank.commit(1)
    assert rank.has(1, 2) == [True, True]
    assert len(store.files()) == 2
    assert rank.locate(1)[1][0] != rank.locate(2)[1][0]
    for query_id in (1, 2, 3):
        rank.release(query_id)
    rank.commit(2)

    assert first not in store.files()
    assert rank.has(1, 2) == [True, True]
    assert store.report().bytes_used == 2 * RECORD_BYTES


def test_an_older_copy_is_found_when_the_newer_file_goes(make_store: MakeStore) -> None:
    """What a look at the files would find is found: before a restart as after it."""
    rank = Rank(make_store(bytes_max=4 * RECORD_BYTES))
    rank.commit(1, 2)
    rank.commit(1)
    assert rank.has(2)

    rank.commit(3, 4, evict_first=(1,))

    assert rank.has(1, 2, 3, 4) == [True] * 4
    counters = rank.store.report().counters
    assert (counters["evicted_files_total"], counters["evicted_records_total"]) == (1, 0)
    assert Rank(make_store()).has(1, 2, 3, 4) == [True] * 4


def test_an_older_copy_is_found_when_somebody_deletes_the_newer_file(
    store: Store, rank: Rank
) -> None:
    """Being located shows that it is gone; the next question is answered from the older one."""
    rank.commit(1, 2)
    (older,) = store.files()
    rank.commit(1, 3)
    (newer,) = set(store.files()) - {older}
    newer.unlink()

    rank.has(1)

    assert rank.has(1, 2, 3) == [True, True, False]


def test_an_older_copy_of_a_bad_record_is_found(make_store: MakeStore) -> None:
    """The file with the bad one goes, neighbours and all, and nothing of it comes back."""
    rank = Rank(make_store())
    rank.commit(1, 2)
    rank.commit(1, 3)

    rank.say(QuarantineBlocks(hashes=[block_hash(1)], cause="damaged: bits have changed"))

    assert rank.has(1, 2, 3) == [True, True, False]
    rank.say(QuarantineBlocks(hashes=[block_hash(1)], cause="damaged: bits have changed"))
    assert rank.has(1, 2, 3) == [False] * 3
    assert Rank(make_store()).has(1, 2, 3) == [False] * 3


def test_leftovers_are_deleted_at_start(make_store: MakeStore) -> None:
    """What a rank was writing when everything died is gone after the next start."""
    rank = Rank(make_store())
    name, _ = rank.write(1)

    make_store()

    assert not (Path(rank.folder) / name).exists()


def test_leftovers_of_a_lost_session_are_deleted(store: Store, rank: Rank) -> None:
    """With the session goes what it was writing, and the folder if nothing else is in it."""
    rank.write(1)
    folder = Path(rank.folder)

    rank.leave()

    assert not folder.exists()
    assert not folder.parent.exists()


def test_leftovers_beside_a_living_session(store: Store, rank: Rank) -> None:
    """A successor that already writes loses nothing; a minute later only old files go."""
    successor = Rank(store, "successor")
    old, _ = rank.write(1)
    os.utime(Path(rank.folder) / old, (1.0, 1.0))
    fresh, records = successor.write(2)

    rank.leave("silent")
    assert {path.name for path in Path(rank.folder).iterdir()} == {old, fresh}
    store.pass_time(61.0)

    assert {path.name for path in Path(rank.folder).iterdir()} == {fresh}
    assert _commit(successor, fresh, records).accepted


def test_a_rank_that_opens_another_namespace(store: Store, rank: Rank) -> None:
    """It has left the first one: what it was writing there is deleted, what it committed stays."""
    rank.commit(1)
    name, _ = rank.write(2)
    first = Path(rank.folder)

    rank.namespace = "cd" * 32
    rank.open()

    assert not (first / name).exists()
    assert rank.has(1) == [False]
    rank.namespace = NAMESPACE
    rank.open()
    assert rank.has(1) == [True]


def test_quarantine(store: Store, rank: Rank) -> None:
    """A record that failed its check is not found again, nor its neighbours; its file is kept."""
    rank.commit(1, 2)
    rank.commit(3)
    query_id, _ = rank.locate(1)

    rank.say(QuarantineBlocks(hashes=[block_hash(1)], cause="damaged: bits have changed"))

    assert rank.has(1, 2, 3) == [False, False, True]
    assert len(store.files()) == 2, "it is still being read"
    rank.release(query_id)
    assert len(store.files()) == 1
    (kept,) = (store.directory.path / "quarantine").iterdir()
    assert kept.stat().st_size == 2 * RECORD_BYTES
    assert store.report().counters["quarantined_damaged_total"] == 1
    assert rank.commit(1, 2).accepted
    assert rank.has(1, 2) == [True, True]


def test_the_quarantine_keeps_the_newest(make_store: MakeStore) -> None:
    """At most 16 files are kept, also across a restart; causes that nobody knows are `other`."""
    rank = Rank(make_store())
    for number in range(20):
        rank.commit(number)
        rank.say(QuarantineBlocks(hashes=[block_hash(number)], cause="No such file"))
    folder = rank.store.directory.path / "quarantine"
    kept = {path.name[-71:] for path in folder.iterdir()}

    assert rank.store.report().counters["quarantined_other_total"] == 20
    assert kept == {f"{block_hash(number).hex()}.blocks" for number in range(4, 20)}
    rank = Rank(make_store())
    rank.commit(30)
    rank.say(QuarantineBlocks(hashes=[block_hash(30)], cause="torn: cut off"))
    assert f"{block_hash(4).hex()}.blocks" not in {path.name[-71:] for path in folder.iterdir()}


def test_clear(store: Store, rank: Rank) -> None:
    """Clearing deletes a namespace or all; what is being read goes when it is released."""
    other = Rank(store, "other", namespace="cd" * 32)
    rank.commit(1, 2)
    other.commit(3)
    query_id, places = rank.locate(1)

    assert other.tell(ClearBlocks(namespace="cd" * 32), BlocksCleared) == BlocksCleared(
        records=1, size_bytes=RECORD_BYTES
    )
    assert (rank.has(1, 2), other.has(3)) == ([True, True], [False])
    assert other.tell(ClearBlocks(), BlocksCleared).records == 2
    assert places[0] is not None
    assert rank.read(places[0], block_hash(1)) is not None
    assert rank.has(1) == [False]
    rank.release(query_id)
    assert store.files() == []
    assert store.report().bytes_used == 0


def test_listing(store: Store, rank: Rank) -> None:
    """A line per folder: its records, bytes, and how long ago one of them was used."""
    other = Rank(store, "other", rank=1, world_size=2)
    rank.commit(1, 2)
    store.pass_time(10.0)
    other.commit(3)
    store.pass_time(5.0)

    listed = rank.tell(ListBlocks(), BlocksListed)

    assert not listed.more
    assert [(f.rank, f.world_size, f.records, f.used_s) for f in listed.folders] == [
        (0, 1, 2, 15.0),
        (1, 2, 1, 5.0),
    ]
    assert rank.tell(ListBlocks(page=1), BlocksListed).folders == []


def test_a_file_that_somebody_deleted(store: Store, rank: Rank) -> None:
    """A file that vanished is a miss for the reader and forgotten from then on."""
    rank.commit(1)
    (file,) = store.files()
    file.unlink()

    assert rank.has(1) == [False]
    assert rank.locate(1)[1] == [None]
    assert store.report().bytes_used == 0
