"""The store's directory: ownership, lock, foreign files and default limit."""

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from services.cache_store.files import directory as directory_module
from services.cache_store.files.directory import (
    Directory,
    DirectoryHeld,
    default_bytes_max,
)
from shared import limits
from shared.errors import ConfigError
from tests.unit.cache_store.conftest import MakeStore
from tests.unit.cache_store.harness import NAMESPACE, NO_LIMIT, RECORD_BYTES, Rank, Store


def _claim(path: Path) -> Directory:
    directory = Directory(path, 0, "ipc:///tmp/store.sock")
    directory.claim()
    return directory


def test_cache_directory_is_created_or_changed_to_mode_0700(tmp_path: Path) -> None:
    """Parents are created; the directory gets mode 0700 even if it had another one."""
    path = tmp_path / "a" / "b"
    _claim(path).release()
    assert stat.S_IMODE(path.stat().st_mode) == 0o700

    path.chmod(0o755)
    _claim(path).release()

    assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_second_store_is_refused_cache_directory_until_first_releases_it(tmp_path: Path) -> None:
    """The refusal names the owner's process id and address; a released directory can be claimed."""
    first = _claim(tmp_path / "blocks")
    first.claim()

    with pytest.raises(DirectoryHeld, match=f"process {os.getpid()}") as refused:
        _claim(tmp_path / "blocks")

    assert refused.value.exit_code == limits.EXIT_CONFIG
    assert refused.value.address == "ipc:///tmp/store.sock"
    first.release()
    _claim(tmp_path / "blocks").release()


def test_cache_directory_can_be_claimed_after_its_owner_is_killed(tmp_path: Path) -> None:
    """The kernel releases the lock of a killed process; the lock file's content does not matter."""
    path = tmp_path / "blocks"
    script = (
        "import sys, pathlib; from services.cache_store.files.directory import Directory\n"
        "Directory(pathlib.Path(sys.argv[1]), 0, '').claim(); print('held', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)],
        cwd=Path(__file__).resolve().parents[3],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(DirectoryHeld, match=f"process {process.pid}"):
            _claim(path)
        process.kill()

    _claim(path).release()


def test_file_at_cache_directory_path_raises_config_error(tmp_path: Path) -> None:
    """A file at the directory's path or in place of a parent is reported and not changed."""
    (tmp_path / "blocks").write_text("mine")

    for path in (tmp_path / "blocks", tmp_path / "blocks" / "inner"):
        with pytest.raises(ConfigError, match=r"is not a folder.*cache\.directory"):
            _claim(path)

    assert (tmp_path / "blocks").read_text() == "mine"


def test_cache_directory_owned_by_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's folder is refused and not changed."""
    path = tmp_path / "blocks"
    path.mkdir(0o755)
    monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)

    with pytest.raises(ConfigError, match="belongs to another user"):
        _claim(path)

    assert stat.S_IMODE(path.stat().st_mode) == 0o755
    assert list(path.iterdir()) == []


def test_cache_directory_with_foreign_files_is_refused_when_other_users_can_read_it(
    tmp_path: Path,
) -> None:
    """A folder that other users may read and that holds foreign files is refused and stays
    unchanged."""
    path = tmp_path / "home"
    path.mkdir(0o755)
    (path / "letter.txt").write_text("dear")

    with pytest.raises(ConfigError, match="choose an empty"):
        _claim(path)

    assert stat.S_IMODE(path.stat().st_mode) == 0o755
    assert [entry.name for entry in path.iterdir()] == ["letter.txt"]


def test_cache_directory_is_refused_when_its_lock_file_is_symbolic_link(tmp_path: Path) -> None:
    """A symbolic link in place of the lock file is not followed, and its target is not changed."""
    path = tmp_path / "blocks"
    path.mkdir(0o700)
    (tmp_path / "letter").write_text("dear")
    (path / "lockstep.lock").symlink_to(tmp_path / "letter")

    with pytest.raises(OSError, match="symbolic"):
        _claim(path)

    assert (tmp_path / "letter").read_text() == "dear"


def test_creating_cache_directory_raises_config_error_only_without_permission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missing permission raises ConfigError; a read-only disk raises OSError."""
    for code, error in ((errno.EACCES, ConfigError), (errno.EROFS, OSError)):

        def fail(*_: object, code: int = code, **__: object) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(Path, "mkdir", fail)
        with pytest.raises(error):
            _claim(tmp_path / "blocks")


def test_foreign_files_in_cache_directory_are_kept_counted_and_logged_once(
    make_store: MakeStore, tmp_path: Path
) -> None:
    """Foreign files stay, are counted and are logged once; a foreign folder counts as one."""
    rank = Rank(make_store())
    rank.commit(1)
    folder = Path(rank.folder)
    directory = tmp_path / "blocks"
    foreign = [
        directory / "letter.txt",
        directory / "photos" / "one.jpg",
        directory / "abc" / "readme",
        folder.parent / "rank-x-of-1" / "file",
        folder.parent / "rank-3-of-2" / "file",
        folder / "notes.txt",
        folder / f"{'0' * 64}.blocks.bak",
        folder / f"{'1' * 64}.blocks" / "inner",
    ]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    (folder / f"{'2' * 64}.blocks").symlink_to(directory / "letter.txt")
    (directory / ("cd" * 32)).symlink_to(tmp_path)

    store = make_store()
    store.advance_time(10.0)

    report = store.report()
    assert report.foreign_files == len(foreign) + 2
    assert (report.records, report.bytes_used) == (1, RECORD_BYTES)
    assert store.log_events().count("foreign_files_left_alone") == 1
    assert all(path.read_text() == "mine" for path in foreign)
    rank = Rank(store)
    assert rank.has(1) == [True]


def test_cache_store_quarantines_incomplete_block_files_at_start(make_store: MakeStore) -> None:
    """A file whose headers do not match its size is quarantined and counted at start."""
    rank = Rank(make_store())
    for number in range(5):
        rank.commit(number)
    for number, file in enumerate(rank.store.files()):
        data = file.read_bytes()
        if number < 4:
            file.write_bytes((b"", data[:-1], bytes(len(data)), data + b"\0")[number])

    store = make_store()

    assert Rank(store).has(0, 1, 2, 3, 4) == [False] * 4 + [True]
    assert len(list((store.directory.path / "quarantine").iterdir())) == 4
    report = store.report()
    assert report.counters["quarantined_torn_total"] == 3
    assert report.counters["quarantined_damaged_total"] == 1
    assert "files_quarantined" in store.log_events()


def test_block_files_of_other_format_version_stay_until_evicted(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of another format version are not damage: they stay until their room is needed."""
    monkeypatch.setattr(limits, "RECORD_FORMAT_VERSION", 2)
    Rank(make_store()).commit(1)
    monkeypatch.undo()

    store = make_store(bytes_max=RECORD_BYTES)
    report = store.report()
    assert (report.records, report.bytes_used) == (0, RECORD_BYTES)
    rank = Rank(store)
    assert rank.has(1) == [False]

    assert rank.commit(2).accepted
    assert len(store.files()) == 1


def test_block_file_moved_into_folder_of_other_rank_is_quarantined(make_store: MakeStore) -> None:
    """A file that was moved into another rank's folder is not located there."""
    store = make_store()
    rank, other = Rank(store, rank=0, world_size=2), Rank(store, "other", rank=1, world_size=2)
    rank.commit(1)
    (file,) = store.files()
    file.rename(Path(other.folder) / file.name)

    store = make_store()

    assert Rank(store, rank=1, world_size=2).has(1) == [False]
    assert store.report().counters["quarantined_identity_total"] == 1


@pytest.mark.parametrize(
    ("free", "expected"),
    [(0, 0), (400, 100), (8 * limits.STORE_BYTES_DEFAULT_MAX, limits.STORE_BYTES_DEFAULT_MAX)],
)
def test_default_cache_size_limit_is_quarter_of_free_space(free: int, expected: int) -> None:
    """The default limit is a quarter of the free space, at most 100 GiB."""
    assert default_bytes_max(free) == expected


def test_default_cache_size_limit_counts_own_files_as_free_space(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store's own files count as free space, so that restarts do not lower the limit."""
    store = make_store(bytes_max=0)
    monkeypatch.setattr(Directory, "_free_bytes", lambda _: 2**30)
    Rank(store).commit(1, 2, 3)

    assert make_store(bytes_max=0).report().bytes_max == (2**30 + 3 * RECORD_BYTES) // 4


def test_cache_store_indexes_all_of_hundreds_of_files_at_start(
    tmp_path: Path, make_store: MakeStore
) -> None:
    """Hundreds of files in several folders are all indexed at start."""
    store = make_store()
    ranks = [
        Rank(store, f"r{number}", rank=number, world_size=3, namespace=NAMESPACE)
        for number in range(3)
    ]
    for number in range(0, 600, 2):
        for rank in ranks:
            rank.commit(number, number + 1)

    store = make_store()

    assert store.report().records == 1_800
    assert Rank(store, rank=2, world_size=3).has(*range(600)) == [True] * 600


def test_periodic_disk_check_writes_nothing_to_cache_directory(store: Store) -> None:
    """The probe runs twice a second and does not write to the disk."""
    before = store.directory.path.stat().st_mtime_ns

    store.advance_time(30.0)

    assert store.directory.path.stat().st_mtime_ns == before


def test_cache_store_starts_switched_off_when_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk the store starts switched off and reports the cause."""
    monkeypatch.setattr(Directory, "_free_bytes", lambda _: directory_module.FREE_BYTES_AGAIN - 1)
    store = Store(tmp_path / "blocks", NO_LIMIT)

    assert store.report().cause == "The directory cannot be used: No space left on device."
    assert store.log_events() == ["store_off"]
    store.close()
