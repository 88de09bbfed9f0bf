"""Scheduler and rank processes, and a client in place of a gateway."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    token_ids,
)
from shared.os.lifeline import VARIABLE
from shared.transport.links import Connected, Dialer, Lost, Received
from tests.support.captured_process import READY_DEADLINE_S
from tests.support.waiting import poll_until, wait_until

REPOSITORY = Path(__file__).resolve().parents[3]


class Client:
    """A gateway's side of the scheduler; checks the positions of tokens and each request's end."""

    def __init__(self, run_dir: Path) -> None:
        self.address = f"ipc://{run_dir}/gateways.sock"
        """The scheduler's address for gateways."""
        self._link: Dialer[ToGateway] = Dialer(self.address, "gateway-test", ToGateway)
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, RequestFinished | RequestFailed | RequestRejected] = {}
        self.accepted: set[str] = set()
        self.cached: dict[str, CachedPrefix] = {}
        """Cached prefix at the first admission, by request id."""
        self.status: StatusReported | None = None
        self._reports = 0

    def submit(self, request_id: str, prompt: list[int], **options: object) -> None:
        """Submit a request; greedy unless `sampling` says otherwise."""
        options.setdefault("sampling", Sampling(seed=1, temperature=0.0))
        self.tokens[request_id] = []
        message = SubmitRequest(
            request_id=request_id,
            prompt=token_ids.pack(prompt),
            **options,  # type: ignore[arg-type]
        )
        self._link.send(message)

    def abort(self, request_id: str) -> None:
        """Abort a request."""
        self._link.send(AbortRequest(request_id=request_id))

    def poll(self, timeout_s: float = 0.0) -> None:
        """Process all arrived messages."""
        for event in self._link.poll(timeout_s):
            match event:
                case Received():
                    self._handle(event.message)
                case Connected():
                    pass
                case Lost():
                    raise AssertionError(f"the scheduler is lost: {event.cause}")

    def poll_until(
        self, condition: Callable[[], bool], deadline_s: float, failure: str | Callable[[], object]
    ) -> None:
        """Poll until `condition` holds; fail with `failure` after `deadline_s` seconds."""
        poll_until(lambda: self.poll(0.05), condition, deadline_s, failure=failure)

    def wait_for_ends(self, names: list[str], deadline_s: float) -> None:
        """Wait until all these requests have ended."""

        def open_requests() -> list[str]:
            return [name for name in names if name not in self.ends]

        self.poll_until(
            lambda: not open_requests(), deadline_s, lambda: f"no end of {open_requests()}"
        )

    def wait_until_ready(self, processes: list[subprocess.Popen[bytes]], deadline_s: float) -> None:
        """Wait until the world is ready; fail if a process ends before."""

        def is_ready() -> bool:
            assert all(process.poll() is None for process in processes), "a process has ended"
            return self.status is not None and self.status.ready

        self.poll_until(is_ready, deadline_s, lambda: f"not ready: {self.status}")

    def query_status(self) -> StatusReported:
        """Query the scheduler's status."""
        self._reports = 0
        self._link.send(QueryStatus())
        self.poll_until(lambda: self._reports > 0, 10.0, "the scheduler does not answer")
        assert self.status is not None
        return self.status

    def wait_for_spills(self, blocks: int) -> None:
        """Wait until this number of blocks is stored on all ranks."""
        spilled = "cache_blocks_spilled_total"
        wait_until(
            lambda: self.query_status().counters.get(spilled, 0.0) >= blocks,
            30.0,
            poll_s=0.05,
            failure=lambda: self.query_status().counters,
        )

    def wait_for_all_spills(self) -> None:
        """Wait until all blocks and checkpoints that were kept are stored on all ranks."""
        kept = ("cache_blocks_kept_total", "cache_checkpoints_kept_total")

        def missing() -> float:
            counters = self.query_status().counters
            stored = counters.get("cache_blocks_spilled_total", 0.0)
            return sum(counters.get(one, 0.0) for one in kept) - stored

        wait_until(lambda: missing() == 0.0, 30.0, poll_s=0.05, failure=missing)

    def close(self) -> None:
        """Close the link with a goodbye."""
        self._link.close()

    def _handle(self, message: ToGateway) -> None:
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
def cluster(
    ranks: int,
    blocks: Path | None = None,
    programs: Mapping[int, Sequence[str]] | None = None,
    /,
    **settings: str,
) -> Iterator[Client]:
    """Start a scheduler and `ranks` rank workers on the demo model; end them all at the exit.

    Args:
        ranks: how many.
        blocks: folder for a cache store, which is started too; None: blocks in memory only.
        programs: by rank, a module and its arguments in place of the rank worker; None: no rank has
            one. They get the option `--rank`.
        settings: environment overrides, for example WORLD_SYNCHRONIZATION="independent".
    """
    run_dir = Path(tempfile.mkdtemp(prefix="ls-"))
    environment = _environment(run_dir, ranks, blocks, settings)
    log = (run_dir / "log").open("wb")
    processes: list[subprocess.Popen[bytes]] = []
    # The children end when this pipe closes, also if this test process is killed.
    lifeline, lifeline_end = os.pipe()
    environment[VARIABLE] = str(lifeline)

    def start(*arguments: str, program: Sequence[str] = ("services.commands.main",)) -> None:
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", *program, *arguments],
                cwd=REPOSITORY,
                env=environment,
                pass_fds=[lifeline],
                stdout=log,
                stderr=log,
            )
        )

    start("scheduler")
    for rank in range(ranks):
        program = (programs or {}).get(rank, ("services.commands.main", "rank-worker"))
        start("--rank", str(rank), program=program)
    if blocks is not None:
        start("cache-store")
    client = Client(run_dir)
    try:
        client.wait_until_ready(processes, READY_DEADLINE_S)
        yield client
    except BaseException:
        print((run_dir / "log").read_text()[-6_000:])
        raise
    finally:
        client.close()
        _stop(processes)
        log.close()
        os.close(lifeline)
        os.close(lifeline_end)
        shutil.rmtree(run_dir)


def _environment(
    run_dir: Path, ranks: int, blocks: Path | None, settings: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of all processes."""
    return {
        **os.environ,
        "LOCKSTEP_PATHS_RUN_DIR": str(run_dir),
        "LOCKSTEP_WORLD_SIZE": str(ranks),
        # No rank is restarted here, so a step late on busy cores must not end the world.
        "LOCKSTEP_SCHEDULER_STEP_DEADLINE_MIN_S": "60",
        "LOCKSTEP_CACHE_SSD": str(blocks is not None).lower(),
        "LOCKSTEP_CACHE_DIRECTORY": str(blocks or run_dir / "blocks"),
        **{f"LOCKSTEP_{name}": value for name, value in settings.items()},
    }


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """Terminate scheduler and store, on which ranks end; fail if a process does not end."""
    for process in processes:
        if "--rank" not in list(process.args):  # type: ignore[arg-type]
            process.send_signal(signal.SIGTERM)
    left: list[object] = []
    for process in processes:
        try:
            process.wait(15.0)
        except subprocess.TimeoutExpired:
            left.append(process.args)
            process.kill()
            process.wait()
    assert not left, f"processes did not end: {left}"
