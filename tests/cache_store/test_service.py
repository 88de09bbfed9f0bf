"""The cache store as a process: one owner, its signals, its restarts, its bad days."""

import contextlib
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared import limits
from shared.messages import SpillFailed
from shared.os.lifeline import VARIABLE
from tests.cache_store.conftest import MakePeer
from tests.cache_store.running_store import DEADLINE_S, ROOT, Peer, RunningStore, block_hash

OFF_S, ON_S = 1.0, 60.0
SLACK_S = 4.0
"""Two cores that other tests keep busy hold a process up for seconds."""

PATIENT = f"""
import sys
from services.commands import main as cli
from services.cache_store import main
main.CLAIM_WAIT_S, claim = {DEADLINE_S}, main._claim
main._claim = lambda directory: print("asks for the lock", flush=True) or claim(directory)
sys.exit(cli.main())
"""
"""A store that says when it asks for its directory, and waits longer than a held-up test may."""


def test_blocks_outlive_the_process(store: RunningStore, make_peer: MakePeer) -> None:
    """What was committed is found after SIGTERM and a new start, by every rank its own."""
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


def test_a_second_store_refuses(store: RunningStore, peer: Peer) -> None:
    """Exit code 78, the holder's process id in one sentence, and the first one serves on."""
    done = store.command("cache-store")

    assert store.process is not None
    assert done.returncode == limits.EXIT_CONFIG
    (line,) = done.stderr.splitlines()
    assert f"process {store.process.pid}" in line
    assert "cache.directory" in line
    assert peer.commit(block_hash(1)) is not None
    assert peer.has(block_hash(1)) == [True]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"CACHE_SSD": "false"}, "cache.ssd is off"),
        ({"CACHE_ENABLED": "false"}, "cache.enabled is off"),
        ({"CACHE_STORE_ADDRESS": "tcp://0.0.0.0:1"}, "loopback"),
        ({"CACHE_DIRECTORY": "/dev/null"}, "is not a folder"),
        ({"CACHE_DIRECTORY": "/dev/null/inner"}, "is not a folder"),
    ],
)
def test_what_can_never_work_is_said_at_once(
    home: Path, settings: dict[str, str], says: str
) -> None:
    """A setting that contradicts itself: exit code 78 and one sentence."""
    store = RunningStore(home, **settings)

    done = store.command("cache-store")

    assert (done.returncode, len(done.stderr.splitlines())) == (limits.EXIT_CONFIG, 1)
    assert says in done.stderr
    store.close()


def test_a_killed_predecessor_is_waited_for(home: Path) -> None:
    """A lock that is let go within a moment is no reason to refuse."""
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
        store.program = ("-c", PATIENT)
        store.start()
        until_s = time.monotonic() + DEADLINE_S
        while "asks for the lock" not in store.text:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        process.stdin.close()
        peer = Peer(store)
        peer.connect()
    peer.close()
    store.close()


def test_it_ends_with_its_parent(store: RunningStore, peer: Peer) -> None:
    """When the lifeline closes nobody stays behind."""
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

    until_s = time.monotonic() + DEADLINE_S
    while _is_running(pid):
        assert time.monotonic() < until_s
        time.sleep(0.05)


def _is_running(pid: int) -> bool:
    done = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return bool(done.stdout.strip()) and not done.stdout.startswith("Z")


def test_what_a_lost_rank_left_is_deleted(store: RunningStore, make_peer: MakePeer) -> None:
    """Goodbye, and what it was writing is gone; a rank that comes later finds no rest either."""
    leaves = make_peer()
    stays = make_peer(1, 2)
    leaves.commit(block_hash(1))
    order = leaves.write(block_hash(2))
    path = Path(leaves.folder) / order.name

    leaves.close()

    until_s = time.monotonic() + DEADLINE_S
    while path.exists():
        assert time.monotonic() < until_s
        stays.poll(0.05)
    assert len(list(path.parent.iterdir())) == 1, "what was committed stays"


# --- bad days ------------------------------------------------------------------------------------


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
def _refuses_large_files(store: RunningStore, peer: Peer) -> Iterator[None]:
    """A limit of the process is to it what a quota is: a rank's write fails, then its own."""
    if not hasattr(resource, "prlimit"):
        peer.say(SpillFailed(detail="File too large"))
        yield
        return
    assert store.process is not None
    resource.prlimit(store.process.pid, resource.RLIMIT_FSIZE, (4_096, resource.RLIM_INFINITY))
    peer.say(SpillFailed(detail="File too large"))
    yield
    until_s = time.monotonic() + DEADLINE_S
    while "The directory cannot be used: File too large" not in store.text:
        assert time.monotonic() < until_s
        peer.poll(0.05)
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    resource.prlimit(store.process.pid, resource.RLIMIT_FSIZE, unlimited)


Trouble = Callable[[RunningStore, Peer], "contextlib.AbstractContextManager[None]"]


@pytest.mark.proof
@pytest.mark.parametrize("trouble", [_deleted, _replaced_by_a_file, _refuses_large_files])
def test_off_within_a_second_and_on_again(
    store: RunningStore, peer: Peer, trouble: Trouble
) -> None:
    """The rank is told at once, gets a clean no to everything, and goes on when it is over."""
    _check_bad_day(store, peer, trouble)


def _check_bad_day(store: RunningStore, peer: Peer, trouble: Trouble) -> None:
    assert peer.commit(block_hash(1)) is not None
    assert peer.has(block_hash(1)) == [True]
    peer.reports.clear()
    with trouble(store, peer):
        assert peer.wait_for(on=False, deadline_s=OFF_S + SLACK_S) < OFF_S + SLACK_S
        assert peer.has(block_hash(1)) == [False]
        peer.poll(0.1)
        report = peer.report()
        assert report.cause or report.on
        assert store.process is not None
        assert store.process.poll() is None
    # Asked, not waited for: it may have said long ago that it is on again.
    until_s = time.monotonic() + ON_S
    while not peer.report().on:
        assert time.monotonic() < until_s
        peer.poll(0.05)
    peer.connect()
    answer = peer.commit(block_hash(2))
    assert answer is not None
    assert answer.accepted, answer.detail
    assert peer.has(block_hash(2)) == [True]
    assert store.text.count("store_off") >= 1


def _mount(folder: Path, *options: str) -> bool:
    """Mount memory as a small disk, where that is allowed."""
    folder.mkdir(exist_ok=True)
    command = ["mount", *options, str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        return False
    return done.returncode == 0


def test_a_small_disk(home: Path) -> None:
    """A disk of 64 MiB that fills up while the store runs.

    Where nothing may be mounted, `_refuses_large_files` above stands for it.
    """
    disk = home / "disk"
    if sys.platform != "linux" or not _mount(disk, "-t", "tmpfs", "-o", "size=64m", "tmpfs"):
        return
    store = RunningStore(home, CACHE_DIRECTORY=str(disk / "blocks"))
    store.directory = disk / "blocks"
    peer = Peer(store)
    try:
        store.start()
        peer.connect()
        assert 15 * 2**20 < peer.report().bytes_max <= 16 * 2**20
        _check_bad_day(store, peer, _full)
        assert peer.has(block_hash(1), block_hash(2)) == [True, True]
    finally:
        peer.close()
        store.close()
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@contextlib.contextmanager
def _full(store: RunningStore, peer: Peer) -> Iterator[None]:
    filler = store.directory.parent / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(2**20))
    yield
    filler.unlink()


def test_a_start_on_a_bad_disk(home: Path) -> None:
    """Full or read-only at start: no exit, but off and saying why; on when that is over."""
    disk = home / "disk"
    if sys.platform != "linux" or not _mount(disk, "-t", "tmpfs", "-o", "size=64m", "tmpfs"):
        return
    store = RunningStore(home, CACHE_DIRECTORY=str(disk / "blocks"))
    store.directory = disk / "blocks"
    peer = Peer(store)
    try:
        with _full(store, peer):
            store.start()
            assert _cause(peer) == "The directory cannot be used: No space left on device."
        peer.connect()
        store.kill()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        store.start()
        assert _cause(peer) == "The directory cannot be used: Read-only file system."
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        peer.connect(deadline_s=ON_S)
        assert peer.commit(block_hash(1)) is not None
    finally:
        peer.close()
        store.close()
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def _cause(peer: Peer) -> str:
    """Return why a store that has just been started is off."""
    until_s = time.monotonic() + DEADLINE_S
    sessions = peer.sessions
    peer.folder = ""
    while peer.sessions == sessions:
        assert time.monotonic() < until_s
        peer.poll(0.05)
    while (report := peer.report()).cause == "The store is starting.":
        assert time.monotonic() < until_s
    assert (report.on, peer.folder) == (False, "")
    return report.cause


def test_a_read_only_folder(home: Path) -> None:
    """A folder of ours whose mode forbids writing is opened by giving it back its mode."""
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
