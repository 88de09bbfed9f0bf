"""The cache store process: lock, signals, restarts, disk errors."""

import contextlib
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared import limits
from shared.messages import (
    DocumentKept,
    DocumentRead,
    FromStore,
    KeepDocument,
    QueryStore,
    ReadDocument,
    SpillFailed,
    StoreReported,
)
from shared.os.lifeline import VARIABLE
from shared.transport.links import Dialer, Lost, Received
from tests.cache_store.conftest import MakePeer
from tests.cache_store.running_store import DEADLINE_S, ROOT, Peer, RunningStore
from tests.cache_store.small_disk import mount_small_disk, unmount
from tests.support.waiting import poll_until, wait_until
from tests.unit.cache_store.harness import block_hash

OFF_S, ON_S = 1.0, 60.0
SLACK_S = 4.0
"""Seconds that a process may be delayed by other tests on both cores."""

WAIT_FOR_LOCK_SCRIPT = f"""
import sys
from services.commands import main as cli
from services.cache_store import main
main.CLAIM_WAIT_S, claim = {DEADLINE_S}, main._claim
main._claim = lambda directory: print("asks for the lock", flush=True) or claim(directory)
sys.exit(cli.main())
"""
"""A store that prints when it asks for the lock, and waits for it as long as a test may take."""


def test_restarted_cache_store_locates_kv_blocks_of_each_rank(
    store: RunningStore, make_peer: MakePeer
) -> None:
    """After SIGTERM and a restart each rank locates its own blocks."""
    peers = [make_peer(rank, 2) for rank in range(2)]
    for number in range(4):
        for peer in peers:
            answer = peer.commit(block_hash(2 * number), block_hash(2 * number + 1))
            assert answer is not None
            assert answer.accepted, answer.detail
    assert store.stop() == limits.EXIT_OK

    store.start()
    for peer in peers:
        peer.folder = ""
        peer.connect()

    assert [peer.has(*map(block_hash, range(9))) for peer in peers] == [[True] * 8 + [False]] * 2
    assert peers[0].report().records == 16


def test_large_documents_asked_for_at_once_all_arrive_and_delay_no_other_answer(
    store: RunningStore, peer: Peer
) -> None:
    """Nine documents of 16 MB are more than a link holds; the peer gets them one after another."""
    gateway: Dialer[FromStore] = Dialer(store.address, "gateway", FromStore)
    answers: list[FromStore] = []

    def poll() -> None:
        for event in gateway.poll(0.05):
            assert not isinstance(event, Lost), event
            if isinstance(event, Received):
                answers.append(event.message)

    def wait_for(condition: Callable[[], bool], failure: str) -> None:
        poll_until(poll, condition, DEADLINE_S, failure=failure)

    wait_for(lambda: gateway.is_connected, "the store is not connected")
    names = [f"resp_{number}" for number in range(9)]
    for name in names:
        gateway.send(KeepDocument(owner="aa" * 16, name=name, data=name.encode() * 2_000_000))
        wait_for(lambda: len(answers) == 1, "a document is not kept")
        assert isinstance(kept := answers.pop(), DocumentKept)
        assert kept.accepted, kept.detail
    for number, name in enumerate(names):
        gateway.send(ReadDocument(query_id=number, owner="aa" * 16, name=name))
    gateway.send(QueryStore())
    wait_for(lambda: len(answers) == 10, "not all documents arrive")
    gateway.close()
    assert any(isinstance(answer, StoreReported) for answer in answers[:-1])
    read = [answer for answer in answers if isinstance(answer, DocumentRead)]
    assert [answer.query_id for answer in read] == list(range(9))
    assert all(answer.data for answer in read)


def test_second_cache_store_exits_with_78_while_first_one_serves(
    store: RunningStore, peer: Peer
) -> None:
    """A second store exits with 78 and names the first one's process id; the first one keeps
    serving."""
    done = store.command("cache-store")

    assert store.process is not None
    assert done.returncode == limits.EXIT_CONFIG
    (line,) = done.stderr.splitlines()
    assert f"process {store.process.pid}" in line
    assert "cache.directory" in line
    assert peer.commit(block_hash(1)) is not None
    assert peer.has(block_hash(1)) == [True]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"CACHE_SSD": "false"}, "cache.ssd is off"),
        ({"CACHE_ENABLED": "false"}, "cache.enabled is off"),
        ({"CACHE_STORE_ADDRESS": "tcp://0.0.0.0:1"}, "loopback"),
        ({"CACHE_DIRECTORY": "/dev/null"}, "is not a folder"),
        ({"CACHE_DIRECTORY": "/dev/null/inner"}, "is not a folder"),
    ],
)
def test_cache_store_with_invalid_setting_exits_with_78_and_one_sentence(
    home: Path, settings: dict[str, str], message: str
) -> None:
    """A setting with which no store can run is exit code 78 and one sentence."""
    store = RunningStore(home, **settings)

    done = store.command("cache-store")

    assert (done.returncode, len(done.stderr.splitlines())) == (limits.EXIT_CONFIG, 1)
    assert message in done.stderr
    store.close()


def test_starting_cache_store_waits_for_lock_of_ending_store(home: Path) -> None:
    """A store waits a short time for a lock that another process still holds."""
    (home / "blocks").mkdir(mode=0o700)
    script = (
        "import sys, pathlib; from services.cache_store.files.directory import Directory\n"
        "directory = Directory(pathlib.Path(sys.argv[1]), 0, ''); directory.claim()\n"
        "print('held', flush=True); sys.stdin.readline()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(home / "blocks")],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        store = RunningStore(home)
        store.program = ("-c", WAIT_FOR_LOCK_SCRIPT)
        store.start()
        wait_until(lambda: "asks for the lock" in store.text, DEADLINE_S)
        process.stdin.close()
        peer = Peer(store)
        peer.connect()
    peer.close()
    store.close()


def test_cache_store_ends_when_its_parent_is_killed(store: RunningStore, peer: Peer) -> None:
    """When the parent is killed its lifeline closes and the store ends."""
    script = (
        "import os, subprocess, sys\n"
        "read, write = os.pipe()\n"
        f"env = {{**os.environ, {VARIABLE!r}: str(read)}}\n"
        "command = [sys.executable, '-m', 'services.commands.main', 'cache-store']\n"
        "child = subprocess.Popen(command, env=env, pass_fds=[read], stderr=sys.stderr)\n"
        "print(child.pid, flush=True); sys.stdin.readline(); os._exit(0)"
    )
    assert store.stop() == limits.EXIT_OK
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, env=store.environment,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as parent:  # fmt: skip
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        peer.folder = ""
        peer.connect()
        parent.kill()

    wait_until(lambda: not _is_running(pid), DEADLINE_S, poll_s=0.05)


def _is_running(pid: int) -> bool:
    done = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return bool(done.stdout.strip()) and not done.stdout.startswith("Z")


def test_partial_files_are_deleted_when_rank_disconnects_from_store(
    store: RunningStore, make_peer: MakePeer
) -> None:
    """When a rank leaves, its partial files are deleted and its committed files stay."""
    leaving = make_peer()
    staying = make_peer(1, 2)
    leaving.commit(block_hash(1))
    request = leaving.write(block_hash(2))
    path = Path(leaving.folder) / request.name

    leaving.close()

    staying.poll_until(lambda: not path.exists(), failure="the partial file is not deleted")
    assert len(list(path.parent.iterdir())) == 1, "the committed file stays"


# --- disk errors ---------------------------------------------------------------------------------


@contextlib.contextmanager
def _deleted(store: RunningStore, peer: Peer) -> Iterator[None]:
    shutil.rmtree(store.directory)
    yield


@contextlib.contextmanager
def _replaced_by_a_file(store: RunningStore, peer: Peer) -> Iterator[None]:
    shutil.rmtree(store.directory)
    store.directory.write_text("mine")
    yield
    store.directory.unlink()


@contextlib.contextmanager
def _file_size_limit(store: RunningStore, peer: Peer) -> Iterator[None]:
    """Limit the size of the store's files, which fails writes as a disk quota does."""
    if not hasattr(resource, "prlimit"):
        peer.send(SpillFailed(detail="File too large"))
        yield
        return
    assert store.process is not None
    resource.prlimit(store.process.pid, resource.RLIMIT_FSIZE, (4_096, resource.RLIM_INFINITY))
    peer.send(SpillFailed(detail="File too large"))
    yield
    cause = "The directory cannot be used: File too large"
    peer.poll_until(lambda: cause in store.text, failure="the limit is not noticed")
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    resource.prlimit(store.process.pid, resource.RLIMIT_FSIZE, unlimited)


DiskError = Callable[[RunningStore, Peer], "contextlib.AbstractContextManager[None]"]


@pytest.mark.proof
@pytest.mark.parametrize("disk_error", [_deleted, _replaced_by_a_file, _file_size_limit])
def test_cache_store_switches_off_within_a_second_of_disk_error(
    store: RunningStore, peer: Peer, disk_error: DiskError
) -> None:
    """Ranks are told at once, every request is refused, and the store is on again afterwards."""
    _check_disk_error(store, peer, disk_error)


def _check_disk_error(store: RunningStore, peer: Peer, disk_error: DiskError) -> None:
    assert peer.commit(block_hash(1)) is not None
    assert peer.has(block_hash(1)) == [True]
    peer.reports.clear()
    with disk_error(store, peer):
        assert peer.wait_for_notice(on=False, deadline_s=OFF_S + SLACK_S) < OFF_S + SLACK_S
        assert peer.has(block_hash(1)) == [False]
        peer.poll(0.1)
        report = peer.report()
        assert report.cause or report.on
        assert store.process is not None
        assert store.process.poll() is None
    # The notice that it is on may have come before, so the state is queried.
    peer.poll_until(lambda: peer.report().on, ON_S, failure="the store stays off")
    peer.connect()
    answer = peer.commit(block_hash(2))
    assert answer is not None
    assert answer.accepted, answer.detail
    assert peer.has(block_hash(2)) == [True]
    assert store.text.count("store_off") >= 1


@pytest.fixture
def disk_store(home: Path) -> Iterator[tuple[RunningStore, Peer] | None]:
    """Return a store on a disk of 64 MiB, not started, and a peer; None if mounting fails."""
    disk = home / "disk"
    disk.mkdir()
    if not mount_small_disk(disk):
        yield None
        return
    store = RunningStore(home, CACHE_DIRECTORY=str(disk / "blocks"))
    store.directory = disk / "blocks"
    peer = Peer(store)
    yield store, peer
    peer.close()
    store.close()
    unmount(disk)


@contextlib.contextmanager
def _filled_disk(store: RunningStore, peer: Peer) -> Iterator[None]:
    filler = store.directory.parent / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(2**20))
    yield
    filler.unlink()


def test_cache_store_switches_off_when_disk_fills_up(
    disk_store: tuple[RunningStore, Peer] | None,
) -> None:
    """A disk of 64 MiB that fills up switches the store off; freed space switches it on.

    Where mounting is not permitted, `_file_size_limit` above stands in for it.
    """
    if disk_store is None:
        return
    store, peer = disk_store
    store.start()
    peer.connect()
    assert 15 * 2**20 < peer.report().bytes_max <= 16 * 2**20
    _check_disk_error(store, peer, _filled_disk)
    assert peer.has(block_hash(1), block_hash(2)) == [True, True]


def test_cache_store_starts_switched_off_on_full_or_read_only_disk(
    disk_store: tuple[RunningStore, Peer] | None,
) -> None:
    """On a full or read-only disk the store starts off, reports the cause, and is on later."""
    if disk_store is None:
        return
    store, peer = disk_store
    unusable = "The directory cannot be used: "
    with _filled_disk(store, peer):
        store.start()
        assert _cause_after_start(peer) == f"{unusable}No space left on device."
    peer.connect()
    store.kill()
    disk = str(store.directory.parent)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    store.start()
    assert _cause_after_start(peer) == f"{unusable}Read-only file system."
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
    peer.connect(deadline_s=ON_S)
    assert peer.commit(block_hash(1)) is not None


def _cause_after_start(peer: Peer) -> str:
    """Return why a store that was just started is off."""
    sessions = peer.sessions
    peer.folder = ""
    peer.poll_until(lambda: peer.sessions > sessions, failure="the store does not connect")
    wait_until(lambda: peer.report().cause != "The store is starting.", DEADLINE_S)
    report = peer.reports[-1]
    assert (report.on, peer.folder) == (False, "")
    return report.cause


def test_cache_store_resets_read_only_directory_to_mode_0700(home: Path) -> None:
    """The store's own directory with a read-only mode gets its mode 0700 back."""
    (home / "blocks").mkdir(mode=0o500)
    store = RunningStore(home)
    store.start()
    peer = Peer(store)
    peer.connect()

    assert peer.commit(block_hash(1)) is not None
    assert (home / "blocks").stat().st_mode & 0o777 == 0o700
    peer.close()
    store.close()
    assert os.access(home, os.W_OK)
