"""Restart of a host's roles with another world. Owns the order to the supervisor, and the wait."""

import contextlib
import time
from collections.abc import Callable
from http import HTTPStatus

from services.supervisor import replacement
from services.supervisor.console.console import Console
from services.supervisor.status import progress_text, running
from services.supervisor.status.service_queries import StatusWatch, gateway_readiness
from shared.clock import SystemClock
from shared.configuration.host_share import HostShare
from shared.configuration.settings import Config
from shared.errors import UnavailableError
from shared.messages import StatusReported
from shared.os import process_file
from shared.os.process_file import RoleProcess

RETURN_DEADLINE_S = 60.0
"""Seconds for the supervisor to take the new settings, in addition to its own time to stop."""

_STOP_EXTRA_S = 25.0
"""Seconds to stop beside the drains of gateway and scheduler."""
_ABSENT_S = 10.0
"""Seconds after which a supervisor without a process file counts as ended."""
_POLL_INTERVAL_S = 0.1
_STATUS_INTERVAL_S = 0.25


class WorldRestart:
    """Restart of all roles of this host's `lockstep up` with new settings."""

    def __init__(
        self, before: Config, share: HostShare, supervisor: RoleProcess, console: Console
    ) -> None:
        """Prepare; nothing is ordered.

        Args:
            before: the settings of the running roles.
            share: roles and settings of this host from now on, with the same run folder.
            supervisor: the process of `lockstep up`.
            console: shows the progress.
        """
        self._before = before
        self._share = share
        self._config = share.config
        self._folder = before.run_dir
        self._supervisor = supervisor
        self._console = console
        self._clock = SystemClock()
        self._facts = running.facts(share.config)
        self._old_pids: set[int] = set()
        """Processes of roles that run when the restart is ordered."""
        self._failure = ""
        """Why the new world failed, as its scheduler has reported."""

    def order(self) -> None:
        """Order the restart.

        Raises:
            ConfigError: when the run folder cannot be written.
            UnavailableError: when the supervisor has ended.
        """
        found = process_file.find_all(self._folder)
        self._old_pids = {one.pid for one in found} - {self._supervisor.pid}
        try:
            replacement.order(self._folder, self._share, self._supervisor.pid)
        except ProcessLookupError:
            raise UnavailableError("`lockstep up` has just ended: start it again.") from None
        self._console.print_line(
            f"Told `lockstep up` (process {self._supervisor.pid}) to start its roles with the new "
            "settings"
        )

    def wait(self) -> StatusReported | None:
        """Wait until the new world is ready, and return its status.

        On a host without the scheduler wait only until this host's ranks run.

        Returns:
            The scheduler's report; None if it does not answer on a host without it.

        Raises:
            UnavailableError: when the supervisor does not take the order, goes back to its
                previous settings, or the world does not become ready.
        """
        self._wait_for_start()
        is_ready = self._is_ready if self._share.roles.scheduler else self._have_ranks_started
        return self._wait_for_world(is_ready)

    def _wait_for_start(self) -> None:
        """Wait until the supervisor has ended the old roles and works with the new settings."""
        drains_s = 2.0 * self._before.scheduler.drain_s
        deadline_s = drains_s + _STOP_EXTRA_S + RETURN_DEADLINE_S
        began_s = seen_at_s = self._clock.now()
        while (now_s := self._clock.now()) - began_s < deadline_s:
            self._check_refusal()
            found = process_file.find_all(self._folder)
            supervisors = [one for one in found if one.name == process_file.SUPERVISOR]
            if supervisors:
                seen_at_s = now_s
            elif now_s - seen_at_s > _ABSENT_S:
                raise UnavailableError("`lockstep up` has ended: see its log, and start it again.")
            has_ended = not self._old_pids & {one.pid for one in found}
            if has_ended and supervisors and supervisors[0].facts == self._facts:
                return
            self._console.show_progress("Waiting: the roles are stopping")
            time.sleep(_POLL_INTERVAL_S)
        raise UnavailableError(
            f"`lockstep up` has not taken the new settings within {deadline_s:.0f} s: see its log."
        )

    def _wait_for_world(
        self, is_ready: Callable[[StatusReported | None], bool]
    ) -> StatusReported | None:
        scheduler = self._config.scheduler
        deadline_s = scheduler.init_deadline_s + scheduler.load_deadline_s + RETURN_DEADLINE_S
        began_s = self._clock.now()
        latest: StatusReported | None = None
        with contextlib.closing(StatusWatch(self._config, _STATUS_INTERVAL_S)) as watch:
            while self._clock.now() - began_s < deadline_s:
                latest = watch.poll(_STATUS_INTERVAL_S) or latest
                if latest is not None and latest.failure:
                    self._failure = latest.reason
                self._check_refusal()
                if latest is not None and latest.failure == "epochs":
                    raise UnavailableError(f"The new world does not become ready: {latest.reason}")
                if is_ready(latest):
                    self._console.show_progress("")
                    return latest
                reason = latest.reason if latest else ""
                self._console.show_progress(f"Waiting: {reason or 'the roles are starting'}")
        raise UnavailableError(
            f"The new world is not ready within {deadline_s:.0f} s: see `lockstep status`."
        )

    def _is_ready(self, status: StatusReported | None) -> bool:
        if status is None or not status.ready or not progress_text.is_loaded(status):
            return False
        has_gateway = self._share.roles.gateway
        return not has_gateway or gateway_readiness(self._config) == HTTPStatus.OK

    def _have_ranks_started(self, _: StatusReported | None) -> bool:
        found = process_file.find_processes(self._folder, "rank")
        return len({one.name for one in found}) >= len(self._share.roles.ranks)

    def _check_refusal(self) -> None:
        """Raise UnavailableError if the supervisor has gone back to its previous settings."""
        reason = replacement.refusal(self._folder)
        if reason:
            self._console.show_progress("")
            raise UnavailableError(
                "The new settings cannot be used, so the previous ones are in use again: "
                f"{self._failure or reason}"
            )
