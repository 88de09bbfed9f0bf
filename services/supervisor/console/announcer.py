"""What the supervisor says about the world: each thing once, when it changes."""

from collections.abc import Callable, Sequence

from services.supervisor.console.console import Console
from services.supervisor.status import progress_text
from shared.configuration.host_share import HostShare
from shared.messages import StatusReported

UNHEARD_S = 3.0
"""So long nothing is said about a scheduler on another host that does not answer."""


class Announcer:
    """Turns statuses into lines on the console."""

    def __init__(self, share: HostShare, console: Console) -> None:
        self._share = share
        self._config = share.config
        self._console = console
        self._ready_world = (0, 0)
        """(start of the scheduler, epoch) of the world that was last called ready."""
        self._failed_start = 0
        self._is_draining = False
        self._refusal = ""
        self._is_waiting = False

    def starting(self) -> None:
        """Say what begins."""
        size = self._config.world.size
        where = f" on {self._share.name}" if self._share.name else ""
        self._console.say(
            f"Starting Lockstep{where}: {self._config.served_name}, "
            f"{_ranks(self._share.roles.ranks, size)} ({self._config.backend}). Ctrl-C stops it."
        )

    def show(self, status: StatusReported, start: int, *, is_reachable: Callable[[], bool]) -> None:
        """Say what is new.

        Args:
            status: what the scheduler reported.
            start: how often it had been started by then: another one counts epochs anew.
            is_reachable: asks whether clients are told that it is ready.
        """
        self._refusal = ""
        if self._is_waiting:
            self._is_waiting = False
            self._console.progress("")
        self._show_draining(status)
        world = (start, status.epoch)
        if status.failure:
            self._show_failure(status, start)
        elif not progress_text.is_loaded(status):
            line = progress_text.loading_line(status, with_bar=self._console.is_terminal)
            self._console.progress(line)
        elif status.ready and world != self._ready_world and is_reachable():
            is_first = self._ready_world == (0, 0)
            self._ready_world = world
            self._console.progress("")
            if is_first and not self._share.roles.gateway:
                ranks = _ranks(self._share.roles.ranks, self._config.world.size)
                self._console.say(
                    f"\nLockstep is ready, and {self._share.name} has its share of it ({ranks}); "
                    "clients ask a host with a gateway.\n"
                )
            elif is_first:
                self._console.say(f"\n{progress_text.ready_line(self._config, status)}\n")
                self._console.say(f"{progress_text.curl_line(self._config)}\n")
            else:
                self._console.line("lockstep", f"ready again (epoch {status.epoch})")

    def unheard(self, refusal: str, for_s: float) -> None:
        """Say why no scheduler answers: it refuses this host's key, or is not there.

        Args:
            refusal: as the link says it; "" if it is none.
            for_s: since the last answer, or the start.
        """
        address = self._config.gateway_address
        if refusal and refusal != self._refusal:
            self._refusal = refusal
            self._console.line(
                "lockstep",
                f"the handshake with {address} failed: {refusal}; see `lockstep keys show` here "
                "and on the scheduler's host",
            )
        if for_s >= UNHEARD_S and not self._share.roles.scheduler:
            self._is_waiting = True
            self._console.progress(f"Waiting for the scheduler at {address}")

    def _show_draining(self, status: StatusReported) -> None:
        if status.draining == self._is_draining:
            return
        self._is_draining = status.draining
        self._console.progress("")
        self._console.line(
            "lockstep",
            "draining: new requests are refused until `lockstep drain --off`"
            if status.draining
            else "new requests are taken again",
        )

    def _show_failure(self, status: StatusReported, start: int) -> None:
        if self._failed_start == start:
            return
        self._failed_start = start
        self._console.progress("")
        self._console.line("lockstep", status.reason)
        self._console.line(
            "lockstep",
            "nothing is tried any more; `lockstep restart scheduler` tries again"
            if status.failure == "epochs"
            else "it cannot run like this: stopping everything",
        )


def _ranks(here: Sequence[int], size: int) -> str:
    if len(here) == size:
        return f"{size} rank{'s' if size > 1 else ''}"
    if not here:
        return f"none of {size} rank{'s' if size > 1 else ''}"
    return f"rank{'s' if len(here) > 1 else ''} {', '.join(map(str, here))} of {size}"
