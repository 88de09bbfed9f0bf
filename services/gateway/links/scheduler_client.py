"""Link to the scheduler. Owns the interfaces through which requests use it."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from services.gateway.links.loop_dialer import LoopDialer
from shared import limits
from shared.messages import ToGateway
from shared.transport.links import LinkEvent

Events = list[LinkEvent[ToGateway]]


class Link(Protocol):
    """Interface with which `OpenRequests` sends messages to the scheduler."""

    def send(self, message: msgspec.Struct) -> None:
        """Send a message to the scheduler without waiting for it.

        Raises:
            PeerUnknown: when no session is open.
            LinkFull: when the scheduler does not keep up.
        """
        ...

    def close(self) -> None:
        """Close the session with the scheduler."""
        ...


class Timer(Protocol):
    """Handle of a timer that a `CallLater` has set."""

    def cancel(self) -> None:
        """Cancel the timer, so that its callback is not called."""
        ...


class CallLater(Protocol):
    """Function that sets a timer, such as `asyncio.AbstractEventLoop.call_later`."""

    def __call__(self, seconds: float, callback: Callable[..., object], /, *args: object) -> Timer:
        """Call `callback(*args)` once after this many seconds."""
        ...


class SchedulerClient(LoopDialer[ToGateway]):
    """Link to the scheduler in an event loop."""

    def __init__(
        self,
        address: str,
        keys_dir: Path | None = None,
        *,
        silence_s: float = limits.PEER_SILENCE_S,
    ) -> None:
        """Create the client; `start` connects it.

        Args:
            address: ZeroMQ address of the scheduler.
            keys_dir: folder of this host's keys, used over tcp if they exist.
            silence_s: silence of the scheduler after which it counts as lost.
        """
        super().__init__(address, ToGateway, keys_dir, silence_s=silence_s)
