"""Looks after the children: starts them, watches them, ends those that cannot end, stops all."""

import signal
import socket
from collections.abc import Sequence
from http import HTTPStatus
from types import FrameType

from services.supervisor.children.child import PERMANENT, Child
from services.supervisor.children.lingering_ranks import LingeringRanks
from services.supervisor.children.process_group import ProcessGroup
from services.supervisor.console.announcer import Announcer
from services.supervisor.console.console import Console
from services.supervisor.status import gateway_probe, progress_text
from services.supervisor.status.scheduler_liveness import SchedulerLiveness
from services.supervisor.status.service_queries import StatusWatch
from services.supervisor.status.store_watch import StoreWatch
from shared import limits
from shared.clock import SystemClock
from shared.configuration.host_share import HostShare
from shared.messages import StatusReported

TICK_S = 0.1
STATUS_INTERVAL_S = 0.5
END_DEADLINE_S = 5.0
"""A role that was told to end and has nothing to finish gets so long before it is killed."""

STOPPED_S = limits.PEER_SILENCE_S
"""A process that has been stopped for so long is lost to all its peers, and will find that out
when it goes on: a new one takes its place."""

RANK_STOPPED_S = limits.STEP_DEADLINE_MIN_S
"""A rank that has been stopped holds up all ranks and streams. Its step may have a later deadline,
because steps of its kind have not run yet; that it computes nothing is certain."""

LEAP_S = 1.0
"""Time that passed while the supervisor itself did not run counts as no more than this: it could
not hear what was said meanwhile."""

LAST_WORDS_S = 1.0
"""Whoever reads what is said here gets so long at the end to take the rest."""

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CLEAN = (limits.EXIT_OK, -signal.SIGTERM)
"""A gateway or scheduler that SIGTERM ends by itself has not begun to serve."""


class Supervisor:
    """The children and what is known of them."""

    def __init__(self, share: HostShare, children: ProcessGroup, console: Console) -> None:
        config = share.config
        self._config = config
        self._children = children
        self._console = console
        self._clock = SystemClock()
        self._now_s = 0.0
        self._looked_at_s = self._clock.now()
        self._stop_signals: list[int] = []
        self._watch = StatusWatch(config, STATUS_INTERVAL_S)
        self._stores = StoreWatch(config) if children.stores else None
        self._announcer = Announcer(share, console)
        self._dismissals = LingeringRanks(socket.gethostname())
        self._silence = SchedulerLiveness()
        self._heard_at_s = 0.0
        """When a scheduler last said something."""
        self._gateway_start = 0
        """Start of the gateway that has been seen to answer."""

    def run(self) -> int:
        """Start everything, watch until told to stop or until a child cannot go on, stop all."""
        before = {number: signal.signal(number, self._on_signal) for number in _STOP_SIGNALS}
        try:
            self._announcer.starting()
            code = None
            while code is None and not self._stop_signals:
                code = self._look_after(self._children.all)
            return self._stop(code or limits.EXIT_OK)
        finally:
            self._watch.close()
            if self._stores:
                self._stores.close()
            for child in self._children.all:
                child.kill()
            self._console.flush(LAST_WORDS_S)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._stop_signals.append(number)

    def _look_after(self, children: Sequence[Child]) -> int | None:
        """Start who has ended and end who cannot, once; return why no start can help, or None."""
        now_s = self._tick()
        for child in children:
            code = child.reap(now_s)
            if code in PERMANENT:
                if child not in self._children.stores:
                    self._explain(child, code, "stopping everything")
                    return code
                self._explain(child, code, "serving goes on without KV blocks on SSD")
                child.give_up()
            child.start_if_due(now_s)
            stopped_max_s = RANK_STOPPED_S if child in self._children.ranks else STOPPED_S
            if child.stopped_s(now_s) >= stopped_max_s:
                child.kill_stuck(f"has been stopped for {stopped_max_s:.0f} s")
        due = self._dismissals.due(now_s)
        for rank in self._children.ranks:
            if rank.pid in due:
                rank.kill_stuck("does not leave the epoch that has ended")
        if self._stores and self._stores.has_begun():
            for store in self._children.stores:
                store.reset_backoff()
        scheduler = self._children.scheduler
        is_silent = scheduler and self._silence.expired(scheduler.starts, now_s)
        if scheduler and is_silent and not self._watch.refusal:
            scheduler.kill_stuck("does not answer")
        status = self._watch.poll(TICK_S)
        if status is None:
            self._announcer.unheard(self._watch.refusal, now_s - self._heard_at_s)
            return None
        return self._take(status)

    def _take(self, status: StatusReported) -> int | None:
        """Take in what the scheduler says; return why no start can help, or None."""
        scheduler, gateway = self._children.scheduler, self._children.gateway
        self._heard_at_s = self._now_s
        # Whose scheduler is elsewhere counts those that it has met.
        start = scheduler.starts if scheduler else self._watch.schedulers
        self._silence.heard(start, self._now_s)
        self._dismissals.take(status, self._now_s)
        if gateway and self._gateway_start != gateway.starts:
            self._is_reachable()
        if progress_text.is_loaded(status):
            # Whoever has served may end at any time, and is needed again at once.
            ready = {rank.pid for rank in status.ranks}
            for child in self._children.ranks:
                if child.pid in ready:
                    child.reset_backoff()
            if scheduler:
                scheduler.reset_backoff()
        self._announcer.show(status, start, is_reachable=self._is_reachable)
        return limits.EXIT_CONFIG if status.failure == "configuration" else None

    def _is_reachable(self) -> bool:
        gateway = self._children.gateway
        if gateway is None:
            return True
        readiness = gateway_probe.readiness(self._config)
        if readiness is not None:
            self._gateway_start = gateway.starts
            gateway.reset_backoff()
        return readiness == HTTPStatus.OK

    def _tick(self) -> float:
        """Return the time by which children are judged, in seconds."""
        now_s = self._clock.now()
        self._now_s += min(now_s - self._looked_at_s, LEAP_S)
        self._looked_at_s = now_s
        self._console.flush()
        return self._now_s

    def _explain(self, child: Child, code: int | None, consequence: str) -> None:
        self._console.progress("")
        self._console.line(
            "lockstep",
            f"{child.role.name} cannot run like this (code {code}, its reason stands above): "
            f"{consequence}",
        )

    def _stop(self, code: int) -> int:
        """End the roles from the outside in: who accepts work first, who computes last."""
        self._console.progress("")
        self._console.line("lockstep", "stopping (Ctrl-C again: at once)")
        children = self._children
        drain_s = self._config.scheduler.drain_s + END_DEADLINE_S
        gateways = [children.gateway] if children.gateway else []
        schedulers = [children.scheduler] if children.scheduler else []
        # What runs still needs the others: they are looked after until it has finished.
        others = [child for child in children.all if child not in gateways] if not code else []
        unclean = self._end(gateways, drain_s, others)
        unclean += self._end(schedulers, drain_s)
        self._end(children.ranks, END_DEADLINE_S)
        self._end(children.stores, END_DEADLINE_S)
        if len(self._stop_signals) > 1:
            self._console.line("lockstep", "stopped at once")
            return 128 + self._stop_signals[-1]
        if unclean and not code:
            self._console.line("lockstep", f"stopped; {', '.join(unclean)} could not finish")
            return limits.EXIT_UNAVAILABLE
        self._console.line("lockstep", "stopped")
        return code

    def _end(
        self, stage: Sequence[Child], deadline_s: float, others: Sequence[Child] = ()
    ) -> list[str]:
        """End some children; return the names of those that had to leave work undone.

        Args:
            stage: to be ended.
            deadline_s: until they are killed.
            others: go on meanwhile.
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
                self._watch.poll(0.02)
            elif self._look_after(others) is not None:
                others = ()
        return [child.role.name for child in ending if child.last_code not in _CLEAN]
