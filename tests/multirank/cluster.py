"""A scheduler and real ranks as processes, and a client on the bus in place of a gateway."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.messages import (
    AbortRequest,
    CachedPrefix,
    QueryStatus,
    RequestAccepted,
    RequestAdmitted,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    Sampling,
    StatusReported,
    SubmitRequest,
    ToGateway,
    TokensGenerated,
)
from shared.os.lifeline import VARIABLE
from shared.transport.links import Connected, Dialer, Lost, Received
from tests.captured_process import READY_DEADLINE_S

REPOSITORY = Path(__file__).resolve().parents[2]


class Client:
    """Speaks for a gateway; checks positions and ends as a gateway must."""

    def __init__(self, run_dir: Path) -> None:
        self._link: Dialer[ToGateway] = Dialer(
            f"ipc://{run_dir}/gateways.sock", "gateway-test", ToGateway
        )
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, RequestFinished | RequestFailed | RequestRejected] = {}
        self.accepted: set[str] = set()
        self.cached: dict[str, CachedPrefix] = {}
        """What the first admission of each request found in the cache."""
        self.status: StatusReported | None = None
        self._reports = 0

    def submit(self, request_id: str, prompt: list[int], **options: object) -> None:
        """Submit a request; greedy unless `sampling` says otherwise."""
        options.setdefault("sampling", Sampling(seed=1, temperature=0.0))
        self.tokens[request_id] = []
        message = SubmitRequest(
            request_id=request_id,
            prompt=prompt,
            **options,  # type: ignore[arg-type]
        )
        self._link.send(message)

    def abort(self, request_id: str) -> None:
        """Abort a request."""
        self._link.send(AbortRequest(request_id=request_id))

    def poll(self, timeout_s: float = 0.0) -> None:
        """Take in what has arrived."""
        for event in self._link.poll(timeout_s):
            match event:
                case Received():
                    self._take(event.message)
                case Connected():
                    pass
                case Lost():
                    raise AssertionError(f"the scheduler is lost: {event.cause}")

    def wait(self, names: list[str], timeout_s: float) -> None:
        """Wait until all these requests have ended."""
        until_s = time.monotonic() + timeout_s
        while not all(name in self.ends for name in names):
            missing = [name for name in names if name not in self.ends]
            assert time.monotonic() < until_s, f"no end within {timeout_s} s: {missing}"
            self.poll(0.05)

    def wait_ready(self, processes: list[subprocess.Popen[bytes]], timeout_s: float) -> None:
        """Wait until the world is ready."""
        until_s = time.monotonic() + timeout_s
        while not (self.status and self.status.ready):
            assert time.monotonic() < until_s, f"not ready: {self.status}"
            assert all(process.poll() is None for process in processes), "a process has ended"
            self.poll(0.1)

    def ask_status(self) -> StatusReported:
        """Ask for the state and return the answer."""
        self._reports = 0
        self._link.send(QueryStatus())
        until_s = time.monotonic() + 10.0
        while not self._reports:
            assert time.monotonic() < until_s, "the scheduler does not answer"
            self.poll(0.05)
        assert self.status is not None
        return self.status

    def close(self) -> None:
        """Say goodbye."""
        self._link.close()

    def _take(self, message: ToGateway) -> None:
        match message:
            case TokensGenerated():
                columns = zip(message.request_ids, message.positions, message.tokens, strict=True)
                for request_id, position, tokens in columns:
                    assert request_id not in self.ends, "no token after the end"
                    assert position == len(self.tokens[request_id]), "no gap, no repeat"
                    self.tokens[request_id] += tokens
            case RequestFinished() | RequestFailed() | RequestRejected():
                assert message.request_id not in self.ends, "a request ends once"
                self.ends[message.request_id] = message
            case RequestAccepted():
                self.accepted.add(message.request_id)
            case RequestAdmitted():
                assert not self.tokens[message.request_id], "admitted before the first token"
                self.cached[message.request_id] = message.cached
            case StatusReported():
                self.status = message
                self._reports += 1


@contextmanager
def cluster(ranks: int, blocks: Path | None = None, /, **settings: str) -> Iterator[Client]:
    """Start a scheduler and `ranks` rank workers on the demo model; end them all at the exit.

    Args:
        ranks: how many.
        blocks: folder for a cache store, which is started too; None: blocks in memory only.
        settings: environment overrides, for example WORLD_SYNCHRONIZATION="independent".
    """
    run_dir = Path(tempfile.mkdtemp(prefix="ls-"))
    environment = {
        **os.environ,
        "LOCKSTEP_PATHS_RUN_DIR": str(run_dir),
        "LOCKSTEP_WORLD_SIZE": str(ranks),
        "LOCKSTEP_CACHE_SSD": str(blocks is not None).lower(),
        "LOCKSTEP_CACHE_DIRECTORY": str(blocks or run_dir / "blocks"),
        **{f"LOCKSTEP_{name}": value for name, value in settings.items()},
    }
    log = (run_dir / "log").open("wb")
    processes: list[subprocess.Popen[bytes]] = []
    # When this test process dies, whatever the cause, its children see the pipe close and end.
    lifeline, held = os.pipe()
    environment[VARIABLE] = str(lifeline)

    def start(*arguments: str) -> None:
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "services.commands.main", *arguments],
                cwd=REPOSITORY,
                env=environment,
                pass_fds=[lifeline],
                stdout=log,
                stderr=log,
            )
        )

    start("scheduler")
    for rank in range(ranks):
        start("rank-worker", "--rank", str(rank))
    if blocks is not None:
        start("cache-store")
    client = Client(run_dir)
    try:
        client.wait_ready(processes, READY_DEADLINE_S)
        yield client
    except BaseException:
        print((run_dir / "log").read_text()[-6_000:])
        raise
    finally:
        client.close()
        _end(processes)
        log.close()
        os.close(lifeline)
        os.close(held)
        shutil.rmtree(run_dir)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Order scheduler and store to stop; ranks are sent away. Whoever stays fails the test."""
    for process in processes:
        if "rank-worker" not in list(process.args):  # type: ignore[arg-type]
            process.send_signal(signal.SIGTERM)
    stayed: list[object] = []
    for process in processes:
        try:
            process.wait(15.0)
        except subprocess.TimeoutExpired:
            stayed.append(process.args)
            process.kill()
            process.wait()
    assert not stayed, f"did not end by themselves: {stayed}"
