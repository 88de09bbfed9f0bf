"""Restart of one role on request. Owns signalling the old process and waiting for the new one.

The new process is started by the keeper of the role: `lockstep up`, launchd or systemd.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus

from services.supervisor.console.console import Console
from services.supervisor.status import progress_text
from services.supervisor.status.service_queries import (
    StatusWatch,
    gateway_readiness,
    no_answer_error,
)
from shared.clock import SystemClock
from shared.configuration.settings import Config
from shared.errors import UnavailableError
from shared.messages import StatusReported
from shared.os import process_file
from shared.os.process_file import RoleProcess

END_DEADLINE_S = 5.0
"""Seconds from the signal to SIGKILL for a process without unfinished requests."""

RETURN_DEADLINE_S = 30.0
"""Seconds within which the role must run again. launchd waits 10 s before a start."""

_POLL_INTERVAL_S = 0.05
_STATUS_INTERVAL_S = 0.25


_ORDERS = {
    "gateway": (signal.SIGTERM, "finish its streams and end"),
    "scheduler": (signal.SIGUSR1, "hand over"),
    "store": (signal.SIGTERM, "end"),
    "rank": (signal.SIGTERM, "end"),
}
"""Role -> (signal on which its process ends, that order in words)."""


class RoleRestart:
    """Restart of one process of this host's roles, or of all its ranks at once."""

    def __init__(
        self, config: Config, role: str, targets: Sequence[RoleProcess], console: Console
    ) -> None:
        """Record the processes that run now.

        Args:
            config: contains the run folder and the deadlines.
            role: `gateway`, `scheduler`, `store` or `rank`.
            targets: processes to end.
            console: shows the progress.
        """
        self._config = config
        self._role = role
        self._targets = targets
        self._console = console
        self._clock = SystemClock()
        names = [target.name.replace("-", " ") for target in targets]
        self._name = names[0] if len(names) == 1 else f"{role}s"
        self._subject = f"The {role}"
        if role == "rank":
            self._subject = names[0].capitalize() if len(names) == 1 else "One of the ranks"
        self._pids_before = {process.pid for process in self._running()}

    def run(self) -> bool:
        """End the old processes, then wait until new ones run and are ready.

        The new ones are started by `lockstep up`, launchd or systemd, not here. A cache store need
        not become ready.

        Returns:
            False if a gateway took all of its drain time, so that unfinished requests were cut off.

        Raises:
            UnavailableError: when an old process cannot be ended, or no new one starts and becomes
                ready in time.
        """
        number, order = _ORDERS[self._role]
        pids = ", ".join(str(target.pid) for target in self._targets)
        self._console.print_line(f"{self._name}: told process {pids} to {order}")
        for target in self._targets:
            self._send(target, number)
        is_clean = self._wait_for_end()
        self._wait_for_successors()
        if self._role != "store":
            self._wait_until_ready()
        self._console.show_progress("")
        pids = ", ".join(str(process.pid) for process in self._successors())
        self._console.print_line(f"{self._name}: taken over by process {pids}")
        return is_clean

    def _send(self, target: RoleProcess, number: signal.Signals) -> None:
        # A process that holds its file has not ended, so its id belongs to no other process.
        if target in self._running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(target.pid, number)

    def _wait_for_end(self) -> bool:
        """Wait until the old processes have ended; return False if they were cut off."""
        drain_s = self._config.scheduler.drain_s if self._role == "gateway" else 0.0
        began_s = self._clock.now()
        if not self._wait(self._have_ended, drain_s + END_DEADLINE_S, "its end"):
            self._console.print_line(f"{self._name}: does not end; killing it")
            for target in self._targets:
                self._send(target, signal.SIGKILL)
            if not self._wait(self._have_ended, END_DEADLINE_S, "its end"):
                raise UnavailableError(f"{self._subject} does not end, even by SIGKILL.")
        if not drain_s or self._clock.now() - began_s < drain_s:
            return True
        self._console.print_line(
            f"{self._name}: requests that had not finished within {drain_s:g} s were cut off"
        )
        return False

    def _wait_for_successors(self) -> None:
        if not self._wait(self._have_successors, RETURN_DEADLINE_S, "a new process"):
            raise UnavailableError(
                f"{self._subject} was not started again within {RETURN_DEADLINE_S:.0f} s: "
                "`lockstep up`, launchd or systemd do so; without them, start it yourself."
            )

    def _wait_until_ready(self) -> None:
        """Wait until the scheduler reports the new processes as ready."""
        scheduler = self._config.scheduler
        deadline_s = scheduler.init_deadline_s + scheduler.load_deadline_s
        began_s = self._clock.now()
        # The link is opened only now, so that it receives no status of a previous scheduler.
        latest: StatusReported | None = None
        with contextlib.closing(StatusWatch(self._config, _STATUS_INTERVAL_S)) as watch:
            while (waited_s := self._clock.now() - began_s) < deadline_s:
                latest = watch.poll(_STATUS_INTERVAL_S) or latest
                if latest is None:
                    if waited_s > RETURN_DEADLINE_S:
                        raise no_answer_error(self._config, watch.refusal)
                elif latest.failure:
                    raise UnavailableError(f"{self._subject} is back, but: {latest.reason}")
                elif self._is_ready(latest):
                    return
                else:
                    reason = latest.reason or f"{self._subject} is not ready."
                    self._console.show_progress(f"Waiting: {reason}")
        raise UnavailableError(
            f"{self._subject} is back, but not ready within {deadline_s:.0f} s: see "
            "`lockstep status`."
        )

    def _is_ready(self, status: StatusReported) -> bool:
        if not (status.ready or (status.draining and progress_text.is_loaded(status))):
            return False
        if self._role == "rank":
            present = {rank.pid for rank in status.ranks}
            if not {process.pid for process in self._successors()} <= present:
                return False
        # The gateway is asked last because it follows the scheduler. This host may have none.
        readiness = gateway_readiness(self._config)
        if readiness is None:
            return self._role != "gateway"
        return readiness == HTTPStatus.OK or status.draining

    def _running(self) -> list[RoleProcess]:
        return process_file.find_processes(self._config.run_dir, self._role)

    def _have_ended(self) -> bool:
        running = {process.pid for process in self._running()}
        return not running & {target.pid for target in self._targets}

    def _have_successors(self) -> bool:
        return len(self._successors()) >= len(self._targets)

    def _successors(self) -> list[RoleProcess]:
        """Return the processes that have replaced the targets."""
        new = [process for process in self._running() if process.pid not in self._pids_before]
        # An epoch ends for all ranks, so ranks that are no targets have new processes too.
        names = {target.name for target in self._targets}
        return [process for process in new if process.name in names] or new

    def _wait(self, is_over: Callable[[], bool], deadline_s: float, awaited: str) -> bool:
        """Poll `is_over` until it is True; return False after `deadline_s` seconds."""
        began_s = self._clock.now()
        while not is_over():
            waited_s = self._clock.now() - began_s
            if waited_s > deadline_s:
                return False
            if waited_s > 1.0:
                self._console.show_progress(f"Waiting for {awaited} ({self._name})")
            time.sleep(_POLL_INTERVAL_S)
        return True
