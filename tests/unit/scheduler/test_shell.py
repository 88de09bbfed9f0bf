"""The scheduler as a process: signals, real sockets and exit codes."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from services.scheduler.events import SaveWorldFacts
from services.scheduler.main import WORLD_FACTS_FILE, Shell
from services.scheduler.world.world_change import WorldFacts
from shared.configuration.loading import config_from_tree
from shared.errors import ConfigError
from shared.messages import (
    JoinWorld,
    LeaveWorld,
    QueryStatus,
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
    token_ids,
)
from shared.transport.links import Connected, Dialer, Received
from tests.support.waiting import wait_until
from tests.unit.scheduler.support.rank_messages import HELLO, READY

WAIT_S = 30.0

SCHEDULER_WITHOUT_TICKS = """
import sys
from services.commands import main as cli
from services.scheduler import main
main._TICK_S = 3_600.0
sys.argv = ["lockstep", "scheduler"]
cli.main()
"""
"""A scheduler that wakes up only for events and for times that it has set itself."""

Connect = Callable[[str, object], "Peer"]


class Peer:
    """One end of a link to the scheduler, with everything that it received."""

    def __init__(self, folder: Path, name: str, receives: object, all_peers: "list[Peer]") -> None:
        role = "rank" if name == "ranks" else "gateway"
        self.dialer: Dialer[msgspec.Struct] = Dialer(f"ipc://{folder}/{name}.sock", role, receives)
        self.received: list[object] = []
        self._all_peers = all_peers

    def wait_for(self, kind: type, count: int = 1) -> object:
        """Wait until `count` messages of a kind have arrived; return the last."""

        def last_found() -> object:
            found = [one for one in self.received if isinstance(one, kind)]
            if len(found) >= count:
                return found[-1]
            # All peers are polled: a peer that does not read does not acknowledge either.
            for peer in self._all_peers:
                peer.poll()
            return None

        return wait_until(last_found, WAIT_S, poll_s=0.0, failure=lambda: (kind, self.received))

    def wait_for_status(self, is_wanted: Callable[[StatusReported], bool]) -> None:
        """Wait for a status report with a property; forget earlier reports."""

        def has_arrived() -> bool:
            status = self.wait_for(StatusReported)
            assert isinstance(status, StatusReported)
            if not is_wanted(status):
                self.received.remove(status)
            return is_wanted(status)

        wait_until(has_arrived, WAIT_S, poll_s=0.0)

    def poll(self) -> None:
        """Read the messages that have arrived."""
        for event in self.dialer.poll(0.02):
            self.received.append(event.message if isinstance(event, Received) else event)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="ls-") as name:
        yield Path(name)


@pytest.fixture
def connect(folder: Path) -> Iterator[Connect]:
    """Connect to the scheduler by the name of a link; close all links at the end."""
    peers: list[Peer] = []

    def begin(name: str, receives: object) -> Peer:
        peers.append(Peer(folder, name, receives, peers))
        return peers[-1]

    yield begin
    for peer in peers:
        peer.dialer.close(0.0)


@pytest.fixture
def scheduler(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a scheduler process; kill it at the end."""
    command = (sys.executable, "-m", "services.commands.main", "scheduler")
    settings = {"LOCKSTEP_PATHS_RUN_DIR": str(folder), "LOCKSTEP_WORLD_SIZE": "1"}
    with subprocess.Popen(
        command, env={**os.environ, **settings}, stderr=subprocess.DEVNULL
    ) as process:
        yield process
        process.kill()


def _start_request(connect: Connect, *, more_requests_expected: bool = False) -> tuple[Peer, Peer]:
    """Start one rank and submit a request; return gateway and rank with a plan in flight."""
    rank, gateway = connect("ranks", ToRank), connect("gateways", ToGateway)
    rank.wait_for(Connected)
    gateway.wait_for(Connected)
    rank.dialer.send(msgspec.structs.replace(HELLO, rank=0))
    rank.wait_for(JoinWorld)
    rank.dialer.send(msgspec.structs.replace(READY, context_tokens_max=1_000))
    gateway.wait_for_status(lambda status: status.ready)
    gateway.dialer.send(
        SubmitRequest(
            request_id="a",
            prompt=token_ids.pack([1]),
            max_tokens=5,
            sampling=Sampling(seed=1),
            more_requests_expected=more_requests_expected,
        )
    )
    gateway.wait_for(RequestAccepted)
    rank.wait_for(StepPlan)
    return gateway, rank


def _request_ends(peer: Peer) -> list[object]:
    """Return the ends of requests that a peer has received."""
    kinds = (RequestFailed, RequestFinished, RequestRejected)
    return [one for one in peer.received if isinstance(one, kinds)]


def test_sigusr1_ends_ranks_but_no_gateway_request(
    connect: Connect, scheduler: subprocess.Popen[bytes]
) -> None:
    """After SIGUSR1 ranks leave, gateways receive no end of a request, and the exit code is 0."""
    gateway, rank = _start_request(connect)
    scheduler.send_signal(signal.SIGUSR1)
    rank.wait_for(LeaveWorld)
    assert scheduler.wait(WAIT_S) == 0
    for _ in range(20):
        gateway.poll()
    assert _request_ends(gateway) == []


def test_request_gets_plan_without_periodic_timer_when_announced_one_is_missing(
    connect: Connect, folder: Path
) -> None:
    """When no announced request follows and no periodic timer runs, the waiting request still gets
    its plan.
    """
    settings = {"LOCKSTEP_PATHS_RUN_DIR": str(folder), "LOCKSTEP_WORLD_SIZE": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", SCHEDULER_WITHOUT_TICKS],
        env={**os.environ, **settings},
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            _start_request(connect, more_requests_expected=True)
        finally:
            process.kill()


def test_second_sigterm_fails_requests_and_exits_with_69(
    connect: Connect, scheduler: subprocess.Popen[bytes]
) -> None:
    """SIGTERM lets a request continue; a second one fails it with a reason, and the exit code is
    69."""
    gateway, rank = _start_request(connect)
    scheduler.send_signal(signal.SIGTERM)
    gateway.dialer.send(QueryStatus())
    gateway.wait_for_status(lambda status: status.draining)
    assert _request_ends(gateway) == []
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
def test_invalid_jaccl_device_file_fails_scheduler_at_start(
    folder: Path, content: bytes | None, words: str
) -> None:
    """An invalid file in world.jaccl_devices is reported before any rank connects."""
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


def test_sigterm_without_open_requests_exits_with_zero(
    connect: Connect, scheduler: subprocess.Popen[bytes]
) -> None:
    """SIGTERM without open requests exits with code 0."""
    gateway = connect("gateways", ToGateway)
    gateway.wait_for(StatusReported)
    scheduler.send_signal(signal.SIGTERM)
    assert scheduler.wait(WAIT_S) == 0


def test_scheduler_reads_facts_of_last_world_that_it_has_saved(folder: Path) -> None:
    """Facts survive from one scheduler process to the next; a damaged file is no facts."""
    config = config_from_tree({"paths": {"run_dir": str(folder)}})
    facts = WorldFacts(ranks=3, sharding="expert", hosts=["a", "b", "c"], namespace="ab")
    shell = Shell(config)
    shell._ranks.close()
    shell._gateways.close()

    shell._save_world_facts(SaveWorldFacts(msgspec.structs.asdict(facts)))

    assert shell._read_world_facts() == facts
    (folder / WORLD_FACTS_FILE).write_text('{"ranks": "three"}')
    assert shell._read_world_facts() is None
