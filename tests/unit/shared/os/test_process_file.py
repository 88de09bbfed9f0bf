"""The file that says which process a role is: it is believed only while that process lives."""

import fcntl
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared.os import process_file
from shared.os.process_file import ProcessFile, RoleProcess, delete_stale_files, find_processes

ROOT = Path(__file__).resolve().parents[4]
HOLDER = (
    "import sys, time; from pathlib import Path; from shared.os.process_file import ProcessFile; "
    "file = ProcessFile(Path(sys.argv[1]), sys.argv[2], by_pid=len(sys.argv) > 3); "
    "print(file.path.name, flush=True); sys.stdin.read(); file.release()"
)

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a process that holds a role's file until its standard input closes."""
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


def _name(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_role_is_found_while_it_lives(start: Start, tmp_path: Path) -> None:
    """The file names the process; after its end there is neither a holder nor a file."""
    process = start("scheduler")
    assert _name(process) == "scheduler.pid"

    assert find_processes(tmp_path, "scheduler") == [RoleProcess("scheduler", process.pid)]
    assert (tmp_path / "scheduler.pid").stat().st_mode & 0o777 == 0o600

    process.communicate()
    assert find_processes(tmp_path, "scheduler") == []
    assert list(tmp_path.iterdir()) == []


def test_a_killed_process_holds_nothing(start: Start, tmp_path: Path) -> None:
    """SIGKILL leaves the file and takes the lock: nobody is found, and the next one takes over."""
    process = start("scheduler")
    _name(process)
    process.kill()
    process.wait()
    assert (tmp_path / "scheduler.pid").read_text() == f"{process.pid}\n"

    assert find_processes(tmp_path, "scheduler") == []
    follower = start("scheduler")
    assert _name(follower) == "scheduler.pid"
    assert find_processes(tmp_path, "scheduler") == [RoleProcess("scheduler", follower.pid)]


def test_a_stopped_process_holds_its_file(start: Start, tmp_path: Path) -> None:
    """Who is stopped has not ended: it is still the one to be told."""
    process = start("gateway")
    _name(process)

    process.send_signal(signal.SIGSTOP)

    assert find_processes(tmp_path, "gateway") == [RoleProcess("gateway", process.pid)]


def test_a_second_one_may_run(start: Start, tmp_path: Path) -> None:
    """Two gateways in one run folder: the second has its process id in the name; both are found."""
    first, second = start("gateway"), None
    _name(first)
    second = start("gateway")

    assert _name(second) == f"gateway.{second.pid}.pid"
    assert {holder.pid for holder in find_processes(tmp_path, "gateway")} == {first.pid, second.pid}


def test_ranks_are_found_by_number_or_together(start: Start, tmp_path: Path) -> None:
    """`rank` finds every rank, numbered or any; `rank-1` only that one, and not rank 10."""
    numbered = {role: start(role) for role in ("rank-1", "rank-10")}
    anybody = start("rank", "by pid")
    names = {_name(process) for process in (*numbered.values(), anybody)}

    assert names == {"rank-1.pid", "rank-10.pid", f"rank.{anybody.pid}.pid"}
    assert find_processes(tmp_path, "rank-1") == [RoleProcess("rank-1", numbered["rank-1"].pid)]
    assert len(find_processes(tmp_path, "rank")) == 3
    assert find_processes(tmp_path, "ran") == []


def test_sweeping_takes_only_what_is_stale(start: Start, tmp_path: Path) -> None:
    """Files of the dead go, also half-made ones; those of the living and other files stay."""
    alive, dead = start("gateway"), start("rank-0")
    _name(alive)
    _name(dead)
    dead.kill()
    dead.wait()
    (tmp_path / ".store.0123.pid").write_text("")
    (tmp_path / "config.toml").write_text("")

    delete_stale_files(tmp_path)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.toml", "gateway.pid"]
    assert find_processes(tmp_path, "gateway") == [RoleProcess("gateway", alive.pid)]


def test_looking_does_not_keep_anybody_out(tmp_path: Path) -> None:
    """Whoever asks again and again whether a file is stale does not make it look held."""
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


def test_who_stood_still_looks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All the time to take it is over at once, and others were just looking: it is tried again."""
    monkeypatch.setattr(process_file, "TAKE_S", 0.0)
    remove, others_look = process_file._remove_if_stale, iter([True] * 5)
    monkeypatch.setattr(
        process_file, "_remove_if_stale", lambda path: not next(others_look, False) and remove(path)
    )
    (tmp_path / "store.pid").write_text("1\n")

    file = ProcessFile(tmp_path, "store")

    assert file.path.name == "store.pid"
    file.release()


def test_nobody_is_there_without_a_folder(tmp_path: Path) -> None:
    """Asking about a run folder that does not exist is an answer, not an error."""
    assert find_processes(tmp_path / "nowhere", "scheduler") == []
    delete_stale_files(tmp_path / "nowhere")


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """The caller is told, and decides whether to go on without."""
    with pytest.raises(OSError, match="nowhere"):
        ProcessFile(tmp_path / "nowhere", "scheduler")


def test_content_that_is_no_process(tmp_path: Path) -> None:
    """A file that somebody holds and that names no process is nobody's: no signal goes astray."""
    for text in ("", "-1\n", "0x10\n", "self\n"):
        path = tmp_path / f"scheduler{process_file.SUFFIX}"
        path.write_text(text)
        with path.open() as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)

            assert find_processes(tmp_path, "scheduler") == []


def test_what_is_no_file_is_nobody(tmp_path: Path) -> None:
    """A folder or a dangling link of such a name is passed over, and stays."""
    (tmp_path / "scheduler.pid").mkdir()
    (tmp_path / "gateway.pid").symlink_to(tmp_path / "nowhere")

    delete_stale_files(tmp_path)

    assert find_processes(tmp_path, "scheduler") == find_processes(tmp_path, "gateway") == []
    assert len(list(tmp_path.iterdir())) == 2
