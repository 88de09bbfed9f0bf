"""Base of simulated processes. Owns turns, kills, stops and restarts of one process."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from shared.clock import Clock
from tests.simulation.environment.event_heap import EventHeap
from tests.simulation.environment.network import Network, SimulatedSocket

TURN_S = 0.0002
"""Time from new input to the turn that handles it."""


class Killed(BaseException):
    """Raised inside a process at the point where it is killed."""


class Process(ABC):
    """One life of one process; a restart creates another object."""

    def __init__(self, name: str, heap: EventHeap, network: Network) -> None:
        self.name = name
        self.heap = heap
        self.network = network
        self.clock: Clock = heap
        self.started_at_s = heap.now_s
        self.is_alive = True
        self.is_stopped = False
        self.is_visibly_stopped = False
        """The operating system reports the stop to the parent process."""
        self.is_impaired = False
        """It was stopped or its link has failed, so it may react late."""
        self.exit_code: int | None = None
        self.sockets: list[SimulatedSocket] = []
        self.dies_after_sends = -1
        """The process is killed after this many more frames; -1: never."""
        self.on_end: Callable[[Process], object] = lambda _: None
        self.on_error: Callable[[Process, Exception], object] = _raise
        self._turn_at_s: float | None = None
        self._deferred: list[tuple[Callable[..., object], tuple[Any, ...]]] = []

    def owning_sockets(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which opened sockets belong to this process."""
        return self.network.opened_by(self)

    # --- implemented by each kind of process ------------------------------------------------------

    @abstractmethod
    def turn(self) -> None:
        """Handle input and send output once."""

    @abstractmethod
    def due_in_s(self) -> float:
        """Return the seconds until the next turn when no input arrives."""

    # --- turns ------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Schedule a turn soon because there is input."""
        self.wake_at(self.heap.now_s + TURN_S)

    def wake_at(self, when_s: float) -> None:
        """Schedule a turn at `when_s` unless an earlier one is scheduled."""
        if self._turn_at_s is not None and self._turn_at_s <= when_s:
            return
        self._turn_at_s = when_s
        self.heap.call_at(when_s, self._have_turn, when_s)

    def call_later(self, seconds: float, callback: Callable[..., object], *args: Any) -> None:
        """Call a function of this process after `seconds`, or when a stopped process resumes."""
        self.heap.call_after(seconds, self._call_unless_stopped, callback, args)

    def _have_turn(self, when_s: float) -> None:
        if when_s != self._turn_at_s:
            return
        self._turn_at_s = None
        if self.is_stopped:
            return
        self._call(self.turn, ())
        if self.is_alive:
            self.wake_at(self.heap.now_s + max(TURN_S, self.due_in_s()))

    def _call_unless_stopped(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        if self.is_stopped:
            self._deferred.append((callback, args))
        else:
            self._call(callback, args)

    def _call(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        if not self.is_alive:
            return
        try:
            callback(*args)
        except Killed:
            self.kill("in the middle of a turn")
        except Exception as error:  # noqa: BLE001 - any error is a finding
            self.on_error(self, error)

    # --- life and death ---------------------------------------------------------------------------

    def about_to_send(self) -> None:
        """Die here if the process is to be killed at this frame.

        Raises:
            Killed: the process dies.
        """
        if not self.is_alive:
            raise Killed
        if self.dies_after_sends >= 0:
            if self.dies_after_sends == 0:
                raise Killed
            self.dies_after_sends -= 1

    def exit(self, code: int) -> None:
        """End the process by itself with an exit code."""
        if self.is_alive:
            self.exit_code = code
        self._end(f"exits with {code}", keep_tail=True)

    def kill(self, how: str = "") -> None:
        """Kill the process as SIGKILL does; a random choice decides whether its last frames
        arrive."""
        keep_tail = self.heap.random_stream(f"tail of {self.name}").random() < 0.5
        self._end(f"is killed {how}", keep_tail=keep_tail)

    def stop(self) -> None:
        """Stop the process as SIGSTOP does."""
        self.freeze()
        self.is_visibly_stopped = True

    def freeze(self) -> None:
        """Stop the process without a report to its parent."""
        self.heap.record(self.name, "is stopped")
        self.is_stopped = self.is_impaired = True

    def resume(self) -> None:
        """Resume the process as SIGCONT does."""
        if not self.is_alive or not self.is_stopped:
            return
        self.heap.record(self.name, "resumes")
        self.is_stopped = self.is_visibly_stopped = False
        deferred, self._deferred = self._deferred, []
        for callback, args in deferred:
            self._call(callback, args)
        self.wake()

    def _end(self, how: str, *, keep_tail: bool) -> None:
        if not self.is_alive:
            return
        self.heap.record(self.name, how)
        self.is_alive = False
        for socket in self.sockets:
            self.network.sever(socket, keep_tail=keep_tail)
        self.on_end(self)


def _raise(process: Process, error: Exception) -> None:
    raise error
