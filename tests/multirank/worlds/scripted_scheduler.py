"""A listener that plays the scheduler for real rank workers."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.scheduler.world.environment import rank_environment
from shared.identifiers import PeerId
from shared.messages import JoinWorld, Message, RankHello, RankReady, ToScheduler
from shared.transport.links import Listener, Received
from tests.support.captured_process import READY_DEADLINE_S
from tests.support.orders import join_order
from tests.support.ports import free_port, is_free
from tests.support.waiting import poll_until

ROOT = Path(__file__).resolve().parents[3]
EPOCH = 5
GONE_S = 1.0
SLACK_S = 9.0
"""Seconds that a process may be delayed by other tests on both cores."""
RANK_SCRIPT = """
import json, sys
from services.rank_worker import scheduler_link
from services.rank_worker.main import run
from shared.configuration.loading import load_config
scheduler_link.FLUSH_S = 5.0  # a test may acknowledge late
address, size, rank, settings = sys.argv[1:]
flags = {"model.path": "demo", "world.size": int(size), "scheduler.rank_address": address}
flags |= json.loads(settings)
sys.exit(run(load_config(None, flags), int(rank)))
"""


class ScriptedScheduler:
    """Receives the messages of ranks and sends them orders."""

    def __init__(self, folder: Path, **settings: str) -> None:
        """Listen; ranks that `start` starts get these settings of section `speculation`."""
        self.address = f"ipc://{folder}/r.sock"
        self.messages: list[tuple[PeerId, Message]] = []
        self.peers: dict[int, PeerId] = {}
        self.processes: list[subprocess.Popen[bytes]] = []
        self._settings = {f"speculation.{name}": value for name, value in settings.items()}
        self._link: Listener[Any] = Listener(self.address, ToScheduler)

    def start(self, rank: int, size: int, *launcher: str) -> None:
        """Start a rank worker, or all of them with a launcher's command line."""
        arguments = [self.address, str(size), str(rank), json.dumps(self._settings)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.processes.append(
            subprocess.Popen(
                [*launcher, sys.executable, "-c", RANK_SCRIPT, *arguments],
                env=environment,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        )

    def poll_until(
        self, condition: Callable[[], bool], deadline_s: float = READY_DEADLINE_S
    ) -> None:
        """Receive messages until `condition` holds."""
        poll_until(
            self._poll, condition, deadline_s, failure=lambda: f"received {self.messages[-5:]}"
        )

    def _poll(self) -> None:
        for event in self._link.poll(0.05):
            if isinstance(event, Received):
                self.messages.append((event.peer, event.message))

    def messages_of(self, kind: type[Any]) -> list[Any]:
        """Return all received messages of one type, in order."""
        return [message for _, message in self.messages if isinstance(message, kind)]

    def join_world(self, size: int) -> list[RankReady]:
        """Let all ranks join one world; return their ready messages by rank."""
        self.poll_until(lambda: len({hello.rank for hello in self.messages_of(RankHello)}) == size)
        hellos = {m.rank: (peer, m) for peer, m in self.messages if isinstance(m, RankHello)}
        self.peers = {rank: peer for rank, (peer, _) in hellos.items()}
        addresses = [hellos[rank][1].data_address for rank in range(size)]
        for rank in range(size):
            environment: dict[str, str] = {}
            files: dict[str, str] = {}
            if not hellos[rank][1].launched:
                environment, files = rank_environment("ring", rank, size, addresses)
            self.send(rank, _join_order(rank, size, environment, files))
        self.poll_until(lambda: len(self.messages_of(RankReady)) == size)
        return sorted(self.messages_of(RankReady), key=lambda ready: ready.rank)

    def join_rank_0(self, size: int = 1) -> None:
        """Start one rank and order it to be rank 0 of a world of `size`."""
        self.start(0, size)
        self.poll_until(lambda: bool(self.messages_of(RankHello)))
        self.peers = {0: self.messages[0][0]}
        self.send(0, _join_order(0, size, {"MLX_RANK": "0"} if size > 1 else {}, {}))

    def send(self, rank: int, message: Message) -> None:
        """Send an order to one rank."""
        self._link.send(self.peers[rank], message, EPOCH)

    def send_all(self, message: Message) -> None:
        """Send an order to all ranks."""
        for rank in self.peers:
            self.send(rank, message)

    def wait_until_ended(self, deadline_s: float = GONE_S + SLACK_S) -> list[int | None]:
        """Wait until all processes have ended; return their exit codes."""
        self.poll_until(lambda: all(p.poll() is not None for p in self.processes), deadline_s)
        return [process.returncode for process in self.processes]

    def close(self) -> None:
        """Kill all processes that still run."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._link.close(0.0)


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


def two_free_ports() -> int:
    """Return the first of two free ports in a row, as MLX's launcher uses them."""
    while not is_free(1 + (port := free_port())):
        pass
    return port
