"""The asyncio side of the bus: one Dialer to the scheduler, drained without ever blocking."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from shared import limits
from shared.messages import ToGateway
from shared.transport.links import Dialer, LinkEvent

DRAIN_MESSAGES_MAX = 32
"""Messages taken before other tasks run: at 16 tokens each about 2 ms of work."""

Events = list[LinkEvent[ToGateway]]


class Link(Protocol):
    """What sends to the scheduler."""

    def send(self, message: msgspec.Struct) -> None:
        """Send to the scheduler.

        Raises:
            PeerUnknown: there is no session at the moment.
            LinkFull: the scheduler does not keep up.
        """
        ...

    def close(self) -> None:
        """Say goodbye."""
        ...


class Timer(Protocol):
    """What a `Later` returns."""

    def cancel(self) -> None:
        """Do not call back any more."""
        ...


class Later(Protocol):
    """Sets a timer, as `asyncio.AbstractEventLoop.call_later` does."""

    def __call__(self, seconds: float, callback: Callable[..., object], /, *args: object) -> Timer:
        """Call `callback(*args)` once after so many seconds."""
        ...


class SchedulerLink:
    """Sends to the scheduler and hands what arrives to one handler, in the event loop's thread.

    The descriptor is edge-triggered: it tells of news once, and any call into the socket may
    swallow that. So every receive goes on until nothing is left, every send is followed by a
    receive, and a timer sends acknowledgements and keep-alives, and covers the rest.
    """

    def __init__(self, address: str, keys_dir: Path | None = None) -> None:
        self._dialer: Dialer[ToGateway] = Dialer(address, "gateway", ToGateway, keys_dir=keys_dir)
        self._handle: Callable[[Events], None] | None = None
        self._loop = asyncio.get_running_loop()
        self._is_drain_due = False
        self._is_closed = False
        self._timer: asyncio.TimerHandle | None = None

    def start(self, handle: Callable[[Events], None]) -> None:
        """Connect, and from now on call `handle` with what arrives."""
        self._handle = handle
        self._loop.add_reader(self._dialer.fileno(), self._drain)
        self._tick()

    def send(self, message: msgspec.Struct) -> None:
        """Send to the scheduler.

        Raises:
            PeerUnknown: there is no session at the moment.
            LinkFull: the scheduler does not keep up.
        """
        self._dialer.send(message)
        self._schedule_drain()

    def close(self) -> None:
        """Say goodbye; blocks up to `limits.GOODBYE_S` until all orders are acknowledged."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._dialer.fileno())
        self._dialer.close()

    def _tick(self) -> None:
        self._timer = self._loop.call_later(limits.ACK_DELAY_S, self._tick)
        self._drain()

    def _schedule_drain(self) -> None:
        if not self._is_drain_due:
            self._is_drain_due = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._is_drain_due = False
        if self._is_closed or self._handle is None:
            return
        events = self._dialer.poll(0.0, DRAIN_MESSAGES_MAX)
        if not self._dialer.socket.is_drained:
            self._schedule_drain()
        if events:
            self._handle(events)
