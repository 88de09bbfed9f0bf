"""A real Lockstep that faults are done to: its folder, its settings, its processes, its state.

`Stack` is what `lockstep up` and separately started roles have in common.
"""

import abc
import dataclasses
import http.client
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import services
from services.supervisor.children import effective_config
from services.supervisor.status.service_queries import StatusWatch
from shared.configuration.loading import config_from_tree, prepare_run_dir
from shared.messages import StatusReported
from tests.chaos import processes
from tests.chaos.log_lines import LogLines
from tests.ports import free_port

ROOT = Path(services.__file__).resolve().parents[1]
READY_DEADLINE_S = 60.0
LOOK_S = 0.05


class Stuck(Exception):
    """What should have happened by now has not: a hang, which is the worst outcome."""


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """What kind of Lockstep is started."""

    ranks: int = 2
    settings: tuple[tuple[str, Any], ...] = ()
    """Further settings, as ("section.key", value)."""
    log: Path | None = None
    """File that gets what the processes say; None: one in the stack's folder."""


class Stack(abc.ABC):
    """One Lockstep on this machine, in folders and on ports of its own."""

    def __init__(self, shape: Shape) -> None:
        """Make the folders and settings; `start` starts the processes."""
        self.shape = shape
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="ls-chaos-"))
        self.disk = self.folder / "disk"
        self.disk.mkdir()
        tree: dict[str, dict[str, Any]] = {
            "paths": {"run_dir": str(self.folder / "run")},
            "gateway": {"port": self.port},
            "world": {"size": shape.ranks},
            "cache": {"directory": str(self.disk / "blocks")},
            "scheduler": {"epochs_failed_max": 1_000},
        }
        for name, value in shape.settings:
            section, _, key = name.partition(".")
            tree.setdefault(section, {})[key] = value
        self.config = config_from_tree(tree)
        self.config_file = self.folder / "lockstep.toml"
        self.config_file.write_text(effective_config.as_toml(self.config), encoding="utf-8")
        self.environment = effective_config.without_overrides(dict(os.environ))
        self.environment["PYTHONPATH"] = str(ROOT)
        # What processes that are killed leave in the system's temporary folder is seen, and goes.
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir()
        self.environment["TMPDIR"] = str(self.temporary)
        self.log = LogLines(shape.log or self.folder / "log")
        self.load_s = 0.0
        """From the start of the processes to a world that is ready; measured by `start`."""
        self.youngest_s = 0.0
        """How old the youngest rank process was when the world was last seen ready."""
        prepare_run_dir(self.config)
        self._watch: StatusWatch | None = None

    @abc.abstractmethod
    def launch(self) -> None:
        """Start the processes."""

    @abc.abstractmethod
    def pids(self) -> dict[str, int]:
        """Return the pid of every role that runs: scheduler, store, gateway, rank 0, ..."""

    @abc.abstractmethod
    def end(self) -> None:
        """End the processes that this stack started; none is left when it returns."""

    def start(self) -> None:
        """Start everything and wait until it serves; measures the load time."""
        began_s = time.monotonic()
        self.launch()
        self.wait_ready()
        at_s = self.log.since(began_s, "world_ready")
        ready_s = self.log.first_s("world_ready") if at_s and not self.load_s else None
        if ready_s is not None:
            self.load_s = ready_s - began_s

    def close(self) -> None:
        """End everything; `remove` comes next."""
        self.forget_link()
        self.end()
        self.log.close()

    def remove(self) -> None:
        """Remove the folders, the log with them."""
        shutil.rmtree(self.folder)

    def pid(self, role: str) -> int:
        """Return a role's pid; waits for one that is just being started again."""
        until_s = time.monotonic() + READY_DEADLINE_S
        while True:
            found = self.pids().get(role)
            if found is not None:
                return found
            if time.monotonic() > until_s:
                raise Stuck(f"{role} was not started within {READY_DEADLINE_S:.0f} s")
            time.sleep(LOOK_S)

    def signal(self, role: str, number: signal.Signals) -> int:
        """Send a signal to a role's process; return its pid."""
        pid = self.pid(role)
        self.log.note(f"{number.name} to {role}, pid {pid}")
        processes.send(pid, number)
        return pid

    def status(self, timeout_s: float = 5.0) -> StatusReported:
        """Return the scheduler's state as of now.

        Raises:
            Stuck: it does not answer.
        """
        until_s = time.monotonic() + timeout_s
        while True:
            found = self.try_status()
            if found is not None:
                return found
            if time.monotonic() > until_s:
                raise Stuck(f"the scheduler did not answer within {timeout_s:.0f} s")

    def try_status(self) -> StatusReported | None:
        """Return the latest status that has arrived, if one has."""
        if self._watch is None:
            self._watch = StatusWatch(self.config, interval_s=0.1)
        return self._watch.poll(LOOK_S)

    def forget_link(self) -> None:
        """Close the harness's own link to the scheduler."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def wait_ready(
        self, gone: Collection[int] = (), deadline_s: float = READY_DEADLINE_S
    ) -> StatusReported:
        """Wait until a world without the processes `gone` serves, and the gateway says so.

        Raises:
            Stuck: it does not come to that.
        """
        until_s = time.monotonic() + deadline_s
        while True:
            status = self.try_status()
            if status is not None and status.ready:
                ranks = [rank.pid for rank in status.ranks]
                is_new = not set(ranks) & set(gone)
                if is_new and len(processes.pids_alive(ranks)) == len(ranks) and self.answers():
                    self.youngest_s = min(map(processes.age_s, ranks))
                    return status
            if time.monotonic() > until_s:
                raise Stuck(f"not ready again within {deadline_s:.0f} s: {_brief(status)}")

    def answers(self) -> bool:
        """Tell whether the gateway says that it is ready."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2.0)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def _brief(status: StatusReported | None) -> str:
    if status is None:
        return "the scheduler says nothing"
    ranks = ", ".join(f"{rank.rank} {rank.state} {rank.pid}" for rank in status.ranks)
    return f"epoch {status.epoch}, {status.reason or 'ready'} ({ranks})"
