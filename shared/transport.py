"""The only file that touches ZeroMQ: one factory for sockets, and the two ends of a link.

A `Listener` (ROUTER) has many peers, a `Dialer` (DEALER) has one. Both are used from one thread.
Neither runs code of its own: the owner calls `poll`, which returns what happened. Reliability is
`shared.delivery`'s.
"""

import contextlib
import os
import secrets
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from shared import codec, delivery, framing, limits
from shared.addresses import check_address
from shared.clock import Clock, SystemClock
from shared.delivery import Frame, Session
from shared.errors import ConfigError, FrameRefused, LinkFull, PeerUnknown
from shared.identifiers import Incarnation, PeerId
from shared.link_events import Connected, LinkCounters, LinkEvent, Lost, Received

M = TypeVar("M", bound=msgspec.Struct)


def new_incarnation() -> Incarnation:
    """Draw the number that tells this process from the one before it."""
    return Incarnation(secrets.randbits(62) + 1)


def _open_socket(kind: int, identity: bytes | None) -> zmq.Socket[bytes]:
    """Make a socket with every option set on purpose (the defaults drop, hang or grow)."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.setsockopt(zmq.SNDHWM, limits.SOCKET_MESSAGES_MAX)
    socket.setsockopt(zmq.RCVHWM, limits.SOCKET_MESSAGES_MAX)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, limits.MESSAGE_BYTES_MAX)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2_000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(limits.PEER_SILENCE_S * 1_000))
    socket.setsockopt(zmq.HANDSHAKE_IVL, 5_000)
    socket.setsockopt(zmq.RECONNECT_IVL, 20)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    if kind == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
    if identity is not None:
        socket.setsockopt(zmq.IDENTITY, identity)
    return socket


class LinkSet:
    """Waits for several links of one thread at once."""

    def __init__(self, *links: "_Link[Any]") -> None:
        self._poller = zmq.Poller()
        self._links: dict[Any, _Link[Any]] = {}
        for link in links:
            for source in link.sources():
                self._poller.register(source, zmq.POLLIN)
                self._links[source] = link

    def wait(self, timeout_s: float) -> list["_Link[Any]"]:
        """Wait up to `timeout_s`; return the links that have news."""
        ready = self._poller.poll(max(0, int(timeout_s * 1_000 + 0.999)))
        return list({id(link): link for link in (self._links[s] for s, _ in ready)}.values())


class _Link(Generic[M]):
    """What both ends share: the socket, the counters, the poller with its waker."""

    def __init__(self, socket: zmq.Socket[bytes], receives: Any, clock: Clock | None) -> None:
        self.incarnation = new_incarnation()
        self.counters = LinkCounters()
        self._socket = socket
        self._decoder: codec.Decoder[M] = codec.Decoder(receives)
        self._clock = clock or SystemClock()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)

    def wake(self) -> None:
        """Make a `poll` that waits return. The only call that other threads may make."""
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake_write, b"w")

    def fileno(self) -> int:
        """Return a descriptor, readable when `poll(0)` may have news (edge-triggered)."""
        descriptor: int = self._socket.getsockopt(zmq.FD)  # type: ignore[assignment]
        return descriptor

    def sources(self) -> list[Any]:
        """Return what a poller must watch: the socket and the waker."""
        return [self._socket, self._wake_read]

    def _wait(self, timeout_s: float) -> None:
        if timeout_s <= 0.0:
            return
        ready = dict(self._poller.poll(max(0, int(timeout_s * 1_000 + 0.999))))
        if self._wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4_096)

    def _receive_parts(self, count_max: int) -> Iterator[list[bytes]]:
        for _ in range(count_max):
            try:
                yield self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return

    def _transmit(self, parts: list[bytes]) -> None:
        # A full or unconnected socket is no loss: the session sends again what is not acknowledged.
        with contextlib.suppress(zmq.Again, zmq.ZMQError):
            self._socket.send_multipart(parts, zmq.NOBLOCK)

    def _close_socket(self) -> None:
        if self._socket.closed:
            # Closing a descriptor twice would close somebody else's.
            return
        self._socket.close(linger=200)
        os.close(self._wake_read)
        os.close(self._wake_write)


class Listener(_Link[M]):
    """The end with many peers, for example the scheduler's to its ranks."""

    def __init__(self, address: str, receives: Any, clock: Clock | None = None) -> None:
        """Bind `address`; `receives` is the union of messages that may arrive.

        Raises:
            ConfigError: the address is not allowed or already in use.
        """
        check_address(address)
        socket = _open_socket(zmq.ROUTER, None)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise ConfigError(
                f"Cannot listen on {address}: {error}. Is another Lockstep running there?"
            ) from None
        super().__init__(socket, receives, clock)
        self._sessions: dict[PeerId, Session] = {}

    @property
    def peers(self) -> list[PeerId]:
        """Peers with a session."""
        return list(self._sessions)

    def poll(self, timeout_s: float, count_max: int = 256) -> list[LinkEvent[M]]:
        """Wait up to `timeout_s` for news and return it, in order of arrival."""
        events: list[LinkEvent[M]] = []
        now_s = self._clock.now()
        due_in_s = min((s.due_in_s(now_s) for s in self._sessions.values()), default=timeout_s)
        self._wait(min(timeout_s, due_in_s))
        now_s = self._clock.now()
        for parts in self._receive_parts(count_max):
            self._take(PeerId(parts[0]), parts[1:], now_s, events)
        self._keep_up(now_s, events)
        return events

    def send(self, peer: PeerId, message: msgspec.Struct, epoch: int = 0) -> None:
        """Send to one peer.

        Raises:
            PeerUnknown: there is no session with it.
            LinkFull: it does not keep up.
        """
        self.send_body(peer, codec.encode(message), epoch)

    def send_body(self, peer: PeerId, body: bytes, epoch: int = 0) -> None:
        """Send an encoded message; the same bytes may go to several peers. Raises as `send`."""
        session = self._sessions.get(peer)
        if session is None:
            raise PeerUnknown(f"no session with {peer!r}")
        frame = session.send(epoch, body, self._clock.now())
        self._transmit([peer, *framing.pack(frame)])

    def drop(self, peer: PeerId) -> None:
        """End the session with a peer; what it sends from here on is refused with a reset."""
        session = self._sessions.pop(peer, None)
        if session is not None:
            self._transmit(
                [peer, *framing.pack(session.control(delivery.GOODBYE, self._clock.now()))]
            )

    def close(self, wait_s: float = limits.GOODBYE_S) -> None:
        """Wait until everything sent is acknowledged (at most `wait_s`), say goodbye, close."""
        if self._socket.closed:
            return
        until_s = self._clock.now() + wait_s
        while self._clock.now() < until_s and any(
            session.unacknowledged for session in self._sessions.values()
        ):
            self.poll(0.02)
        for peer in list(self._sessions):
            self.drop(peer)
        self._close_socket()

    def _take(
        self, peer: PeerId, parts: list[bytes], now_s: float, events: list[LinkEvent[M]]
    ) -> None:
        try:
            frame = framing.unpack(parts)
            session = self._sessions.get(peer)
            if frame.kind == delivery.HELLO:
                self._greet(peer, session, frame, now_s, events)
            elif (
                session is None
                or frame.sender != session.peer
                or frame.receiver != self.incarnation
            ):
                self.counters.stale += 1
                if frame.kind != delivery.RESET:
                    reset = Frame(0, self.incarnation, frame.sender, 0, 0, delivery.RESET)
                    self._transmit([peer, *framing.pack(reset)])
            elif frame.kind == delivery.GOODBYE:
                self._lose(peer, "goodbye", events)
            elif session.receive(frame, now_s):
                events.append(Received(peer, frame.epoch, self._decoder.decode(frame.body)))
        except FrameRefused:
            self.counters.refused += 1

    def _greet(
        self,
        peer: PeerId,
        session: Session | None,
        frame: Frame,
        now_s: float,
        events: list[LinkEvent[M]],
    ) -> None:
        if session is not None and session.peer != frame.sender:
            self._lose(peer, "restarted", events)
            session = None
        if session is None:
            if len(self._sessions) >= limits.PEERS_MAX:
                self.counters.refused += 1
                return
            session = Session(self.incarnation, frame.sender, now_s)
            self._sessions[peer] = session
            events.append(Connected(peer))
        self._transmit([peer, *framing.pack(session.control(delivery.WELCOME, now_s))])

    def _keep_up(self, now_s: float, events: list[LinkEvent[M]]) -> None:
        for peer, session in list(self._sessions.items()):
            if session.is_silent(now_s):
                self._lose(peer, f"silent for {limits.PEER_SILENCE_S:.0f} s", events)
                continue
            if session.due_in_s(now_s) <= 0.0:
                for frame in session.due(now_s):
                    self._transmit([peer, *framing.pack(frame)])

    def _lose(self, peer: PeerId, cause: str, events: list[LinkEvent[M]]) -> None:
        session = self._sessions.pop(peer)
        self.counters.resent += session.resent
        self.counters.duplicates += session.duplicates
        events.append(Lost(peer, cause))


class Dialer(_Link[M]):
    """The end with one peer, for example a rank's to the scheduler. Reconnects while it lives."""

    def __init__(
        self, address: str, identity: str, receives: Any, clock: Clock | None = None
    ) -> None:
        """Connect to `address` as `identity`; the incarnation is added, so a restart never clashes.

        Raises:
            ConfigError: the address is not allowed.
        """
        check_address(address)
        incarnation = new_incarnation()
        socket = _open_socket(zmq.DEALER, f"{identity}-{incarnation:x}".encode())
        socket.connect(address)
        super().__init__(socket, receives, clock)
        self.incarnation = incarnation
        self.peer = PeerId(address.encode())
        self._session: Session | None = None
        self._hello_at_s = 0.0

    @property
    def is_connected(self) -> bool:
        """Tell whether there is a session."""
        return self._session is not None

    def poll(self, timeout_s: float, count_max: int = 256) -> list[LinkEvent[M]]:
        """Wait up to `timeout_s` for news and return it, in order of arrival."""
        events: list[LinkEvent[M]] = []
        if timeout_s > 0.0:
            now_s = self._clock.now()
            self._say_what_is_due(now_s)
            due_in_s = self._session.due_in_s(now_s) if self._session else limits.HELLO_INTERVAL_S
            self._wait(min(timeout_s, due_in_s))
        now_s = self._clock.now()
        for parts in self._receive_parts(count_max):
            self._take(parts, now_s, events)
        # Only after reading: who was held up itself must not take its peer for silent.
        if self._session is not None and self._session.is_silent(now_s):
            self._lose(f"silent for {limits.PEER_SILENCE_S:.0f} s", events)
        self._say_what_is_due(now_s)
        return events

    def send(self, message: msgspec.Struct, epoch: int = 0) -> None:
        """Send to the peer.

        Raises:
            PeerUnknown: there is no session at the moment; `Connected` tells when there is.
            LinkFull: the peer does not keep up.
        """
        if self._session is None:
            raise PeerUnknown("not connected")
        frame = self._session.send(epoch, codec.encode(message), self._clock.now())
        self._transmit(framing.pack(frame))

    def close(self, wait_s: float = limits.GOODBYE_S) -> None:
        """Wait until everything sent is acknowledged (at most `wait_s`), say goodbye, close."""
        if self._socket.closed:
            return
        until_s = self._clock.now() + wait_s
        while self._session and self._session.unacknowledged and self._clock.now() < until_s:
            self.poll(0.02)
        if self._session is not None:
            self._transmit(framing.pack(self._session.control(delivery.GOODBYE, self._clock.now())))
        self._close_socket()

    def _take(self, parts: list[bytes], now_s: float, events: list[LinkEvent[M]]) -> None:
        try:
            frame = framing.unpack(parts)
            if frame.receiver != self.incarnation:
                self.counters.stale += 1
            elif frame.kind == delivery.WELCOME:
                self._begin(frame, now_s, events)
            elif self._session is None or frame.sender != self._session.peer:
                self.counters.stale += 1
                if frame.kind == delivery.RESET:
                    self._lose("restarted", events)
            elif frame.kind in (delivery.RESET, delivery.GOODBYE):
                self._lose(frame.kind, events)
            elif self._session.receive(frame, now_s):
                events.append(Received(self.peer, frame.epoch, self._decoder.decode(frame.body)))
        except FrameRefused:
            self.counters.refused += 1

    def _begin(self, frame: Frame, now_s: float, events: list[LinkEvent[M]]) -> None:
        if self._session is not None and self._session.peer == frame.sender:
            self._session.receive(frame, now_s)
            return
        self._lose("restarted", events)
        self._session = Session(self.incarnation, frame.sender, now_s)
        events.append(Connected(self.peer))

    def _say_what_is_due(self, now_s: float) -> None:
        if self._session is None:
            if now_s - self._hello_at_s >= limits.HELLO_INTERVAL_S:
                self._hello_at_s = now_s
                hello = Frame(0, self.incarnation, Incarnation(0), 0, 0, delivery.HELLO)
                self._transmit(framing.pack(hello))
        elif self._session.due_in_s(now_s) <= 0.0:
            for frame in self._session.due(now_s):
                self._transmit(framing.pack(frame))

    def _lose(self, cause: str, events: list[LinkEvent[M]]) -> None:
        if self._session is not None:
            self.counters.resent += self._session.resent
            self.counters.duplicates += self._session.duplicates
            self._session = None
            # The next session must not be taken for this one: its numbers begin again.
            self.incarnation = new_incarnation()
            events.append(Lost(self.peer, cause))


__all__ = [
    "Connected",
    "Dialer",
    "LinkCounters",
    "LinkEvent",
    "LinkFull",
    "LinkSet",
    "Listener",
    "Lost",
    "Received",
    "check_address",
    "new_incarnation",
]
