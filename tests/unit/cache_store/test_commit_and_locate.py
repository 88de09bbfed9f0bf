"""Commit, locate, release, clear and list, on a real directory."""

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
    WrittenRecord,
)
from tests.unit.cache_store.conftest import MakeStore
from tests.unit.cache_store.harness import NAMESPACE, RECORD_BYTES, Rank, Store, block_hash


def test_cache_store_locates_committed_records_at_their_offsets(store: Store, rank: Rank) -> None:
    """Each committed record is located at its offset; an uncommitted block is a miss."""
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


def test_cache_store_folders_have_mode_0700(store: Store, rank: Rank) -> None:
    """Directory, namespace folder and rank folder have mode 0700 and the documented layout."""
    folder = Path(rank.folder)

    assert folder == store.directory.path / NAMESPACE / "rank-0-of-1"
    for path in (folder, folder.parent, folder.parent.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_restarted_cache_store_locates_all_committed_records_again(make_store: MakeStore) -> None:
    """After a restart every record is located at the same place."""
    rank = Rank(make_store())
    rank.commit(1, 2, 3)
    rank.commit(4)
    before = rank.locate(1, 2, 3, 4)[1]

    again = Rank(make_store())

    assert again.locate(1, 2, 3, 4)[1] == before
    assert again.has(1, 2, 3, 4) == [True] * 4


def test_block_hash_is_miss_for_other_ranks_world_sizes_and_namespaces(
    store: Store, rank: Rank
) -> None:
    """A hash stored by one rank is a miss for other ranks, world sizes and namespaces."""
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
    opened = [line.fields for line in store.log_lines if line.event == "namespace_opened"]
    assert [(one["records"], one["other_records"]) for one in opened] == [(0, 0)] + [(0, 1)] * 3


@pytest.mark.parametrize(
    ("namespace", "rank", "world_size"),
    [("", 0, 1), (NAMESPACE, 1, 1), (NAMESPACE, 5, 2)],
)
def test_cache_store_gives_no_folder_for_empty_namespace_or_impossible_rank_number(
    store: Store, namespace: str, rank: int, world_size: int
) -> None:
    """An empty namespace or a rank number outside the world gets no folder, and the refusal is
    logged."""
    client = Rank(store, "client")
    request = OpenNamespace(namespace=namespace, rank=rank, world_size=world_size)

    assert client.ask(request, NamespaceOpened).folder == ""
    assert "namespace_refused" in store.log_events()


def _commit(rank: Rank, name: str, records: list[WrittenRecord]) -> BlocksCommitted:
    return rank.ask(CommitBlocks(name=name, records=records), BlocksCommitted)


def test_commit_is_refused_when_its_record_list_differs_from_file(store: Store, rank: Rank) -> None:
    """A commit that lists other records than the file holds is refused, and the file is deleted."""
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
    ("damage", "detail"),
    [
        ("cut", "ends before"),
        ("padded", "fewer than"),
        ("empty", "fewer than"),
        ("zeros", "not start"),
    ],
)
def test_commit_of_incomplete_block_file_is_refused(rank: Rank, damage: str, detail: str) -> None:
    """A file whose size or header does not match its records is refused and deleted."""
    name, records = rank.write(1)
    path = Path(rank.folder) / name
    data = path.read_bytes()
    path.write_bytes(
        {"cut": data[:-1], "padded": data + b"\0", "empty": b"", "zeros": bytes(len(data))}[damage]
    )

    answer = _commit(rank, name, records)

    assert not answer.accepted
    assert detail in answer.detail
    assert not path.exists()


def test_commit_of_record_that_names_another_rank_is_refused(store: Store, rank: Rank) -> None:
    """A record that names another rank is not taken into this rank's folder."""
    other = Rank(store, "other", rank=1, world_size=2)
    name, records = other.write(1)
    (Path(other.folder) / name).rename(Path(rank.folder) / name)

    answer = _commit(rank, name, records)

    assert (answer.accepted, answer.detail) == (False, "A record belongs to another folder.")


def test_commit_of_already_committed_file_is_refused_and_keeps_it(store: Store, rank: Rank) -> None:
    """A commit that names a file the store already owns is refused, and the file stays."""
    rank.commit(1)
    (file,) = store.files()
    record = WrittenRecord(hash=block_hash(1), offset=0, size_bytes=RECORD_BYTES)

    answer = _commit(rank, file.name, [record])

    assert not answer.accepted
    assert "partial-" in answer.detail
    assert rank.has(1) == [True]


def test_commit_of_symbolic_link_or_pipe_is_refused(rank: Rank, tmp_path: Path) -> None:
    """A symbolic link or pipe is refused, and the link's target stays."""
    name, records = rank.write(1)
    elsewhere = tmp_path / "elsewhere"
    (Path(rank.folder) / name).rename(elsewhere)
    (Path(rank.folder) / "partial-link").symlink_to(elsewhere)
    os.mkfifo(Path(rank.folder) / "partial-pipe")

    assert _commit(rank, "partial-link", records).detail == "It is a symbolic link."
    assert _commit(rank, "partial-pipe", records).detail == "It is not a regular file."
    assert _commit(rank, "partial-nowhere", records).detail == "There is no such file."
    assert elsewhere.exists()


def test_commit_is_refused_when_block_file_path_is_a_directory(store: Store, rank: Rank) -> None:
    """A folder at the name of a block file fails that commit only; the store stays on."""
    (Path(rank.folder) / f"{block_hash(1).hex()}.blocks" / "mine").mkdir(parents=True)

    answer = rank.commit(1)

    assert (answer.accepted, "foreign folder" in answer.detail) == (False, True)
    assert store.core.is_on
    assert rank.commit(2).accepted


def test_without_open_namespace_commit_is_refused_and_block_is_miss(store: Store) -> None:
    """Without an open namespace a commit is refused and every located block is a miss."""
    rank = Rank(store)
    name, records = rank.write(1)
    other = Rank(store, "other", namespace="")

    assert _commit(other, name, records).detail == "No namespace is open."
    assert other.locate(1, 2)[1] == [None, None]


def test_cache_store_locates_newest_copy_when_record_is_committed_twice(
    store: Store, rank: Rank
) -> None:
    """A record that is committed again is located in the newer file; a file without current records
    is deleted."""
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


def test_cache_store_locates_older_copy_when_newer_file_is_evicted(make_store: MakeStore) -> None:
    """When the newer file is evicted, the older copy is located, before and after a restart."""
    rank = Rank(make_store(bytes_max=4 * RECORD_BYTES))
    rank.commit(1, 2)
    rank.commit(1)
    assert rank.has(2)

    rank.commit(3, 4, evict_first=(1,))

    assert rank.has(1, 2, 3, 4) == [True] * 4
    counters = rank.store.report().counters
    assert (counters["evicted_files_total"], counters["evicted_records_total"]) == (1, 0)
    assert Rank(make_store()).has(1, 2, 3, 4) == [True] * 4


def test_cache_store_locates_older_copy_after_newer_file_was_deleted_from_outside(
    store: Store, rank: Rank
) -> None:
    """The first locate after a file was deleted from outside finds that; the next one uses the
    older copy."""
    rank.commit(1, 2)
    (older,) = store.files()
    rank.commit(1, 3)
    (newer,) = set(store.files()) - {older}
    newer.unlink()

    rank.has(1)

    assert rank.has(1, 2, 3) == [True, True, False]


def test_cache_store_deletes_partial_files_at_start(make_store: MakeStore) -> None:
    """A partial file from before a crash is deleted at the next start."""
    rank = Rank(make_store())
    name, _ = rank.write(1)

    make_store()

    assert not (Path(rank.folder) / name).exists()


def test_cache_store_deletes_partial_files_of_rank_whose_session_ends(
    store: Store, rank: Rank
) -> None:
    """When a session ends, its partial files are deleted, and its folder too if that is empty."""
    rank.write(1)
    folder = Path(rank.folder)

    rank.leave()

    assert not folder.exists()
    assert not folder.parent.exists()


def test_end_of_session_keeps_recent_partial_files_of_successor_session(
    store: Store, rank: Rank
) -> None:
    """While another session uses the folder, only old partial files are deleted, after a minute."""
    successor = Rank(store, "successor")
    old, _ = rank.write(1)
    os.utime(Path(rank.folder) / old, (1.0, 1.0))
    fresh, records = successor.write(2)

    rank.leave("silent")
    assert {path.name for path in Path(rank.folder).iterdir()} == {old, fresh}
    store.advance_time(61.0)

    assert {path.name for path in Path(rank.folder).iterdir()} == {fresh}
    assert _commit(successor, fresh, records).accepted


def test_partial_files_of_rank_are_deleted_when_it_changes_namespace(
    store: Store, rank: Rank
) -> None:
    """Changing the namespace deletes the rank's partial files and keeps its committed blocks."""
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


def test_clear_deletes_files_of_one_namespace_or_of_all(store: Store, rank: Rank) -> None:
    """Clearing deletes a namespace or all of them; pinned files are deleted when they are
    released."""
    other = Rank(store, "other", namespace="cd" * 32)
    rank.commit(1, 2)
    other.commit(3)
    query_id, places = rank.locate(1)

    assert other.ask(ClearBlocks(namespace="cd" * 32), BlocksCleared) == BlocksCleared(
        records=1, size_bytes=RECORD_BYTES
    )
    assert (rank.has(1, 2), other.has(3)) == ([True, True], [False])
    assert other.ask(ClearBlocks(), BlocksCleared).records == 2
    assert places[0] is not None
    assert rank.read(places[0], block_hash(1)) is not None
    assert rank.has(1) == [False]
    rank.release(query_id)
    assert store.files() == []
    assert store.report().bytes_used == 0


def test_list_reports_records_bytes_and_age_of_each_rank_folder(store: Store, rank: Rank) -> None:
    """The list has one entry per folder: records, bytes and seconds since the last use."""
    other = Rank(store, "other", rank=1, world_size=2)
    rank.commit(1, 2)
    store.advance_time(10.0)
    other.commit(3)
    store.advance_time(5.0)

    listed = rank.ask(ListBlocks(), BlocksListed)

    assert not listed.more
    assert [(f.rank, f.world_size, f.records, f.used_s) for f in listed.folders] == [
        (0, 1, 2, 15.0),
        (1, 2, 1, 5.0),
    ]
    assert rank.ask(ListBlocks(page=1), BlocksListed).folders == []


def test_block_is_miss_when_its_file_was_deleted_from_outside(store: Store, rank: Rank) -> None:
    """A file that was deleted from outside is a miss and is removed from the index."""
    rank.commit(1)
    (file,) = store.files()
    file.unlink()

    assert rank.has(1) == [False]
    assert rank.locate(1)[1] == [None]
    assert store.report().bytes_used == 0
