"""On and off: what peers are told, when it is tried again, what is found then."""

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


def _told(store: Store, rank: Rank, before: int) -> list[tuple[str, str]]:
    """Return what a rank was told since: the folder, or the cause."""
    found = []
    for send in store.sent[before:]:
        if send.peer == rank.peer and isinstance(send.message, NamespaceOpened):
            found.append(("folder", send.message.folder))
        elif send.peer == rank.peer and isinstance(send.message, StoreReported):
            found.append(("cause", send.message.cause))
    return found


def test_a_deleted_directory(store: Store, rank: Rank) -> None:
    """Noticed by the next probe; ranks are told; a second later it is there again, empty."""
    rank.commit(1)
    before = len(store.sent)
    shutil.rmtree(store.directory.path)

    store.pass_time(0.5)

    cause = "The directory cannot be used: It was deleted or replaced."
    assert _told(store, rank, before) == [("folder", ""), ("cause", cause)]
    assert rank.locate(1)[1] == [None]
    record = WrittenRecord(hash=bytes(32), offset=0, size_bytes=300)
    answer = rank.tell(CommitBlocks(name="partial-1", records=[record]), BlocksCommitted)
    assert (answer.accepted, answer.detail) == (False, f"The store is off: {cause}")
    before = len(store.sent)
    store.pass_time(1.0)
    assert _told(store, rank, before) == [("folder", rank.folder), ("cause", "")]
    assert rank.has(1) == [False]
    assert rank.commit(1).accepted
    assert rank.has(1) == [True]
    assert store.report().counters["switched_off_total"] == 1
    assert store.events() == ["store_on", "namespace_opened", "store_off", "store_on"]


def test_a_disk_that_was_taken_away(make_store: MakeStore, tmp_path: Path) -> None:
    """Where the folder above is gone nothing is made in its place, until it is back."""
    store = make_store()
    rank = Rank(store)
    rank.commit(1)
    tmp_path.rename(tmp_path.with_name("away"))

    store.pass_time(60.0)
    assert not tmp_path.exists()
    assert "No such file or directory" in store.report().cause
    tmp_path.with_name("away").rename(tmp_path)
    store.pass_time(RETRY_LONGEST_S)

    assert rank.has(1) == [True]


def test_one_failure_is_one_failure(store: Store, rank: Rank) -> None:
    """What fails because the store is off already is not said again and postpones nothing."""
    for _ in range(5):
        rank.say(SpillFailed(detail="No space left on device"))
        store.handle(DirectoryUnusable("Input/output error"))

    assert store.events().count("store_off") == 1
    store.pass_time(1.0)
    assert store.report().on


def test_a_file_in_its_place(store: Store, rank: Rank) -> None:
    """A directory that became a file is off until it is gone, tried every few seconds."""
    shutil.rmtree(store.directory.path)
    store.directory.path.write_text("mine")

    store.pass_time(120.0)

    assert store.report().cause.endswith("choose another cache.directory.")
    assert store.directory.path.read_text() == "mine"
    assert store.events().count("store_off") == 2, "once when noticed, once with the new cause"
    store.directory.path.unlink()
    store.pass_time(RETRY_LONGEST_S)
    assert store.report().on


def test_what_a_rank_reports(store: Store, rank: Rank) -> None:
    """A rank that cannot write switches the store off at once; files are found again after."""
    rank.commit(1)

    rank.say(SpillFailed(detail="No space left on device"))

    assert store.report().cause == "A rank could not write: No space left on device"
    assert rank.has(1) == [False]
    store.pass_time(1.5)
    assert store.report().on
    assert rank.has(1) == [True]


def test_trials_become_rarer(store: Store, rank: Rank) -> None:
    """A directory that fails again and again is tried less often, at least every 20 s."""
    opened = []
    for _ in range(8):
        rank.say(SpillFailed(detail="Input/output error"))
        began_s = store.clock.now()
        while not store.report().on:
            store.pass_time(0.5)
        opened.append(store.clock.now() - began_s)

    assert opened == [1.0, 2.0, 4.0, 8.0, 16.0, 20.0, 20.0, 20.0]
    store.pass_time(61.0)
    rank.say(SpillFailed(detail="Input/output error"))
    store.pass_time(1.0)
    assert store.report().on, "a minute without trouble is forgiven"


@pytest.mark.parametrize(
    ("flag", "free", "says"),
    [(os.ST_RDONLY, 2**30, "Read-only file system"), (0, 2**23, "No space left on device")],
)
def test_what_the_disk_says(
    store: Store, rank: Rank, monkeypatch: pytest.MonkeyPatch, flag: int, free: int, says: str
) -> None:
    """A disk that became read-only or full is noticed by the probe, which writes nothing."""
    rank.commit(1)
    real = os.statvfs(store.directory.path)
    fields = list(real)
    fields[4] = free // real.f_frsize
    fields[8] |= flag
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))

    store.pass_time(0.5)
    assert says in store.report().cause
    if not flag:
        store.pass_time(60.0)
        assert says in store.report().cause
    monkeypatch.undo()
    store.pass_time(RETRY_LONGEST_S)

    assert rank.has(1) == [True]


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS, errno.ENOSPC, errno.EDQUOT])
def test_an_error_while_taking_over(
    store: Store, rank: Rank, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """An error in the middle of a commit: the rank hears no, the store goes off and comes back."""

    def fails(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "rename", fails)
    answer = rank.commit(1)

    assert not answer.accepted
    assert os.strerror(code) in answer.detail
    assert os.strerror(code) in store.report().cause
    monkeypatch.undo()
    store.pass_time(1.5)
    assert rank.commit(1).accepted
    assert rank.has(1) == [True]


def test_leftovers_of_the_time_off(store: Store, rank: Rank) -> None:
    """What was being written when the store went off is deleted before ranks are told to go on."""
    rank.say(SpillFailed(detail="No space left on device"))
    name, _ = rank.write(1)

    store.pass_time(1.5)

    assert not (Path(rank.folder) / name).exists()


def test_pins_outlast_the_time_off(make_store: MakeStore) -> None:
    """What is being read stays readable, and does not return when it was cleared before."""
    store = make_store()
    rank = Rank(store)
    rank.commit(1)
    query_id, _ = rank.locate(1)
    assert rank.tell(ClearBlocks(), BlocksCleared).records == 1
    rank.say(SpillFailed(detail="Input/output error"))

    store.pass_time(1.5)
    assert len(store.files()) == 1, "it is still being read"
    assert rank.has(1) == [False]
    rank.release(query_id)

    assert store.files() == []


def test_a_release_while_off(store: Store, rank: Rank) -> None:
    """What was cleared and is released while the store is off goes when it is on again."""
    rank.commit(1)
    query_id, _ = rank.locate(1)
    rank.tell(ClearBlocks(), BlocksCleared)
    rank.say(SpillFailed(detail="Input/output error"))

    rank.release(query_id)
    assert len(store.files()) == 1
    store.pass_time(1.5)

    assert store.files() == []


def test_peers_come_and_go_while_off(store: Store, rank: Rank) -> None:
    """A rank that comes while the store is off gets no folder, then its folder."""
    rank.say(SpillFailed(detail="No space left on device"))
    late = Rank(store, "late", rank=1, world_size=2)
    before = len(store.performed)
    rank.leave()

    assert late.folder == ""
    assert not any(isinstance(action, DeletePartials) for action in store.performed[before:])
    store.pass_time(1.5)
    folders = [
        send.message.folder
        for send in store.sent
        if send.peer == late.peer and isinstance(send.message, NamespaceOpened)
    ]
    assert folders[0] == ""
    assert folders[-1].endswith("rank-1-of-2")
    assert Path(folders[-1]).is_dir()


def test_it_opens_once_at_a_time(store: Store) -> None:
    """While the directory is being read, no second reading begins and no probe disturbs it."""
    store.handle(DirectoryUnusable("gone"))
    store.clock.advance(1.0)
    first = store.core.handle(TimePassed(), store.clock.now())
    store.clock.advance(100.0)
    second = store.core.handle(TimePassed(), store.clock.now())

    assert first == [OpenDirectory()]
    assert second == []
