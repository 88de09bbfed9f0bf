"""Link to another process in an asyncio loop. Owns one Dialer, which it reads without blocking."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from shared import limits
from shared.transport.links import Dialer, LinkEvent

DRAIN_MESSAGES_MAX = 8
"""Most messages handled before other tasks run: about 1 ms of work at 16 tokens each, and about
15 ms at 64 tokens with 20 log probabilities each."""
TURN_S_MAX = 0.02
"""After a longer turn the next one handles half as many messages, so that no stream of large ones
keeps the event loop from other tasks."""

M = TypeVar("M", bound=msgspec.Struct)


class LoopDialer(Generic[M]):
    """Link to another process in an event loop, with one function that handles all received events.

    The descriptor of a ZeroMQ socket is edge-triggered: it becomes readable once, and any call into
    the socket may reset it. So every receive reads until the socket is empty, every send is
    followed by a receive, and a timer polls regularly, which also sends acknowledgements and
    keep-alives.

    A thread sends keep-alives too, so that the peer does not lose this gateway while the event loop
    is busy. A lock keeps the two threads apart; only then may they share the socket.
    """

    def __init__(
        self,
        address: str,
        receives: Any,
        keys_dir: Path | None = None,
        *,
        listener: str = "scheduler",
        silence_s: float = limits.PEER_SILENCE_S,
    ) -> None:
        """Create the link; `start` connects it.

        Args:
            address: ZeroMQ address of the peer.
            receives: union of the messages that may arrive.
            keys_dir: folder of this host's keys, used over tcp if they exist.
            listener: with keys, the role that this host's list gives the peer's key.
            silence_s: silence of the peer after which it counts as lost.
        """
        self._dialer: Dialer[M] = Dialer(
            address, "gateway", receives, keys_dir=keys_dir, listener=listener
        )
        self._dialer.silence_s = silence_s
        self._handle: Callable[[list[LinkEvent[M]]], None] | None = None
        self._loop = asyncio.get_running_loop()
        self._is_drain_due = False
        self._is_closed = False
        self._messages_max = DRAIN_MESSAGES_MAX
        """Messages that the next turn handles at most."""
        self._timer: asyncio.TimerHandle | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._heartbeat = threading.Thread(target=self._keep_alive, name="heartbeat", daemon=True)

    @property
    def is_connected(self) -> bool:
        """Whether there is a session, so that `send` is possible."""
        return self._dialer.is_connected

    def start(self, handle: Callable[[list[LinkEvent[M]]], None]) -> None:
        """Begin to receive from the peer; the session opens later and is then an event.

        Args:
            handle: called in the event loop's thread with each list of received events.
        """
        self._handle = handle
        self._loop.add_reader(self._dialer.fileno(), self._drain)
        self._tick()
        self._heartbeat.start()

    def send(self, message: msgspec.Struct) -> None:
        """Send a message to the peer.

        Raises:
            PeerUnknown: when no session is open.
            LinkFull: when the peer does not keep up.
        """
        with self._lock:
            self._dialer.send(message)
        self._schedule_drain()

    def close(self) -> None:
        """Close the session; wait up to `limits.GOODBYE_S` for all acknowledgements."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._dialer.fileno())
        self._ended.set()
        with self._lock:
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
        began_s = self._loop.time()
        with self._lock:
            events = self._dialer.poll(0.0, self._messages_max)
        if not self._dialer.socket.is_drained:
            self._schedule_drain()
        if not events:
            return
        self._handle(events)
        if self._loop.time() - began_s > TURN_S_MAX:
            self._messages_max = max(1, self._messages_max // 2)
        elif self._messages_max < DRAIN_MESSAGES_MAX:
            self._messages_max += 1

    def _keep_alive(self) -> None:
        while not self._ended.wait(limits.KEEPALIVE_S):
            with self._lock:
                if not self._ended.is_set():
                    self._dialer.keep_alive()
