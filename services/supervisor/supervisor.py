"""Supervision of the roles of one host. Owns their start, health checks and ordered stop."""

import signal
import socket
from collections.abc import Sequence
from http import HTTPStatus
from types import FrameType

from services.supervisor.children.child import LONGEST_DELAY_S, PERMANENT, Child
from services.supervisor.children.process_group import ProcessGroup
from services.supervisor.children.stuck_processes import LingeringRanks, SchedulerLiveness
from services.supervisor.console.announcer import Announcer
from services.supervisor.console.console import Console
from services.supervisor.status import progress_text
from services.supervisor.status.service_queries import StatusWatch, StoreWatch, gateway_readiness
from shared import limits
from shared.clock import SystemClock
from shared.configuration.host_share import HostShare
from shared.messages import StatusReported

TICK_S = 0.1
"""Longest wait for a status in seconds, after which the children are checked again."""
STATUS_INTERVAL_S = 0.5
"""Seconds between two queries for the scheduler's status."""
END_DEADLINE_S = 5.0
"""Seconds from SIGTERM to SIGKILL for a role without unfinished requests."""

TICK_MAX_S = 1.0
"""Longest time in seconds that one tick counts. When the supervisor itself was not scheduled it
could not receive anything, so children must not be blamed for that time."""

SPARES_AFTER_S = 2.0
"""Seconds from a ready world to the start of missing spare processes: streams that wait get their
next tokens first."""

FINAL_FLUSH_S = 1.0
"""Seconds at the end for the reader of the output to take the last lines."""

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CLEAN = (limits.EXIT_OK, -signal.SIGTERM)
"""Exit codes of a clean end. SIGTERM by itself ends only a role that has not begun to serve."""


class Supervisor:
    """Keeper of one host's processes: starts them, restarts ended ones, kills stuck ones.

    A process is stuck if it was stopped (SIGSTOP), is a rank that stays after its epoch, or is a
    scheduler that sends no status.
    """

    def __init__(self, share: HostShare, children: ProcessGroup, console: Console) -> None:
        """Open the links to the scheduler and the store; `run` starts the processes.

        Args:
            share: the settings and the roles of this host.
            children: the processes to keep, none of them started.
            console: shows log lines and progress.
        """
        config = share.config
        self._config = config
        self._children = children
        self._console = console
        self._clock = SystemClock()
        self._now_s = 0.0
        self._ticked_at_s = self._clock.now()
        self._stop_signals: list[int] = []
        self._scheduler_watch = StatusWatch(config, STATUS_INTERVAL_S)
        self._store_watch = StoreWatch(config) if children.stores else None
        self._announcer = Announcer(share, console)
        self._lingering_ranks = LingeringRanks(socket.gethostname())
        self._scheduler_liveness = SchedulerLiveness(config.scheduler.silence_s)
        self._status_at_s = 0.0
        """Time of the latest status."""
        self._loaded_since_s: float | None = None
        """Since when the ranks of this host have been ready; None while they are not."""
        self._answered_gateway = 0
        """Number of the latest gateway process that has answered."""

    def run(self) -> int:
        """Start all children, watch them until a stop signal or a permanent failure, stop them.

        Returns:
            The exit code of `lockstep up`: 0 after a clean stop, 69 if requests could not finish,
            128 plus the signal after a second stop signal, else that of the permanent failure.
        """
        before = {number: signal.signal(number, self._on_signal) for number in _STOP_SIGNALS}
        # An ended child is noticed at once, not at the next tick.
        wake = self._scheduler_watch.wake
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: wake())
        try:
            self._announcer.announce_start()
            code = None
            while code is None and not self._stop_signals:
                code = self._check_children(self._children.all)
            return self._stop(code or limits.EXIT_OK)
        finally:
            self._scheduler_watch.close()
            if self._store_watch:
                self._store_watch.close()
            for child in [*self._children.spares, *self._children.all]:
                child.kill()
            self._console.flush(FINAL_FLUSH_S)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._stop_signals.append(number)

    def _stopped_max_s(self, child: Child) -> float:
        """Return after how many seconds a process that is stopped (SIGSTOP) is killed.

        Its peers have declared it lost by then, and it would notice only when it continues. A rank
        blocks all ranks and streams: its step's deadline may be later, if no step of its kind has
        run yet, but a stopped rank certainly computes nothing.
        """
        scheduler = self._config.scheduler
        if child in self._children.ranks:
            return scheduler.step_deadline_min_s
        return scheduler.silence_s

    def _check_children(self, children: Sequence[Child]) -> int | None:
        """Restart ended children and kill stuck ones, once.

        Returns:
            The exit code of a permanent failure, else None.
        """
        now_s = self._tick()
        for child in children:
            code = child.reap(now_s)
            if code in PERMANENT and not self._continues_without(child, code):
                return code
            if code is not None and child in self._children.ranks:
                # A world that continues with loaded spare processes may be ready again already.
                self._loaded_since_s = None
            child.start_if_due(now_s)
            stopped_max_s = self._stopped_max_s(child)
            if child.stopped_s(now_s) >= stopped_max_s:
                child.kill_stuck(f"has been stopped for {stopped_max_s:.0f} s")
        self._check_spares(now_s)
        lingering = self._lingering_ranks.due(now_s)
        for rank in [*self._children.ranks, *self._children.spares]:
            if rank.pid in lingering:
                rank.kill_stuck("does not leave its ended epoch")
        if self._store_watch and self._store_watch.has_reported_on():
            for store in self._children.stores:
                store.reset_backoff()
        scheduler = self._children.scheduler
        is_silent = scheduler and self._scheduler_liveness.expired(scheduler.starts, now_s)
        if scheduler and is_silent and not self._scheduler_watch.refusal:
            scheduler.kill_stuck("does not answer")
        status = self._scheduler_watch.poll(TICK_S)
        if status is None:
            refusal = self._scheduler_watch.refusal
            self._announcer.announce_no_status(refusal, now_s - self._status_at_s)
            return None
        return self._apply_status(status)

    def _check_spares(self, now_s: float) -> None:
        """Start missing spare processes once the world has been ready for `SPARES_AFTER_S`."""
        since_s = self._loaded_since_s
        may_start = since_s is not None and now_s - since_s >= SPARES_AFTER_S
        for spare in self._children.spares:
            spare.reap(now_s)
            if may_start:
                spare.start_if_due(now_s)

    def _continues_without(self, child: Child, code: int | None) -> bool:
        """Log an exit after which a restart cannot help; return whether the others continue."""
        if child.has_worked:
            # The cause arose since, for example a key file that others can write, and may go again.
            child.retry_slowly(self._now_s)
            consequence = f"the others continue; trying again in {LONGEST_DELAY_S:.0f} s"
        elif child in self._children.stores:
            child.disable_restart()
            consequence = "serving continues without blocks on SSD"
        else:
            consequence = "stopping everything"
        self._log_permanent_failure(child, code, consequence)
        return child.has_worked or child in self._children.stores

    def _apply_status(self, status: StatusReported) -> int | None:
        """Update the children's health from a status; return as `_check_children`."""
        scheduler, gateway = self._children.scheduler, self._children.gateway
        self._status_at_s = self._now_s
        # For a scheduler on another host, count the processes that this link has met.
        start = scheduler.starts if scheduler else self._scheduler_watch.schedulers
        self._scheduler_liveness.update(start, self._now_s)
        self._lingering_ranks.update(status, self._now_s)
        if gateway and self._answered_gateway != gateway.starts:
            self._is_gateway_ready()
        if progress_text.is_loaded(status):
            # Processes that have served restart without delay.
            ready = {rank.pid for rank in status.ranks}
            own = [child for child in self._children.ranks if child.pid in ready]
            for child in own:
                child.reset_backoff()
            if len(own) < len(self._children.ranks):
                self._loaded_since_s = None
            elif self._loaded_since_s is None:
                self._loaded_since_s = self._now_s
            if scheduler:
                scheduler.reset_backoff()
        else:
            self._loaded_since_s = None
        self._announcer.announce(status, start, is_gateway_ready=self._is_gateway_ready)
        return limits.EXIT_CONFIG if status.failure == "configuration" else None

    def _is_gateway_ready(self) -> bool:
        gateway = self._children.gateway
        if gateway is None:
            return True
        readiness = gateway_readiness(self._config)
        if readiness is not None:
            self._answered_gateway = gateway.starts
            gateway.reset_backoff()
        return readiness == HTTPStatus.OK

    def _tick(self) -> float:
        """Advance the supervisor's own time and return it, in seconds."""
        now_s = self._clock.now()
        self._now_s += min(now_s - self._ticked_at_s, TICK_MAX_S)
        self._ticked_at_s = now_s
        self._console.flush()
        return self._now_s

    def _log_permanent_failure(self, child: Child, code: int | None, consequence: str) -> None:
        self._console.show_progress("")
        self._console.log_line(
            f"{child.role.name} cannot run with this configuration (code {code}, see its message "
            f"above): {consequence}",
            "error",
        )

    def _stop(self, code: int) -> int:
        """Stop the roles in the order gateway, scheduler, ranks, store; return the exit code."""
        self._console.show_progress("")
        self._console.log_line("stopping (Ctrl-C again: at once)")
        children = self._children
        drain_s = self._config.scheduler.drain_s + END_DEADLINE_S
        gateways = [children.gateway] if children.gateway else []
        schedulers = [children.scheduler] if children.scheduler else []
        for spare in children.spares:
            spare.disable_restart()
            spare.kill()
        # Open requests need the other roles until the gateway has finished them.
        others = [child for child in children.all if child not in gateways] if not code else []
        unclean = self._end(gateways, drain_s, others)
        unclean += self._end(schedulers, drain_s)
        self._end(children.ranks, END_DEADLINE_S)
        self._end(children.stores, END_DEADLINE_S)
        if len(self._stop_signals) > 1:
            self._console.log_line("stopped at once")
            return 128 + self._stop_signals[-1]
        if unclean and not code:
            self._console.log_line(f"stopped; {', '.join(unclean)} could not finish")
            return limits.EXIT_UNAVAILABLE
        self._console.log_line("stopped")
        return code

    def _end(
        self, stage: Sequence[Child], deadline_s: float, others: Sequence[Child] = ()
    ) -> list[str]:
        """Terminate some children and return the names of those that did not end cleanly.

        Args:
            stage: children to end.
            deadline_s: seconds until they are killed.
            others: children that are supervised meanwhile.
        """
        ending = [child for child in stage if child.pid is not None]
        until_s = self._tick() + deadline_s
        for child in ending:
            child.terminate()
        while not all(child.has_ended(self._now_s) for child in ending):
            if len(self._stop_signals) > 1 or self._tick() > until_s:
                for child in ending:
                    child.kill()
            elif not others:
                self._scheduler_watch.poll(0.02)
            elif self._check_children(others) is not None:
                others = ()
        return [child.role.name for child in ending if child.last_code not in _CLEAN]
