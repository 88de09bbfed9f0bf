"""Process files: each names the process of a role and is valid only while that process lives."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared.os import process_file
from shared.os.process_file import ProcessFile, RoleProcess, delete_stale_files, find_processes
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[4]
HOLDER = (
    "import sys, time; from pathlib import Path; from shared.os.process_file import ProcessFile; "
    "file = ProcessFile(Path(sys.argv[1]), sys.argv[2], by_pid=len(sys.argv) > 3); "
    "print(file.path.name, flush=True); sys.stdin.read(); file.release()"
)

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a process that holds the file of a role until its standard input closes."""
    started: list[subprocess.Popen[str]] = []

    def run(role: str, *by_pid: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(tmp_path), role, *by_pid],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def _file_name(process: "subprocess.Popen[str]") -> str:
    """Return the name of the process file that the process has printed."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_role_is_found_by_process_file_until_its_process_ends(start: Start, tmp_path: Path) -> None:
    """The file names the process; a clean end removes the file."""
    process = start("scheduler")
    assert _file_name(process) == "scheduler.pid"

    assert find_processes(tmp_path, "scheduler") == [RoleProcess("scheduler", process.pid)]
    assert (tmp_path / "scheduler.pid").stat().st_mode & 0o777 == 0o600

    process.communicate()
    assert find_processes(tmp_path, "scheduler") == []
    assert list(tmp_path.iterdir()) == []


def test_restarted_service_reuses_process_file_of_killed_predecessor(
    start: Start, tmp_path: Path
) -> None:
    """After SIGKILL the file remains without a lock: no process is found, and the next one uses the
    file."""
    process = start("scheduler")
    _file_name(process)
    process.kill()
    process.wait()
    assert (tmp_path / "scheduler.pid").read_text() == f"{process.pid}\n"

    assert find_processes(tmp_path, "scheduler") == []
    follower = start("scheduler")
    assert _file_name(follower) == "scheduler.pid"
    assert find_processes(tmp_path, "scheduler") == [RoleProcess("scheduler", follower.pid)]


def test_role_is_found_while_its_process_is_stopped_by_signal(start: Start, tmp_path: Path) -> None:
    """A process that was stopped by SIGSTOP still holds its file."""
    process = start("gateway")
    _file_name(process)

    process.send_signal(signal.SIGSTOP)

    assert find_processes(tmp_path, "gateway") == [RoleProcess("gateway", process.pid)]


def test_second_process_of_role_writes_process_file_named_with_its_pid(
    start: Start, tmp_path: Path
) -> None:
    """A second gateway in one run folder has its process id in the file name; both are found."""
    first, second = start("gateway"), None
    _file_name(first)
    second = start("gateway")

    assert _file_name(second) == f"gateway.{second.pid}.pid"
    assert {holder.pid for holder in find_processes(tmp_path, "gateway")} == {first.pid, second.pid}


def test_search_finds_one_rank_by_number_and_all_by_prefix(start: Start, tmp_path: Path) -> None:
    """`rank` finds every rank; `rank-1` finds only that one, and not rank 10."""
    numbered = {role: start(role) for role in ("rank-1", "rank-10")}
    unnumbered = start("rank", "by pid")
    names = {_file_name(process) for process in (*numbered.values(), unnumbered)}

    assert names == {"rank-1.pid", "rank-10.pid", f"rank.{unnumbered.pid}.pid"}
    assert find_processes(tmp_path, "rank-1") == [RoleProcess("rank-1", numbered["rank-1"].pid)]
    assert len(find_processes(tmp_path, "rank")) == 3
    assert find_processes(tmp_path, "ran") == []


def test_cleanup_deletes_process_files_of_ended_processes_and_no_others(
    start: Start, tmp_path: Path
) -> None:
    """Files of ended processes and unfinished files are deleted; all other files stay."""
    alive, dead = start("gateway"), start("rank-0")
    _file_name(alive)
    _file_name(dead)
    dead.kill()
    dead.wait()
    (tmp_path / ".store.0123.pid").write_text("")
    (tmp_path / "config.toml").write_text("")

    delete_stale_files(tmp_path)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.toml", "gateway.pid"]
    assert find_processes(tmp_path, "gateway") == [RoleProcess("gateway", alive.pid)]


def test_process_locks_its_process_file_while_threads_search_for_running_services(
    tmp_path: Path,
) -> None:
    """A process can lock its file while other threads check again and again whether it is stale."""
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            find_processes(tmp_path, "store")

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            (tmp_path / "store.pid").write_text("1\n")
            file = ProcessFile(tmp_path, "store")
            assert file.path.name == "store.pid"
            file.release()
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_process_locks_stale_process_file_after_deadline_when_only_searches_held_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the deadline has passed but others only checked the file, one more attempt is made."""
    monkeypatch.setattr(process_file, "TAKE_S", 0.0)
    remove, others_check = process_file._remove_if_stale, iter([True] * 5)
    monkeypatch.setattr(
        process_file,
        "_remove_if_stale",
        lambda path: not next(others_check, False) and remove(path),
    )
    (tmp_path / "store.pid").write_text("1\n")

    file = ProcessFile(tmp_path, "store")

    assert file.path.name == "store.pid"
    file.release()


def test_search_finds_no_process_when_run_folder_is_missing(tmp_path: Path) -> None:
    """A search in a run folder that does not exist finds nothing and raises nothing."""
    assert find_processes(tmp_path / "nowhere", "scheduler") == []
    delete_stale_files(tmp_path / "nowhere")


def test_process_file_raises_os_error_when_run_folder_is_unwritable(tmp_path: Path) -> None:
    """The caller gets the error and decides whether to continue without a file."""
    with pytest.raises(OSError, match="nowhere"):
        ProcessFile(tmp_path / "nowhere", "scheduler")


def test_locked_process_file_with_invalid_content_names_no_process(tmp_path: Path) -> None:
    """A locked file with invalid content names no process, so that no signal reaches a wrong
    one."""
    for text in ("", "-1\n", "0x10\n", "self\n"):
        path = tmp_path / f"scheduler{process_file.SUFFIX}"
        path.write_text(text)
        with path.open() as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)

            assert find_processes(tmp_path, "scheduler") == []


def test_search_ignores_folder_or_dangling_link_named_like_process_file(tmp_path: Path) -> None:
    """A folder or a dangling link with the name of a process file is ignored and not deleted."""
    (tmp_path / "scheduler.pid").mkdir()
    (tmp_path / "gateway.pid").symlink_to(tmp_path / "nowhere")

    delete_stale_files(tmp_path)

    assert find_processes(tmp_path, "scheduler") == find_processes(tmp_path, "gateway") == []
    assert len(list(tmp_path.iterdir())) == 2


def test_deleted_process_file_is_written_again_with_its_facts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands find the process again after a cleaner has deleted the whole folder."""
    monkeypatch.setattr(process_file, "RESTORE_INTERVAL_S", 0.02)
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    file = ProcessFile(folder, "gateway", facts="{}")
    shutil.rmtree(folder)
    expected = [RoleProcess("gateway", os.getpid(), "{}")]
    wait_until(lambda: find_processes(folder, "gateway") == expected)
    file.release()
    assert find_processes(folder, "gateway") == []


def test_second_process_is_refused_where_only_one_may_have_the_name(
    start: Start, tmp_path: Path
) -> None:
    """The error names the process that has it."""
    process = start(process_file.SUPERVISOR)
    _file_name(process)
    with pytest.raises(process_file.NameTaken) as taken:
        ProcessFile(tmp_path, process_file.SUPERVISOR, is_only=True)
    assert taken.value.pid == process.pid
