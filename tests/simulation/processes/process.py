"""A simulated process: it has turns, can be killed at any frame, stopped, and started again."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from shared.clock import Clock
from tests.simulation.environment.event_heap import Heap
from tests.simulation.environment.network import SimulatedSocket, Wire

TURN_S = 0.0002
"""From news to the turn that takes them."""


class Killed(BaseException):
    """The process dies here, in the middle of whatever it does."""


class Process(ABC):
    """One life of one process. Whoever starts it again makes another one."""

    def __init__(self, name: str, heap: Heap, wire: Wire) -> None:
        self.name = name
        self.heap = heap
        self.wire = wire
        self.clock: Clock = heap
        self.started_at_s = heap.now_s
        self.is_alive = True
        self.is_stopped = False
        self.is_visibly_stopped = False
        """As the operating system tells a parent."""
        self.is_hindered = False
        """It was stopped, or its link has failed: it may obey late."""
        self.exit_code: int | None = None
        self.sockets: list[SimulatedSocket] = []
        self.dies_after_sends = -1
        """Killed by the so-manieth frame from here; -1: not at all."""
        self.on_end: Callable[[Process], object] = lambda _: None
        self.on_error: Callable[[Process, Exception], object] = _raise
        self._turn_at_s: float | None = None
        self._deferred: list[tuple[Callable[..., object], tuple[Any, ...]]] = []

    def opens(self) -> contextlib.AbstractContextManager[None]:
        """Sockets that are opened inside are this process'."""
        return self.wire.opened_by(self)

    # --- what each kind of process says ---------------------------------------------------------

    @abstractmethod
    def turn(self) -> None:
        """Hear, think, say."""

    @abstractmethod
    def due_in_s(self) -> float:
        """Return after how many seconds the next turn is due without news."""

    # --- turns ----------------------------------------------------------------------------------

    def wake(self) -> None:
        """Have a turn soon: there is news."""
        self.wake_at(self.heap.now_s + TURN_S)

    def wake_at(self, when_s: float) -> None:
        """Have a turn then, or sooner."""
        if self._turn_at_s is not None and self._turn_at_s <= when_s:
            return
        self._turn_at_s = when_s
        self.heap.at(when_s, self._have_turn, when_s)

    def later(self, seconds: float, do: Callable[..., object], *args: Any) -> None:
        """Do something of this process' own after a time; later still if it is stopped then."""
        self.heap.after(seconds, self._do, do, args)

    def _have_turn(self, when_s: float) -> None:
        if when_s != self._turn_at_s:
            return
        self._turn_at_s = None
        if self.is_stopped:
            return
        self._guarded(self.turn, ())
        if self.is_alive:
            self.wake_at(self.heap.now_s + max(TURN_S, self.due_in_s()))

    def _do(self, do: Callable[..., object], args: tuple[Any, ...]) -> None:
        if self.is_stopped:
            self._deferred.append((do, args))
        else:
            self._guarded(do, args)

    def _guarded(self, do: Callable[..., object], args: tuple[Any, ...]) -> None:
        if not self.is_alive:
            return
        try:
            do(*args)
        except Killed:
            self.kill("in the middle of a turn")
        except Exception as error:  # noqa: BLE001 - a process of ours has a bug, or met one
            self.on_error(self, error)

    # --- life and death -------------------------------------------------------------------------

    def about_to_send(self) -> None:
        """Die here if that was ordered."""
        if not self.is_alive:
            raise Killed
        if self.dies_after_sends >= 0:
            if self.dies_after_sends == 0:
                raise Killed
            self.dies_after_sends -= 1

    def exit(self, code: int) -> None:
        """The process ends itself."""
        if self.is_alive:
            self.exit_code = code
        self._end(f"exits with {code}", keep_tail=True)

    def kill(self, how: str = "") -> None:
        """SIGKILL; whether its last frames arrive is a matter of chance."""
        keep_tail = self.heap.chance(f"tail of {self.name}").random() < 0.5
        self._end(f"is killed {how}", keep_tail=keep_tail)

    def stop(self) -> None:
        """SIGSTOP."""
        self.freeze()
        self.is_visibly_stopped = True

    def freeze(self) -> None:
        """Nothing of it runs any more, and nobody is told."""
        self.heap.note(self.name, "stands still")
        self.is_stopped = self.is_hindered = True

    def go_on(self) -> None:
        """SIGCONT."""
        if not self.is_alive or not self.is_stopped:
            return
        self.heap.note(self.name, "goes on")
        self.is_stopped = self.is_visibly_stopped = False
        deferred, self._deferred = self._deferred, []
        for do, args in deferred:
            self._guarded(do, args)
        self.wake()

    def _end(self, how: str, *, keep_tail: bool) -> None:
        if not self.is_alive:
            return
        self.heap.note(self.name, how)
        self.is_alive = False
        for socket in self.sockets:
            self.wire.sever(socket, keep_tail=keep_tail)
        self.on_end(self)


def _raise(process: Process, error: Exception) -> None:
    raise error
