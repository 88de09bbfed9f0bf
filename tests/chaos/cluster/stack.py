"""A real Lockstep under test: folders, settings, processes and status.

`Stack` is the base of `lockstep up` and of separately started roles.
"""

import abc
import dataclasses
import http.client
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

import services
from services.supervisor.children import effective_config
from services.supervisor.status.service_queries import StatusWatch
from shared.configuration.loading import config_from_tree, prepare_run_dir
from shared.messages import StatusReported
from tests.chaos.cluster import processes
from tests.chaos.cluster.log_lines import LogLines
from tests.support.ports import free_port
from tests.support.waiting import wait_until

ROOT = Path(services.__file__).resolve().parents[2]
READY_DEADLINE_S = 60.0
POLL_S = 0.05
T = TypeVar("T")


class DeadlineExceeded(Exception):
    """An expected event did not happen in time: a hang, the worst outcome of a fault."""


def wait_for(
    condition: Callable[[], T | None],
    deadline_s: float,
    failure: str | Callable[[], str],
    poll_s: float = POLL_S,
) -> T:
    """Wait as `wait_until` does and return the true value.

    Raises:
        DeadlineExceeded: `condition` is still false after `deadline_s` seconds.
    """
    try:
        value = wait_until(condition, deadline_s, poll_s=poll_s, failure=failure)
    except AssertionError as error:
        raise DeadlineExceeded(str(error)) from None
    assert value is not None
    return value


@dataclasses.dataclass(frozen=True, slots=True)
class StackOptions:
    """Size and settings of a stack."""

    ranks: int = 2
    settings: tuple[tuple[str, Any], ...] = ()
    """Further settings, as ("section.key", value)."""
    log: Path | None = None
    """File for the output of all processes; None: one in the stack's folder."""


class Stack(abc.ABC):
    """One Lockstep on this machine with its own folders and ports."""

    def __init__(self, options: StackOptions) -> None:
        """Create folders and settings; `start` starts the processes."""
        self.options = options
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="ls-chaos-"))
        self.disk = self.folder / "disk"
        self.disk.mkdir()
        tree: dict[str, dict[str, Any]] = {
            "paths": {"run_dir": str(self.folder / "run")},
            "gateway": {"port": self.port},
            "world": {"size": options.ranks},
            "cache": {"directory": str(self.disk / "blocks")},
            "scheduler": {"epochs_failed_max": 1_000},
        }
        for name, value in options.settings:
            section, _, key = name.partition(".")
            tree.setdefault(section, {})[key] = value
        self.config = config_from_tree(tree)
        self.config_file = self.folder / "lockstep.toml"
        self.config_file.write_text(effective_config.as_toml(self.config), encoding="utf-8")
        self.environment = effective_config.without_overrides(dict(os.environ))
        self.environment["PYTHONPATH"] = str(ROOT)
        # Temporary files of killed processes are counted here and deleted with the folder.
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir()
        self.environment["TMPDIR"] = str(self.temporary)
        self.log = LogLines(options.log or self.folder / "log")
        self.load_s = 0.0
        """Seconds from the start of the processes to a ready world; `start` measures it."""
        self.youngest_rank_age_s = 0.0
        """Age of the youngest rank process when the world was last seen ready."""
        prepare_run_dir(self.config)
        self._watch: StatusWatch | None = None

    @abc.abstractmethod
    def launch(self) -> None:
        """Start the processes."""

    @abc.abstractmethod
    def pids(self) -> dict[str, int]:
        """Return the pid of each running role: scheduler, store, gateway, rank 0, ..."""

    @abc.abstractmethod
    def end(self) -> None:
        """Stop all processes that this stack started, and wait for their end."""

    def start(self) -> None:
        """Start all processes and wait until the world serves; measure the load time."""
        began_s = time.monotonic()
        self.launch()
        self.wait_until_ready()
        at_s = self.log.since(began_s, "world_ready")
        ready_s = self.log.first_s("world_ready") if at_s and not self.load_s else None
        if ready_s is not None:
            self.load_s = ready_s - began_s

    def close(self) -> None:
        """Stop all processes and close the log."""
        self.close_status_link()
        self.end()
        self.log.close()

    def remove(self) -> None:
        """Delete the folders and the log in them."""
        shutil.rmtree(self.folder)

    def pid(self, role: str) -> int:
        """Return a role's pid; wait if it is being restarted.

        Raises:
            DeadlineExceeded: the role was not started in time.
        """
        return wait_for(lambda: self.pids().get(role), READY_DEADLINE_S, f"{role} was not started")

    def signal(self, role: str, number: signal.Signals) -> int:
        """Send a signal to a role's process; return its pid."""
        pid = self.pid(role)
        self.log.note(f"{number.name} to {role}, pid {pid}")
        processes.send_signal(pid, number)
        return pid

    def end_spares(self) -> None:
        """Kill the spares of ranks, so that the next rank that ends is replaced by a new process.

        A world of spares loads in less time than it takes to ask for its state.
        """
        for pid in processes.spare_pids(self.folder):
            processes.send_signal(pid, signal.SIGKILL)

    def status(self, timeout_s: float = 5.0) -> StatusReported:
        """Return the scheduler's current status.

        Raises:
            DeadlineExceeded: the scheduler does not answer in time.
        """
        return wait_for(self.try_status, timeout_s, "the scheduler did not answer")

    def try_status(self) -> StatusReported | None:
        """Return the latest status that has arrived; None if there is no new one."""
        if self._watch is None:
            self._watch = StatusWatch(self.config, interval_s=0.1)
        return self._watch.poll(POLL_S)

    def close_status_link(self) -> None:
        """Close the link for status queries to the scheduler."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def wait_until_ready(
        self, gone: Collection[int] = (), deadline_s: float = READY_DEADLINE_S
    ) -> StatusReported:
        """Wait until a world without the processes `gone` is ready, and the gateway too.

        Raises:
            DeadlineExceeded: there is no such world in time.
        """
        status: StatusReported | None = None

        def ready_world() -> StatusReported | None:
            nonlocal status
            status = self.try_status()
            if status is None or not status.ready:
                return None
            ranks = [rank.pid for rank in status.ranks]
            is_new = not set(ranks) & set(gone)
            is_alive = len(processes.pids_alive(ranks)) == len(ranks)
            return status if is_new and is_alive and self.is_gateway_ready() else None

        ready = wait_for(ready_world, deadline_s, lambda: f"not ready: {_summary(status)}")
        self.youngest_rank_age_s = min(processes.age_s(rank.pid) for rank in ready.ranks)
        return ready

    def is_gateway_ready(self) -> bool:
        """Return whether the gateway answers `/readyz` with 200."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2.0)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def _summary(status: StatusReported | None) -> str:
    if status is None:
        return "the scheduler does not answer"
    ranks = ", ".join(f"{rank.rank} {rank.state} {rank.pid}" for rank in status.ranks)
    return f"epoch {status.epoch}, {status.reason or 'ready'} ({ranks})"
