"""Ending a role's process, and waiting until whoever keeps it running has started the next one."""

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus

from services.supervisor.console.console import Console
from services.supervisor.status import gateway_probe, progress_text
from services.supervisor.status.service_queries import StatusWatch, no_answer_error
from shared.clock import SystemClock
from shared.configuration.settings import Config
from shared.errors import UnavailableError
from shared.messages import StatusReported
from shared.os import process_file
from shared.os.process_file import RoleProcess

END_DEADLINE_S = 5.0
"""A process that has nothing to finish gets so long to end before it is killed."""

RETURN_DEADLINE_S = 30.0
"""Whoever keeps a process running waits before it starts the next one: launchd 10 s."""

_LOOK_S = 0.05
_STATUS_INTERVAL_S = 0.25


@dataclasses.dataclass(frozen=True, slots=True)
class _Order:
    """How a role is told to end."""

    signal: signal.Signals
    words: str


_ORDERS = {
    "gateway": _Order(signal.SIGTERM, "finish its streams and end"),
    "scheduler": _Order(signal.SIGUSR1, "hand over"),
    "store": _Order(signal.SIGTERM, "end"),
    "rank": _Order(signal.SIGTERM, "end"),
}


class RoleRestart:
    """One process, or all ranks of this host, that end and come back."""

    def __init__(
        self, config: Config, role: str, targets: Sequence[RoleProcess], console: Console
    ) -> None:
        """Note who runs.

        Args:
            config: says where the processes run, and how long they may take.
            role: `gateway`, `scheduler`, `store` or `rank`.
            targets: who is to end.
            console: hears what happens.
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
        self._before = {holder.pid for holder in process_file.find_processes(config.run_dir, role)}

    def run(self) -> bool:
        """End the old, wait for the new; False when something that ran was cut off.

        Raises:
            UnavailableError: the old cannot be ended, or no new one comes or becomes ready.
        """
        order = _ORDERS[self._role]
        pids = ", ".join(str(target.pid) for target in self._targets)
        self._console.say(f"{self._name}: told process {pids} to {order.words}")
        for target in self._targets:
            self._send(target, order.signal)
        is_clean = self._wait_for_end()
        self._wait_for_new()
        if self._role != "store":
            self._wait_until_ready()
        self._console.progress("")
        pids = ", ".join(str(holder.pid) for holder in self._new())
        self._console.say(f"{self._name}: taken over by process {pids}")
        return is_clean

    def _send(self, target: RoleProcess, number: signal.Signals) -> None:
        # Whoever still holds its file has not ended, so nobody else can have this process id.
        if target in process_file.find_processes(self._config.run_dir, self._role):
            with contextlib.suppress(ProcessLookupError):
                os.kill(target.pid, number)

    def _wait_for_end(self) -> bool:
        """Wait until the old are gone; False when the time to finish was over before."""
        drain_s = self._config.scheduler.drain_s if self._role == "gateway" else 0.0
        began_s = self._clock.now()
        if not self._wait(self._have_ended, drain_s + END_DEADLINE_S, "its end"):
            self._console.say(f"{self._name}: does not end, so it is killed")
            for target in self._targets:
                self._send(target, signal.SIGKILL)
            if not self._wait(self._have_ended, END_DEADLINE_S, "its end"):
                raise UnavailableError(f"{self._subject} does not end, not even by SIGKILL.")
        if not drain_s or self._clock.now() - began_s < drain_s:
            return True
        self._console.say(f"{self._name}: what had not finished within {drain_s:g} s was cut off")
        return False

    def _wait_for_new(self) -> None:
        if not self._wait(self._are_back, RETURN_DEADLINE_S, "a new process"):
            raise UnavailableError(
                f"{self._subject} was not started again within {RETURN_DEADLINE_S:.0f} s: "
                "`lockstep up`, launchd or systemd do so; without them, start it yourself."
            )

    def _wait_until_ready(self) -> None:
        """Wait for a status of the world that the new processes belong to."""
        scheduler = self._config.scheduler
        deadline_s = scheduler.init_deadline_s + scheduler.load_deadline_s
        began_s = self._clock.now()
        # Opened only now, so that it hears nothing that a predecessor has said.
        watch = StatusWatch(self._config, _STATUS_INTERVAL_S)
        latest: StatusReported | None = None
        try:
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
                    self._console.progress(f"Waiting: {reason}")
        finally:
            watch.close()
        raise UnavailableError(
            f"{self._subject} is back, but not ready within {deadline_s:.0f} s: see "
            "`lockstep status`."
        )

    def _is_ready(self, status: StatusReported) -> bool:
        if not (status.ready or (status.draining and progress_text.is_loaded(status))):
            return False
        if self._role == "rank":
            present = {rank.pid for rank in status.ranks}
            if not {holder.pid for holder in self._new()} <= present:
                return False
        # What clients see comes last. There need not be a gateway on this host.
        readiness = gateway_probe.readiness(self._config)
        if readiness is None:
            return self._role != "gateway"
        return readiness == HTTPStatus.OK or status.draining

    def _have_ended(self) -> bool:
        there = process_file.find_processes(self._config.run_dir, self._role)
        return not {holder.pid for holder in there} & {target.pid for target in self._targets}

    def _are_back(self) -> bool:
        return len(self._new()) >= len(self._targets)

    def _new(self) -> list[RoleProcess]:
        """Return who has taken the places of those that were told to end."""
        there = process_file.find_processes(self._config.run_dir, self._role)
        fresh = [holder for holder in there if holder.pid not in self._before]
        # An epoch ends for all ranks: those of other names are back too.
        names = {target.name for target in self._targets}
        return [holder for holder in fresh if holder.name in names] or fresh

    def _wait(self, is_over: Callable[[], bool], deadline_s: float, for_what: str) -> bool:
        """Wait until it is over; False when it is not after `deadline_s`."""
        began_s = self._clock.now()
        while not is_over():
            waited_s = self._clock.now() - began_s
            if waited_s > deadline_s:
                return False
            if waited_s > 1.0:
                self._console.progress(f"Waiting for {for_what} ({self._name})")
            time.sleep(_LOOK_S)
        return True
