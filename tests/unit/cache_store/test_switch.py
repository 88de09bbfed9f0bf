"""Switching the store off on disk errors and on again: notices, retries, files."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from services.cache_store.events import (
    DeletePartials,
    DirectoryUnusable,
    OpenDirectory,
    TimePassed,
)
from services.cache_store.switch import RETRY_LONGEST_S
from shared.messages import (
    BlocksCleared,
    BlocksCommitted,
    ClearBlocks,
    CommitBlocks,
    NamespaceOpened,
    SpillFailed,
    StoreReported,
    WrittenRecord,
)
from tests.unit.cache_store.conftest import MakeStore
from tests.unit.cache_store.harness import Rank, Store


def _notices_to(store: Store, rank: Rank, before: int) -> list[tuple[str, str]]:
    """Return the notices sent to a rank since `before`: folders and causes, in order."""
    found = []
    for send in store.sent[before:]:
        if send.peer == rank.peer and isinstance(send.message, NamespaceOpened):
            found.append(("folder", send.message.folder))
        elif send.peer == rank.peer and isinstance(send.message, StoreReported):
            found.append(("cause", send.message.cause))
    return found


def test_cache_store_switches_off_when_directory_is_deleted_and_recreates_it(
    store: Store, rank: Rank
) -> None:
    """The next probe finds the deletion and ranks are told; a second later the directory is
    recreated."""
    rank.commit(1)
    before = len(store.sent)
    shutil.rmtree(store.directory.path)

    store.advance_time(0.5)

    cause = "The directory cannot be used: It was deleted or replaced."
    assert _notices_to(store, rank, before) == [("folder", ""), ("cause", cause)]
    assert rank.locate(1)[1] == [None]
    record = WrittenRecord(hash=bytes(32), offset=0, size_bytes=300)
    answer = rank.ask(CommitBlocks(name="partial-1", records=[record]), BlocksCommitted)
    assert (answer.accepted, answer.detail) == (False, f"The store is off: {cause}")
    before = len(store.sent)
    store.advance_time(1.0)
    assert _notices_to(store, rank, before) == [("folder", rank.folder), ("cause", "")]
    assert rank.has(1) == [False]
    assert rank.commit(1).accepted
    assert rank.has(1) == [True]
    assert store.report().counters["switched_off_total"] == 1
    assert store.log_events() == ["store_on", "namespace_opened", "store_off", "store_on"]


def test_cache_store_stays_off_while_its_disk_is_unmounted(
    make_store: MakeStore, tmp_path: Path
) -> None:
    """While the parent folder is missing the store creates nothing; it is on when the folder is
    back."""
    store = make_store()
    rank = Rank(store)
    rank.commit(1)
    tmp_path.rename(tmp_path.with_name("away"))

    store.advance_time(60.0)
    assert not tmp_path.exists()
    assert "No such file or directory" in store.report().cause
    tmp_path.with_name("away").rename(tmp_path)
    store.advance_time(RETRY_LONGEST_S)

    assert rank.has(1) == [True]


def test_cache_store_that_is_off_logs_repeated_errors_only_once(store: Store, rank: Rank) -> None:
    """Errors of a store that is off are neither logged again nor do they delay the retry."""
    for _ in range(5):
        rank.send(SpillFailed(detail="No space left on device"))
        store.handle(DirectoryUnusable("Input/output error"))

    assert store.log_events().count("store_off") == 1
    store.advance_time(1.0)
    assert store.report().on


def test_cache_store_stays_off_while_a_file_replaces_its_directory(
    store: Store, rank: Rank
) -> None:
    """The store stays off while a file is at the directory's path, and retries until it is gone."""
    shutil.rmtree(store.directory.path)
    store.directory.path.write_text("mine")

    store.advance_time(120.0)

    assert store.report().cause.endswith("choose another cache.directory.")
    assert store.directory.path.read_text() == "mine"
    assert store.log_events().count("store_off") == 2, "once when noticed, once with the new cause"
    store.directory.path.unlink()
    store.advance_time(RETRY_LONGEST_S)
    assert store.report().on


def test_cache_store_switches_off_at_once_when_rank_reports_write_error(
    store: Store, rank: Rank
) -> None:
    """A rank's write error switches the store off at once; the files are located again
    afterwards."""
    rank.commit(1)

    rank.send(SpillFailed(detail="No space left on device"))

    assert store.report().cause == "A rank could not write: No space left on device"
    assert rank.has(1) == [False]
    store.advance_time(1.5)
    assert store.report().on
    assert rank.has(1) == [True]


def test_retry_interval_of_switched_off_cache_store_doubles_up_to_20_s(
    store: Store, rank: Rank
) -> None:
    """The retry interval doubles up to 20 s and is reset after a minute without errors."""
    opened = []
    for _ in range(8):
        rank.send(SpillFailed(detail="Input/output error"))
        began_s = store.clock.now()
        while not store.report().on:
            store.advance_time(0.5)
        opened.append(store.clock.now() - began_s)

    assert opened == [1.0, 2.0, 4.0, 8.0, 16.0, 20.0, 20.0, 20.0]
    store.advance_time(61.0)
    rank.send(SpillFailed(detail="Input/output error"))
    store.advance_time(1.0)
    assert store.report().on, "a minute without errors resets the interval"


@pytest.mark.parametrize(
    ("flag", "free", "cause"),
    [(os.ST_RDONLY, 2**30, "Read-only file system"), (0, 2**23, "No space left on device")],
)
def test_cache_store_switches_off_when_disk_becomes_read_only_or_full(
    store: Store, rank: Rank, monkeypatch: pytest.MonkeyPatch, flag: int, free: int, cause: str
) -> None:
    """The probe notices a disk that is read-only or full without writing to it."""
    rank.commit(1)
    real = os.statvfs(store.directory.path)
    fields = list(real)
    fields[4] = free // real.f_frsize
    fields[8] |= flag
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))

    store.advance_time(0.5)
    assert cause in store.report().cause
    if not flag:
        store.advance_time(60.0)
        assert cause in store.report().cause
    monkeypatch.undo()
    store.advance_time(RETRY_LONGEST_S)

    assert rank.has(1) == [True]


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS, errno.ENOSPC, errno.EDQUOT])
def test_cache_store_switches_off_when_disk_fails_during_commit(
    store: Store, rank: Rank, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A disk error during a commit refuses it and switches the store off until the next retry."""

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "rename", fail)
    answer = rank.commit(1)

    assert not answer.accepted
    assert os.strerror(code) in answer.detail
    assert os.strerror(code) in store.report().cause
    monkeypatch.undo()
    store.advance_time(1.5)
    assert rank.commit(1).accepted
    assert rank.has(1) == [True]


def test_cache_store_deletes_partial_files_before_it_is_switched_on_again(
    store: Store, rank: Rank
) -> None:
    """Partial files from the time off are deleted before ranks are told that the store is on."""
    rank.send(SpillFailed(detail="No space left on device"))
    name, _ = rank.write(1)

    store.advance_time(1.5)

    assert not (Path(rank.folder) / name).exists()


def test_located_block_file_is_kept_while_cache_store_is_off(make_store: MakeStore) -> None:
    """A pinned file stays readable through an off period; a cleared one is not located again."""
    store = make_store()
    rank = Rank(store)
    rank.commit(1)
    query_id, _ = rank.locate(1)
    assert rank.ask(ClearBlocks(), BlocksCleared).records == 1
    rank.send(SpillFailed(detail="Input/output error"))

    store.advance_time(1.5)
    assert len(store.files()) == 1, "it is still being read"
    assert rank.has(1) == [False]
    rank.release(query_id)

    assert store.files() == []


def test_file_cleared_while_in_use_is_deleted_when_store_switches_on_again(
    store: Store, rank: Rank
) -> None:
    """A cleared file that a query still holds is released while the store is off, and deleted when
    the store is on again."""
    rank.commit(1)
    query_id, _ = rank.locate(1)
    rank.ask(ClearBlocks(), BlocksCleared)
    rank.send(SpillFailed(detail="Input/output error"))

    rank.release(query_id)
    assert len(store.files()) == 1
    store.advance_time(1.5)

    assert store.files() == []


def test_rank_that_connects_to_switched_off_store_gets_folder_after_switch_on(
    store: Store, rank: Rank
) -> None:
    """A rank that connects while the store is off gets no folder until the store is on again."""
    rank.send(SpillFailed(detail="No space left on device"))
    late = Rank(store, "late", rank=1, world_size=2)
    before = len(store.performed)
    rank.leave()

    assert late.folder == ""
    assert not any(isinstance(action, DeletePartials) for action in store.performed[before:])
    store.advance_time(1.5)
    folders = [
        send.message.folder
        for send in store.sent
        if send.peer == late.peer and isinstance(send.message, NamespaceOpened)
    ]
    assert folders[0] == ""
    assert folders[-1].endswith("rank-1-of-2")
    assert Path(folders[-1]).is_dir()


def test_cache_store_begins_no_second_attempt_while_it_opens_its_directory(store: Store) -> None:
    """While the directory is being opened, no second attempt and no disk check begins."""
    store.handle(DirectoryUnusable("gone"))
    store.clock.advance(1.0)
    first = store.core.handle(TimePassed(), store.clock.now())
    store.clock.advance(100.0)
    second = store.core.handle(TimePassed(), store.clock.now())

    assert first == [OpenDirectory()]
    assert second == []
