"""What the supervisor says about the world: each thing once, when it changes."""

from collections.abc import Callable

from services.supervisor import progress
from services.supervisor.console import Console
from shared.messages import StatusReported
from shared.settings import Config


class Announcer:
    """Turns statuses into lines on the console."""

    def __init__(self, config: Config, console: Console) -> None:
        self._config = config
        self._console = console
        self._ready_world = (0, 0)
        """(start of the scheduler, epoch) of the world that was last called ready."""
        self._failed_start = 0
        self._is_draining = False

    def show(self, status: StatusReported, start: int, *, is_reachable: Callable[[], bool]) -> None:
        """Say what is new.

        Args:
            status: what the scheduler reported.
            start: how often it had been started by then: another one counts epochs anew.
            is_reachable: asks whether clients are told that it is ready.
        """
        self._show_draining(status)
        world = (start, status.epoch)
        if status.failure:
            self._show_failure(status, start)
        elif not progress.is_loaded(status):
            line = progress.loading_line(status, with_bar=self._console.is_terminal)
            self._console.progress(line)
        elif status.ready and world != self._ready_world and is_reachable():
            is_first = self._ready_world == (0, 0)
            self._ready_world = world
            self._console.progress("")
            if is_first:
                self._console.say(f"\n{progress.ready_line(self._config, status)}\n")
                self._console.say(f"{progress.curl_line(self._config)}\n")
            else:
                self._console.line("lockstep", f"ready again (epoch {status.epoch})")

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
