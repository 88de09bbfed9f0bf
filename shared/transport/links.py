"""The two ends of a link: a `Listener` has many peers, a `Dialer` has one.

Both are used from one thread. Neither runs code of its own: the owner calls `poll`, which returns
what happened. `delivery` makes links reliable; `sockets` holds sockets and keys.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from shared import limits
from shared.clock import Clock, SystemClock
from shared.errors import FrameRefused, LinkFull, PeerUnknown
from shared.identifiers import Incarnation, PeerId
from shared.log import Log
from shared.transport import codec, delivery, framing, sockets
from shared.transport.authentication import REFUSAL_LOG_INTERVAL_S, AccessControl, listener_key
from shared.transport.delivery import Frame, Session, new_incarnation
from shared.transport.keys import DIALLING_ROLES
from shared.transport.link_events import Connected, LinkCounters, LinkEvent, Lost, Received
from shared.transport.reconnect import ReconnectPolicy
from shared.transport.sockets import LinkSocket

M = TypeVar("M", bound=msgspec.Struct)

_LOG = Log("link")


def _unique(identity: str) -> bytes:
    """Return a routing identity that no other connection has."""
    return f"{identity}-{new_incarnation():x}".encode()


class LinkSet:
    """Waits for several links of one thread at once."""

    def __init__(self, *links: "_Link[Any]") -> None:
        self._links = {link.socket: link for link in links}
        self._waiter = sockets.SocketPoller(list(self._links))

    def wait(self, timeout_s: float) -> list["_Link[Any]"]:
        """Wait up to `timeout_s`; return the links that have news."""
        return [self._links[socket] for socket in self._waiter.wait(timeout_s)]


class _Link(Generic[M]):
    """What both ends share."""

    def __init__(self, socket: LinkSocket, receives: Any, clock: Clock) -> None:
        self.socket = socket
        self.incarnation = new_incarnation()
        self.counters = LinkCounters()
        self._decoder: codec.Decoder[M] = codec.Decoder(receives)
        self._clock = clock
        self._complain_at_s = -math.inf

    def _refuse(self, error: FrameRefused, now_s: float) -> None:
        """Count a frame, and say why, seldom enough that nobody can fill the log with it."""
        self.counters.refused += 1
        if now_s >= self._complain_at_s:
            self._complain_at_s = now_s + REFUSAL_LOG_INTERVAL_S
            _LOG.warning("frame_refused", link=self.socket.address, cause=ascii(str(error))[:300])

    def _close_socket(self) -> None:
        self.socket.close()

    def wake(self) -> None:
        """Make a `poll` that waits return. The only call that other threads may make."""
        self.socket.wake()


class Listener(_Link[M]):
    """The end with many peers, for example the scheduler's to its ranks."""

    def __init__(
        self,
        address: str,
        receives: Any,
        clock: Clock | None = None,
        *,
        keys_dir: Path | None = None,
        roles: Iterable[str] = DIALLING_ROLES,
    ) -> None:
        """Bind `address`; `receives` is the union of messages that may arrive.

        Args:
            address: ipc, or tcp; tcp off loopback only with keys.
            receives: the union.
            clock: the time; None: the system's.
            keys_dir: this host's keys, used over tcp if there are any.
            roles: with keys, as what peers may speak here.

        Raises:
            ConfigError: the address is not allowed or already in use, or the keys cannot be used.
        """
        clock = clock or SystemClock()
        own = sockets.keys_for(address, keys_dir, is_dialled=False)
        self._gate = AccessControl(own.folder, roles, address, clock, _LOG) if own else None
        super().__init__(sockets.listen(address, own, self._gate), receives, clock)
        self._sessions: dict[PeerId, Session] = {}
        self._lost: set[PeerId] = set()  # whose session this `poll` has ended

    @property
    def address(self) -> str:
        """The address as bound: a port that was left to the system is named."""
        return self.socket.address

    @property
    def peers(self) -> list[PeerId]:
        """Peers with a session."""
        return list(self._sessions)

    @property
    def unacknowledged(self) -> int:
        """Messages that peers have not acknowledged."""
        return sum(session.unacknowledged for session in self._sessions.values())

    def due_in_s(self, now_s: float) -> float:
        """Return after how many seconds `poll` has something to send unasked, 0 or more."""
        return min((s.due_in_s(now_s) for s in self._sessions.values()), default=math.inf)

    def poll(self, timeout_s: float, count_max: int = 256) -> list[LinkEvent[M]]:
        """Wait up to `timeout_s` for news and return it, in order of arrival."""
        events: list[LinkEvent[M]] = []
        if timeout_s > 0.0:
            self.socket.wait(min(timeout_s, self.due_in_s(self._clock.now())))
        now_s = self._clock.now()
        self._lost.clear()
        for parts, key in self.socket.receive(count_max):
            peer = PeerId(parts[0])
            if self._gate is None:
                self._take(peer, parts[1:], now_s, events)
            elif self._gate.admits(peer, key):
                self._take(peer, parts[1:], now_s, events)
                if peer in self._sessions:
                    self._gate.begin(peer, key)
            elif peer in self._sessions:
                # Only as its connection is gone; what is sent to it would reach the other one.
                self._lose(peer, "another key came under its identity", events)
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
        now_s = self._clock.now()
        self._put(peer, session, session.send(epoch, body, now_s), now_s)

    def drop(self, peer: PeerId) -> None:
        """End the session with a peer; what it sends from here on is refused with a reset."""
        session = self._sessions.pop(peer, None)
        if session is not None:
            if self._gate is not None:
                self._gate.end(peer)
            goodbye = session.control(delivery.GOODBYE, self._clock.now())
            self.socket.send([peer, *framing.pack(goodbye)])

    def close(self, wait_s: float = limits.GOODBYE_S) -> None:
        """Wait until everything sent is acknowledged (at most `wait_s`), say goodbye, close."""
        if self.socket.is_closed:
            return
        until_s = self._clock.now() + wait_s
        while self._clock.now() < until_s and self.unacknowledged:
            self.poll(0.02)
        for peer in list(self._sessions):
            self.drop(peer)
        self.socket.close()

    def _take(
        self, peer: PeerId, parts: list[bytes], now_s: float, events: list[LinkEvent[M]]
    ) -> None:
        try:
            frame = framing.unpack(parts)
            session = self._sessions.get(peer)
            if frame.kind == delivery.HELLO:
                self._greet(peer, frame, now_s, events)
            elif session is None or not session.owns(frame):
                self.counters.stale += 1
                if frame.kind != delivery.RESET:
                    reset = Frame(0, self.incarnation, frame.sender, 0, 0, delivery.RESET)
                    self.socket.send([peer, *framing.pack(reset)])
            elif frame.kind == delivery.GOODBYE:
                self._lose(peer, "goodbye", events)
            elif session.receive(frame, now_s):
                events.append(Received(peer, frame.epoch, self._decoder.decode(frame.body)))
        except FrameRefused as error:
            self._refuse(error, now_s)

    def _greet(self, peer: PeerId, frame: Frame, now_s: float, events: list[LinkEvent[M]]) -> None:
        session = self._sessions.get(peer)
        if session is not None and session.peer != frame.sender:
            self._lose(peer, "restarted", events)
        if peer in self._lost:
            # What the owner still says to it must not reach the next session; it dials again soon.
            return
        if session is None:
            if len(self._sessions) >= limits.PEERS_MAX:
                self.counters.refused += 1
                return
            session = Session(self.incarnation, frame.sender, now_s)
            self._sessions[peer] = session
            events.append(Connected(peer, frame.sender))
        self.socket.send([peer, *framing.pack(session.control(delivery.WELCOME, now_s))])

    def _put(self, peer: PeerId, session: Session, frame: Frame, now_s: float) -> None:
        is_reachable = self.socket.send([peer, *framing.pack(frame)])
        session.note_sent(now_s, is_reachable=is_reachable)

    def _keep_up(self, now_s: float, events: list[LinkEvent[M]]) -> None:
        for peer, session in list(self._sessions.items()):
            if cause := session.loss(now_s):
                self._lose(peer, cause, events)
            elif session.due_in_s(now_s) <= 0.0:
                for frame in session.due(now_s):
                    self._put(peer, session, frame, now_s)
        if self._gate is not None:
            for peer in self._gate.revoked():
                self.drop(peer)
                events.append(Lost(peer, "its key is not allowed any more"))
            self.counters.strangers = self._gate.refused

    def _lose(self, peer: PeerId, cause: str, events: list[LinkEvent[M]]) -> None:
        session = self._sessions.pop(peer)
        self._lost.add(peer)
        if self._gate is not None:
            self._gate.end(peer)
        self.counters.resent += session.resent
        self.counters.duplicates += session.duplicates
        events.append(Lost(peer, cause))


class Dialer(_Link[M]):
    """The end with one peer, for example a rank's to the scheduler. Reconnects while it lives."""

    def __init__(
        self,
        address: str,
        identity: str,
        receives: Any,
        clock: Clock | None = None,
        *,
        keys_dir: Path | None = None,
        listener: str = "scheduler",
    ) -> None:
        """Connect to `address` as `identity`; a number is added, so a restart never clashes.

        Args:
            address: ipc, or tcp; tcp off loopback only with keys.
            identity: with keys, a role that this host's key has in the listener's list.
            receives: the union of messages that may arrive.
            clock: the time; None: the system's.
            keys_dir: this host's keys, used over tcp if there are any.
            listener: with keys, the role that the listener's key has in this host's list.

        Raises:
            ConfigError: the address is not allowed, or the keys cannot be used.
        """
        own = sockets.keys_for(address, keys_dir, is_dialled=True)
        expected = listener_key(own.folder, own.public, listener) if own else ""
        clock = clock or SystemClock()
        super().__init__(sockets.dial(address, _unique(identity), own, expected), receives, clock)
        self._identity = identity
        self.peer = PeerId(address.encode())
        self._session: Session | None = None
        self._hello_at_s = 0.0
        self._redial = ReconnectPolicy(address, own.public if own else "none", clock, _LOG)

    def fileno(self) -> int:
        """Return a descriptor, readable when `poll(0)` may have news (edge-triggered)."""
        return self.socket.fileno()

    @property
    def is_connected(self) -> bool:
        """Tell whether there is a session."""
        return self._session is not None

    @property
    def unacknowledged(self) -> int:
        """Messages that the peer has not acknowledged; 0 without a session."""
        return self._session.unacknowledged if self._session else 0

    def due_in_s(self, now_s: float) -> float:
        """Return after how many seconds `poll` has something to send unasked, 0 or more."""
        if self._session is not None:
            return self._session.due_in_s(now_s)
        return max(0.0, self._hello_at_s + limits.HELLO_INTERVAL_S - now_s)

    @property
    def refusal(self) -> str:
        """Why the last handshake failed; "" if none has."""
        return self._redial.cause

    def poll(self, timeout_s: float, count_max: int = 256) -> list[LinkEvent[M]]:
        """Wait up to `timeout_s` for news and return it, in order of arrival."""
        events: list[LinkEvent[M]] = []
        if timeout_s > 0.0:
            now_s = self._clock.now()
            self._say_what_is_due(now_s)
            self.socket.wait(min(timeout_s, self.due_in_s(now_s)))
        now_s = self._clock.now()
        for parts, _ in self.socket.receive(count_max):
            self._take(parts, now_s, events)
        # Only after reading: who was held up itself must not take its peer for silent.
        if self._session is not None and self._session.is_silent(now_s):
            self._lose(f"silent for {limits.PEER_SILENCE_S:.0f} s", events)
            self._redial.lost(is_silent=True)
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
        self.socket.send(framing.pack(frame))

    def close(self, wait_s: float = limits.GOODBYE_S) -> None:
        """Wait until everything sent is acknowledged (at most `wait_s`), say goodbye, close."""
        if self.socket.is_closed:
            return
        until_s = self._clock.now() + wait_s
        while self.unacknowledged and self._clock.now() < until_s:
            self.poll(0.02)
        if (session := self._session) is not None:
            self.socket.send(framing.pack(session.control(delivery.GOODBYE, self._clock.now())))
        self.socket.close()

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
        except FrameRefused as error:
            self._refuse(error, now_s)

    def _begin(self, frame: Frame, now_s: float, events: list[LinkEvent[M]]) -> None:
        if self._session is None:
            self._session = Session(self.incarnation, frame.sender, now_s)
            events.append(Connected(self.peer, frame.sender))
        elif self._session.peer == frame.sender:
            self._session.receive(frame, now_s)
        else:
            # It answers an incarnation that ends here; the next hello asks for another session.
            self._lose("restarted", events)

    def _say_what_is_due(self, now_s: float) -> None:
        if self._session is None:
            if self._redial.is_due(self.socket.handshake_failures()):
                self.socket.redial(_unique(self._identity))
            self.counters.strangers = self._redial.failures
            if now_s - self._hello_at_s >= limits.HELLO_INTERVAL_S:
                self._hello_at_s = now_s
                hello = Frame(0, self.incarnation, Incarnation(0), 0, 0, delivery.HELLO)
                self.socket.send(framing.pack(hello))
        elif self._session.due_in_s(now_s) <= 0.0:
            for frame in self._session.due(now_s):
                self.socket.send(framing.pack(frame))

    def _lose(self, cause: str, events: list[LinkEvent[M]]) -> None:
        if self._session is not None:
            self.counters.resent += self._session.resent
            self.counters.duplicates += self._session.duplicates
            self._session = None
            # The next session must not be taken for this one: its numbers begin again.
            self.incarnation = new_incarnation()
            self._redial.lost()
            events.append(Lost(self.peer, cause))


__all__ = ["Connected", "Dialer", "LinkCounters", "LinkEvent", "LinkFull", "LinkSet", "Listener",
           "Lost", "Received"]  # fmt: skip
