"""The scheduler as a process: what signals do to it, over real sockets."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from services.scheduler.main import Shell
from shared.configuration.loading import config_from_tree
from shared.errors import ConfigError
from shared.messages import (
    JoinWorld,
    LeaveWorld,
    QueryStatus,
    RankHello,
    RankReady,
    RequestAccepted,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    Sampling,
    StatusReported,
    StepPlan,
    SubmitRequest,
    ToGateway,
    ToRank,
)
from shared.transport.links import Connected, Dialer, Received

WAIT_S = 30.0

SELDOM_TICKS = """
import sys
from services.commands import main as cli
from services.scheduler import main
main._TICK_S = 3_600.0
sys.argv = ["lockstep", "scheduler"]
cli.main()
"""
"""A scheduler that wakes up for events, and for nothing else but what it has set itself."""

Connect = Callable[[str, object], "Peer"]


class Peer:
    """One end of a link to the scheduler, and everything that it heard."""

    def __init__(self, folder: Path, name: str, receives: object, everybody: "list[Peer]") -> None:
        role = "rank" if name == "ranks" else "gateway"
        self.dialer: Dialer[msgspec.Struct] = Dialer(f"ipc://{folder}/{name}.sock", role, receives)
        self.heard: list[object] = []
        self._everybody = everybody

    def wait_for(self, kind: type, count: int = 1) -> object:
        """Wait until so many of a kind were heard; return the last."""
        until_s = time.monotonic() + WAIT_S
        while True:
            found = [one for one in self.heard if isinstance(one, kind)]
            if len(found) >= count:
                return found[-1]
            assert time.monotonic() < until_s, (kind, self.heard)
            # All of them: who does not read does not acknowledge either.
            for peer in self._everybody:
                peer.take()

    def take(self) -> None:
        """Read what has arrived."""
        for event in self.dialer.poll(0.02):
            self.heard.append(event.message if isinstance(event, Received) else event)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="ls-") as name:
        yield Path(name)


@pytest.fixture
def connect(folder: Path) -> Iterator[Connect]:
    """Connect to the scheduler by the name of a link; leave at the end."""
    peers: list[Peer] = []

    def begin(name: str, receives: object) -> Peer:
        peers.append(Peer(folder, name, receives, peers))
        return peers[-1]

    yield begin
    for peer in peers:
        peer.dialer.close(0.0)


@pytest.fixture
def scheduler(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start the role by itself; end it by its id."""
    command = (sys.executable, "-m", "services.commands.main", "scheduler")
    settings = {"LOCKSTEP_PATHS_RUN_DIR": str(folder), "LOCKSTEP_WORLD_SIZE": "1"}
    with subprocess.Popen(
        command, env={**os.environ, **settings}, stderr=subprocess.DEVNULL
    ) as process:
        yield process
        process.kill()


def _begin(connect: Connect, *, more_requests_expected: bool = False) -> tuple[Peer, Peer]:
    """Bring up one rank and submit a request; return gateway and rank with a plan underway."""
    rank, gateway = connect("ranks", ToRank), connect("gateways", ToGateway)
    rank.wait_for(Connected)
    gateway.wait_for(Connected)
    rank.dialer.send(
        RankHello(
            rank=0,
            host="h",
            pid=1,
            data_address="",
            launched=False,
            device="cpu",
            mlx_version="0",
            memory_bytes=1,
        )
    )
    rank.wait_for(JoinWorld)
    rank.dialer.send(
        RankReady(
            rank=0,
            model_fingerprint="f",
            kv_bytes_per_token=1,
            kv_bytes_per_row=0,
            kv_budget_bytes=10_000,
            context_tokens_max=1_000,
            vocab_size=10,
            can_roll_back=True,
            blas="",
        )
    )
    while not (status := gateway.wait_for(StatusReported)).ready:  # type: ignore[attr-defined]
        gateway.heard.remove(status)
    gateway.dialer.send(
        SubmitRequest(
            request_id="a",
            prompt=[1],
            max_tokens=5,
            sampling=Sampling(seed=1),
            more_requests_expected=more_requests_expected,
        )
    )
    gateway.wait_for(RequestAccepted)
    rank.wait_for(StepPlan)
    return gateway, rank


def _ends(peer: Peer) -> list[object]:
    kinds = (RequestFailed, RequestFinished, RequestRejected)
    return [one for one in peer.heard if isinstance(one, kinds)]


def test_a_hand_over_leaves_requests_to_their_gateways(
    connect: Connect, scheduler: subprocess.Popen[bytes]
) -> None:
    """SIGUSR1: ranks leave, gateways hear of no request's end, the code is 0."""
    gateway, rank = _begin(connect)
    scheduler.send_signal(signal.SIGUSR1)
    rank.wait_for(LeaveWorld)
    assert scheduler.wait(WAIT_S) == 0
    for _ in range(20):
        gateway.take()
    assert _ends(gateway) == []


def test_a_wait_for_others_ends_by_itself(connect: Connect, folder: Path) -> None:
    """Nobody follows, and the next tick is far away: the request that came has its plan."""
    settings = {"LOCKSTEP_PATHS_RUN_DIR": str(folder), "LOCKSTEP_WORLD_SIZE": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", SELDOM_TICKS],
        env={**os.environ, **settings},
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            _begin(connect, more_requests_expected=True)
        finally:
            process.kill()


def test_a_second_signal_forces_and_the_code_says_so(
    connect: Connect, scheduler: subprocess.Popen[bytes]
) -> None:
    """SIGTERM lets a request go on; another one ends it with a reason, and the code is not 0."""
    gateway, rank = _begin(connect)
    scheduler.send_signal(signal.SIGTERM)
    gateway.dialer.send(QueryStatus())
    while not (status := gateway.wait_for(StatusReported)).draining:  # type: ignore[attr-defined]
        gateway.heard.remove(status)
    assert _ends(gateway) == []
    assert scheduler.poll() is None
    scheduler.send_signal(signal.SIGTERM)
    failed = gateway.wait_for(RequestFailed)
    assert isinstance(failed, RequestFailed)
    assert failed.cause == "stopping"
    rank.wait_for(LeaveWorld)
    assert scheduler.wait(WAIT_S) == 69


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "No such file"), (b"\xff\xfe", "codec"), (b"[[null]]", "2 rows of 2")],
)
def test_a_wrong_device_matrix_ends_the_scheduler_at_once(
    folder: Path, content: bytes | None, words: str
) -> None:
    """No rank need come before it is said what is wrong with world.jaccl_devices."""
    path = folder / "devices.json"
    if content is not None:
        path.write_bytes(content)
    world = {
        "size": 2,
        "backend": "jaccl",
        "jaccl_devices": str(path),
        "jaccl_coordinator": "127.0.0.1:9",
    }
    with pytest.raises(ConfigError, match=words):
        Shell(config_from_tree({"world": world, "paths": {"run_dir": str(folder)}}))


def test_stopping_an_idle_scheduler_is_clean(
    connect: Connect, scheduler: subprocess.Popen[bytes]
) -> None:
    """Nothing is cut off, so the code is 0."""
    gateway = connect("gateways", ToGateway)
    gateway.wait_for(StatusReported)
    scheduler.send_signal(signal.SIGTERM)
    assert scheduler.wait(WAIT_S) == 0
