"""Real rank workers join real worlds over the ring; a listener plays the scheduler."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.scheduler.world.environment import rank_environment
from shared import limits
from shared.identifiers import PeerId
from shared.messages import (
    AdmittedSequence,
    Heartbeat,
    JoinWorld,
    LeaveWorld,
    Message,
    PrefillChunk,
    RankFailed,
    RankHello,
    RankLoading,
    RankReady,
    Sampling,
    StepFinished,
    StepPlan,
    ToScheduler,
)
from shared.transport.links import Listener, Received
from tests.captured_process import READY_DEADLINE_S
from tests.orders import join_order
from tests.ports import free_port, is_free

ROOT = Path(__file__).resolve().parents[2]
EPOCH = 5
GONE_S = 1.0
SLACK_S = 9.0
"""Two cores that other tests keep busy hold a process up for seconds."""
CODE = """
import sys
from services.rank_worker import scheduler_link
from services.rank_worker.main import run
from shared.configuration.loading import load_config
scheduler_link.FLUSH_S = 5.0  # a test that plays the scheduler may acknowledge late
address, size, rank = sys.argv[1:]
flags = {"model.path": "demo", "world.size": int(size), "scheduler.rank_address": address}
sys.exit(run(load_config(None, flags), int(rank)))
"""


class Scheduler:
    """What a test needs of a scheduler: hears ranks and gives orders."""

    def __init__(self, folder: Path) -> None:
        self.address = f"ipc://{folder}/r.sock"
        self.heard: list[tuple[PeerId, Message]] = []
        self.peers: dict[int, PeerId] = {}
        self.processes: list[subprocess.Popen[bytes]] = []
        self._link: Listener[Any] = Listener(self.address, ToScheduler)

    def start(self, rank: int, size: int, *launcher: str) -> None:
        """Start a rank worker, or with a launcher's command line all of them."""
        arguments = [sys.executable, "-c", CODE, self.address, str(size), str(rank)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.processes.append(
            subprocess.Popen(
                [*launcher, *arguments],
                env=environment,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        )

    def until(self, condition: Callable[[], bool], limit_s: float = READY_DEADLINE_S) -> None:
        """Hear ranks until the condition holds."""
        end_s = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end_s, f"not in {limit_s} s; heard {self.heard[-5:]}"
            for event in self._link.poll(0.05):
                if isinstance(event, Received):
                    self.heard.append((event.peer, event.message))

    def of(self, kind: type[Any]) -> list[Any]:
        """Return what was heard of one kind, in order."""
        return [message for _, message in self.heard if isinstance(message, kind)]

    def join(self, size: int) -> list[RankReady]:
        """Let all ranks join one world and return their reports by rank."""
        self.until(lambda: len({hello.rank for hello in self.of(RankHello)}) == size)
        hellos = {m.rank: (peer, m) for peer, m in self.heard if isinstance(m, RankHello)}
        self.peers = {rank: peer for rank, (peer, _) in hellos.items()}
        addresses = [hellos[rank][1].data_address for rank in range(size)]
        for rank in range(size):
            environment: dict[str, str] = {}
            files: dict[str, str] = {}
            if not hellos[rank][1].launched:
                environment, files = rank_environment("ring", rank, size, addresses)
            self.order(rank, _join_order(rank, size, environment, files))
        self.until(lambda: len(self.of(RankReady)) == size)
        return sorted(self.of(RankReady), key=lambda ready: ready.rank)

    def join_alone(self, size: int = 1) -> None:
        """Order the one process that was started to be rank 0 of a world of `size`."""
        self.start(0, size)
        self.until(lambda: bool(self.of(RankHello)))
        self.peers = {0: self.heard[0][0]}
        self.order(0, _join_order(0, size, {"MLX_RANK": "0"} if size > 1 else {}, {}))

    def order(self, rank: int, message: Message) -> None:
        """Send an order to one rank."""
        self._link.send(self.peers[rank], message, EPOCH)

    def order_all(self, message: Message) -> None:
        """Send an order to every rank."""
        for rank in self.peers:
            self.order(rank, message)

    def wait_gone(self, limit_s: float = GONE_S + SLACK_S) -> list[int | None]:
        """Wait until all processes have ended and return how."""
        self.until(lambda: all(p.poll() is not None for p in self.processes), limit_s)
        return [process.returncode for process in self.processes]

    def close(self) -> None:
        """End what still runs."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._link.close(0.0)


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[Scheduler]:
    link = Scheduler(tmp_path)
    yield link
    link.close()


def _join_order(
    rank: int, size: int, environment: dict[str, str], files: dict[str, str]
) -> JoinWorld:
    return join_order(
        rank,
        size,
        epoch=EPOCH,
        sharding="tensor" if size > 1 else "none",
        environment=environment,
        files=files,
        init_deadline_s=60.0,
        load_deadline_s=90.0,
        step_deadline_max_s=60.0,
    )


def _plan(step_id: int, *, deadline_s: float = 10.0) -> StepPlan:
    first = step_id == 1
    admitted = AdmittedSequence(
        sequence_id=9, slot=0, tokens=[5, 6, 7], prompt_tokens=3, sampling=Sampling(seed=4)
    )
    chunk = PrefillChunk(sequence_id=9, start=0, length=3, samples=True)
    return StepPlan(
        epoch=EPOCH,
        step_id=step_id,
        deadline_s=deadline_s,
        row_count=1,
        row_tokens=64,
        admitted=[admitted] if first else [],
        prefill_chunks=[chunk] if first else [],
        decodes=[] if first else [9],
    )


def two_free_ports() -> int:
    """Return the first of two ports in a row that nobody listens on: MLX's launcher counts on."""
    while not is_free(1 + (port := free_port())):
        pass
    return port


def _digests(finished: list[StepFinished]) -> dict[int, set[bytes]]:
    found: dict[int, set[bytes]] = {}
    for message in finished:
        found.setdefault(message.step_id, set()).add(message.digest)
    return found


def test_two_ranks_join_step_and_leave(scheduler: Scheduler) -> None:
    """Hello, join, ready, steps with equal receipts; then both are gone within a second."""
    for rank in range(2):
        scheduler.start(rank, 2)
    ready = scheduler.join(2)
    for step_id in range(1, 9):
        scheduler.order_all(_plan(step_id))
    scheduler.until(lambda: len(scheduler.of(StepFinished)) == 16)
    scheduler.until(lambda: len(scheduler.of(Heartbeat)) >= 2)
    scheduler.order_all(LeaveWorld(epoch=EPOCH, detail="the test is over"))
    codes = scheduler.wait_gone()

    finished = scheduler.of(StepFinished)
    digests = _digests(finished)
    assert list(digests) == list(range(1, 9))
    assert all(len(found) == 1 for found in digests.values())
    assert all(len(m.tokens) == (1 if m.rank == 0 else 0) for m in finished)
    assert len({report.model_fingerprint for report in ready}) == 1
    assert {message.stage for message in scheduler.of(RankLoading)} >= {"joining", "loading"}
    assert codes == [limits.EXIT_WORLD_LOST] * 2


def test_a_killed_rank_takes_the_other_with_it(scheduler: Scheduler) -> None:
    """After SIGKILL of one rank, the other fails its next step, says so and ends non-zero."""
    for rank in range(2):
        scheduler.start(rank, 2)
    scheduler.join(2)
    scheduler.order_all(_plan(1))
    scheduler.until(lambda: len(scheduler.of(StepFinished)) == 2)
    scheduler.processes[1].kill()
    scheduler.processes[1].wait()
    scheduler.order(0, _plan(2))
    codes = scheduler.wait_gone()

    assert codes == [limits.EXIT_WORLD_LOST, -signal.SIGKILL]
    assert [(m.rank, m.permanent) for m in scheduler.of(RankFailed)] == [(0, False)]


def test_a_step_that_never_ends_meets_its_deadline(scheduler: Scheduler) -> None:
    """A rank whose peer got no plan waits in a collective for ever; its watchdog ends it."""
    for rank in range(2):
        scheduler.start(rank, 2)
    scheduler.join(2)
    scheduler.order(0, _plan(1, deadline_s=0.5))
    scheduler.until(lambda: scheduler.processes[0].poll() is not None, GONE_S + SLACK_S)

    assert scheduler.processes[0].returncode == limits.EXIT_WORLD_LOST
    assert scheduler.of(StepFinished) == []


@pytest.mark.proof
def test_ranks_that_mlx_launched_join_as_they_are(scheduler: Scheduler) -> None:
    """Under MLX's own launcher the environment is the launcher's, and steps agree as well."""
    main = "from mlx._distributed_utils.launch import main; main()"
    flags = ["-n", "2", "--backend", "ring", "--starting-port", str(two_free_ports())]
    scheduler.start(-1, 2, sys.executable, "-c", main, *flags, "--")
    scheduler.join(2)
    for step_id in (1, 2, 3):
        scheduler.order_all(_plan(step_id))
    scheduler.until(lambda: len(scheduler.of(StepFinished)) == 6)
    scheduler.order_all(LeaveWorld(epoch=EPOCH, detail="the test is over"))
    scheduler.wait_gone()

    assert all(hello.launched for hello in scheduler.of(RankHello))
    assert all(len(digests) == 1 for digests in _digests(scheduler.of(StepFinished)).values())


def test_a_world_that_the_model_does_not_fit_is_refused_for_good(scheduler: Scheduler) -> None:
    """Eight heads over three ranks: one sentence before any peer is awaited, and no retry."""
    scheduler.join_alone(3)
    codes = scheduler.wait_gone(60.0)

    (failed,) = scheduler.of(RankFailed)
    assert failed.permanent
    assert "cannot be split over 3 ranks" in failed.detail
    assert "set world.size to 1, 2 or 4" in failed.detail
    assert codes == [limits.EXIT_CONFIG]


def test_a_scheduler_that_says_goodbye_ends_its_ranks(scheduler: Scheduler) -> None:
    """A rank in a world does not outlive its scheduler; before that it waits for one."""
    scheduler.join_alone()
    scheduler.until(lambda: bool(scheduler.of(RankReady)))
    scheduler._link.drop(scheduler.peers[0])
    assert scheduler.processes[0].wait(timeout=GONE_S + SLACK_S) == limits.EXIT_WORLD_LOST


def test_a_gap_in_the_plans_ends_the_rank(scheduler: Scheduler) -> None:
    """Plan 3 after plan 1 is our own bug: the rank says so and ends, and computes nothing."""
    scheduler.join_alone()
    scheduler.until(lambda: bool(scheduler.of(RankReady)))
    scheduler.order(0, _plan(1))
    scheduler.order(0, _plan(3))
    codes = scheduler.wait_gone()

    (failed,) = scheduler.of(RankFailed)
    assert "Step plan 3 came after 1" in failed.detail
    assert codes == [limits.EXIT_SOFTWARE]
    assert all(message.step_id == 1 for message in scheduler.of(StepFinished))
