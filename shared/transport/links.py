"""The two ends of a link: a `Listener` has many peers, a `Dialer` has one. Owns their sessions.

Each end is used from one thread, without threads of its own: its owner calls `poll` for events.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from shared import limits
from shared.clock import Clock, SystemClock
from shared.errors import FrameRefused, PeerUnknown
from shared.identifiers import Incarnation, PeerId
from shared.transport import codec, delivery, framing, socket_file, sockets
from shared.transport.authentication import AccessControl, listener_key
from shared.transport.delivery import Frame, Session, new_incarnation
from shared.transport.keys import DIALLING_ROLES
from shared.transport.link import LinkEnd, LinkSet, M
from shared.transport.link_events import Connected, LinkEvent, Lost, Quiet, Received
from shared.transport.reconnect import ReconnectPolicy


def _unique(identity: str) -> bytes:
    """Return a routing identity that no other connection has."""
    return f"{identity}-{new_incarnation():x}".encode()


class Listener(LinkEnd[M]):
    """The end of a link with many peers, for example the scheduler's end towards its ranks."""

    def __init__(
        self,
        address: str,
        receives: Any,
        clock: Clock | None = None,
        *,
        keys_dir: Path | None = None,
        roles: Iterable[str] = DIALLING_ROLES,
    ) -> None:
        """Bind `address`.

        Args:
            address: ipc, or tcp. tcp outside loopback requires keys.
            receives: union of the messages that may arrive.
            clock: source of time; None: the system's clock.
            keys_dir: folder of this host's keys, used over tcp if they exist.
            roles: with keys, the roles that may speak here.

        Raises:
            ConfigError: when the address is not allowed or in use, or the keys cannot be used.
        """
        clock = clock or SystemClock()
        own = sockets.keys_for(address, keys_dir, is_dialled=False)
        self._access = AccessControl(own.folder, roles, address, clock) if own else None
        super().__init__(sockets.listen(address, own, self._access), receives, clock)
        self._file = socket_file.SocketFile(self.address, self.socket.bind)
        self._sessions: dict[PeerId, Session] = {}
        self._maintain_at_s = -math.inf
        self._ended_now: set[PeerId] = set()  # peers whose session the current `poll` has ended

    @property
    def address(self) -> str:
        """The bound address, with the port that the system has chosen for `*`."""
        return self.socket.address

    @property
    def peers(self) -> list[PeerId]:
        """Peers with a session, in the order in which the sessions began."""
        return list(self._sessions)

    @property
    def unacknowledged(self) -> int:
        """Number of messages that peers have not acknowledged."""
        return sum(session.unacknowledged for session in self._sessions.values())

    def due_in_s(self, now_s: float) -> float:
        """Return the seconds from `now_s` until `poll` must send something itself; inf: never."""
        return min((s.due_in_s(now_s) for s in self._sessions.values()), default=math.inf)

    def poll(self, timeout_s: float, count_max: int = 256) -> list[LinkEvent[M]]:
        """Wait up to `timeout_s` seconds; return events, in order, of up to `count_max` frames."""
        events: list[LinkEvent[M]] = []
        if timeout_s > 0.0:
            self.socket.wait(min(timeout_s, self.due_in_s(self._clock.now())))
        now_s = self._clock.now()
        self._ended_now.clear()
        for parts, key in self.socket.receive(count_max):
            peer = PeerId(parts[0])
            if self._access is None:
                self._handle_frame(peer, parts[1:], now_s, events)
            elif self._access.admits(peer, key):
                self._handle_frame(peer, parts[1:], now_s, events)
                if peer in self._sessions:
                    self._access.session_keys[peer] = key
            elif peer in self._sessions:
                # Its own connection is gone, and frames for it would reach the other key.
                self._end_session(peer, "another key uses its identity", events)
        if now_s >= self._maintain_at_s:
            self._maintain_sessions(now_s, events)
            # No duty of a session that begins later is due sooner than ACK_DELAY_S.
            self._maintain_at_s = now_s + min(self.due_in_s(now_s), limits.ACK_DELAY_S)
        return events

    def send(self, peer: PeerId, message: msgspec.Struct, epoch: int = 0) -> None:
        """Send a message to one peer.

        Raises:
            PeerUnknown: when there is no session with it.
            LinkFull: when too many of its messages are unacknowledged.
        """
        self.send_body(peer, codec.encode(message), epoch)

    def send_body(self, peer: PeerId, body: bytes, epoch: int = 0) -> None:
        """Send an encoded message, which several peers can share, to one. Raises as `send`."""
        if (session := self._sessions.get(peer)) is None:
            raise PeerUnknown(f"no session with {peer!r}")
        now_s = self._clock.now()
        self._send_frame(peer, session, session.send(epoch, body, now_s), now_s)

    def unacknowledged_bytes(self, peer: PeerId) -> int:
        """Return the bytes that a peer has not acknowledged; 0 without a session."""
        session = self._sessions.get(peer)
        return 0 if session is None else session.unacknowledged_bytes

    def allow_silence(self, peer: PeerId, *, is_allowed: bool) -> None:
        """Let a peer be silent without being lost, or judge its silence again from now on."""
        if (session := self._sessions.get(peer)) is not None:
            session.allow_silence(self._clock.now(), is_allowed=is_allowed)

    def drop(self, peer: PeerId) -> None:
        """Say goodbye to a peer and end its session. Its later frames are answered with a reset."""
        session = self._sessions.pop(peer, None)
        if session is not None:
            if self._access is not None:
                self._access.session_keys.pop(peer, None)
            goodbye = session.control_frame(delivery.GOODBYE, self._clock.now())
            self.socket.send([peer, *framing.pack(goodbye)])

    def close(self, wait_s: float = limits.GOODBYE_S) -> None:
        """Wait up to `wait_s` seconds for acknowledgements, send goodbyes, and close."""
        if self.socket.is_closed:
            return
        until_s = self._clock.now() + wait_s
        while self._clock.now() < until_s and self.unacknowledged:
            self.poll(0.02)
        for peer in list(self._sessions):
            self.drop(peer)
        self.socket.close()

    def _handle_frame(
        self, peer: PeerId, parts: list[bytes], now_s: float, events: list[LinkEvent[M]]
    ) -> None:
        try:
            frame = framing.unpack(parts)
            session = self._sessions.get(peer)
            if frame.kind == delivery.HELLO:
                self._handle_hello(peer, frame, now_s, events)
            elif session is None or not session.matches(frame):
                self.counters.stale += 1
                if frame.kind != delivery.RESET:
                    reset = Frame(0, self.incarnation, frame.sender, 0, 0, delivery.RESET)
                    self.socket.send([peer, *framing.pack(reset)])
            elif frame.kind == delivery.GOODBYE:
                self._end_session(peer, "goodbye", events)
            elif session.receive(frame, now_s):
                events.append(Received(peer, frame.epoch, self._decoder.decode(frame.body)))
        except FrameRefused as error:
            self._refuse(error, now_s)

    def _handle_hello(
        self, peer: PeerId, frame: Frame, now_s: float, events: list[LinkEvent[M]]
    ) -> None:
        session = self._sessions.get(peer)
        if session is not None and session.peer != frame.sender:
            self._end_session(peer, "restarted", events)
        if peer in self._ended_now:
            # What the owner sends before it sees `Lost` must not reach the next session.
            return
        if session is None:
            if len(self._sessions) >= limits.PEERS_MAX:
                self.counters.refused += 1
                return
            session = Session(self.incarnation, frame.sender, now_s)
            self._sessions[peer] = session
            events.append(Connected(peer, frame.sender))
        self.socket.send([peer, *framing.pack(session.control_frame(delivery.WELCOME, now_s))])

    def _send_frame(self, peer: PeerId, session: Session, frame: Frame, now_s: float) -> None:
        is_reachable = self.socket.send([peer, *framing.pack(frame)])
        session.record_send(now_s, is_reachable=is_reachable)

    def _maintain_sessions(self, now_s: float, events: list[LinkEvent[M]]) -> None:
        self._file.restore(now_s)
        for peer, session in list(self._sessions.items()):
            self._warn_if_quiet(peer, session, now_s, events)
            if cause := session.loss_cause(now_s):
                self._end_session(peer, cause, events)
            elif session.due_in_s(now_s) <= 0.0:
                for frame in session.due_frames(now_s):
                    self._send_frame(peer, session, frame, now_s)
        if self._access is not None:
            for peer in self._access.revoked():
                self.drop(peer)
                events.append(Lost(peer, "its key is no longer allowed"))
            self.counters.strangers = self._access.refused

    def _end_session(self, peer: PeerId, cause: str, events: list[LinkEvent[M]]) -> None:
        del self._sessions[peer]
        self._ended_now.add(peer)
        if self._access is not None:
            self._access.session_keys.pop(peer, None)
        events.append(Lost(peer, cause))


class Dialer(LinkEnd[M]):
    """The end of a link with one peer, for example a rank's towards the scheduler. Reconnects."""

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
        """Connect to `address`. A number added to the identity keeps a restart from clashing.

        Args:
            address: ipc, or tcp. tcp outside loopback requires keys.
            identity: with keys, a role that the listener's list allows this host's key.
            receives: union of the messages that may arrive.
            clock: source of time; None: the system's clock.
            keys_dir: folder of this host's keys, used over tcp if they exist.
            listener: with keys, the role that this host's list gives the listener's key.

        Raises:
            ConfigError: when the address is not allowed, or the keys cannot be used.
        """
        own = sockets.keys_for(address, keys_dir, is_dialled=True)
        expected = listener_key(own.folder, own.public, listener) if own else ""
        clock = clock or SystemClock()
        super().__init__(sockets.dial(address, _unique(identity), own, expected), receives, clock)
        self._identity = identity
        self.peer = PeerId(address.encode())
        self._session: Session | None = None
        self._hello_at_s = 0.0
        self._reconnect_policy = ReconnectPolicy(address, own.public if own else "none", clock)

    def fileno(self) -> int:
        """Return a descriptor, readable when `poll(0)` may have events (edge-triggered)."""
        return self.socket.fileno()

    @property
    def is_connected(self) -> bool:
        """Whether there is a session with the peer, so that `send` is possible."""
        return self._session is not None

    @property
    def unacknowledged(self) -> int:
        """Number of messages that the peer has not acknowledged; 0 without a session."""
        return self._session.unacknowledged if self._session else 0

    def due_in_s(self, now_s: float) -> float:
        """Return the seconds, 0 or more, from `now_s` until `poll` must send something itself."""
        if (session := self._session) is not None:
            return session.due_in_s(now_s)
        return max(0.0, self._hello_at_s + limits.HELLO_INTERVAL_S - now_s)

    @property
    def refusal(self) -> str:
        """Why the latest handshake over tcp failed, as a clause; "" if none has."""
        return self._reconnect_policy.cause

    def poll(self, timeout_s: float, count_max: int = 256) -> list[LinkEvent[M]]:
        """Wait up to `timeout_s` seconds; return events, in order, of up to `count_max` frames."""
        events: list[LinkEvent[M]] = []
        if timeout_s > 0.0:
            now_s = self._clock.now()
            self._send_due_frames(now_s)
            self.socket.wait(min(timeout_s, self.due_in_s(now_s)))
        now_s = self._clock.now()
        for parts, _ in self.socket.receive(count_max):
            self._handle_frame(parts, now_s, events)
        # Checked after reading: if this process was not scheduled, the peer is not silent.
        if self._session is not None:
            self._warn_if_quiet(self.peer, self._session, now_s, events)
            if self._session.is_silent(now_s):
                self._end_session(f"silent for {self.silence_s:g} s", events)
                self._reconnect_policy.session_lost(is_silent=True)
        self._send_due_frames(now_s)
        return events

    def send(self, message: msgspec.Struct, epoch: int = 0) -> None:
        """Send a message to the peer.

        Raises:
            PeerUnknown: when there is no session; a `Connected` event announces the next one.
            LinkFull: when the peer has too many unacknowledged messages.
        """
        if self._session is None:
            raise PeerUnknown("not connected")
        frame = self._session.send(epoch, codec.encode(message), self._clock.now())
        self.socket.send(framing.pack(frame))

    def keep_alive(self) -> None:
        """Send a keep-alive if it is due.

        A second thread may call it if a lock of the caller keeps it apart from all other calls.
        """
        if (session := self._session) is not None and session.needs_keepalive(self._clock.now()):
            self.socket.send(framing.pack(session.control_frame(delivery.ALIVE, self._clock.now())))

    def close(self, wait_s: float = limits.GOODBYE_S) -> None:
        """Wait up to `wait_s` seconds for acknowledgements, send a goodbye, and close."""
        if self.socket.is_closed:
            return
        until_s = self._clock.now() + wait_s
        while self.unacknowledged and self._clock.now() < until_s:
            self.poll(0.02)
        if (session := self._session) is not None:
            goodbye = session.control_frame(delivery.GOODBYE, self._clock.now())
            self.socket.send(framing.pack(goodbye))
        self.socket.close()

    def _handle_frame(self, parts: list[bytes], now_s: float, events: list[LinkEvent[M]]) -> None:
        try:
            frame = framing.unpack(parts)
            if frame.receiver != self.incarnation:
                self.counters.stale += 1
            elif frame.kind == delivery.WELCOME:
                self._handle_welcome(frame, now_s, events)
            elif self._session is None or frame.sender != self._session.peer:
                self.counters.stale += 1
                if frame.kind == delivery.RESET:
                    self._end_session("restarted", events)
            elif frame.kind in (delivery.RESET, delivery.GOODBYE):
                self._end_session(frame.kind, events)
            elif self._session.receive(frame, now_s):
                events.append(Received(self.peer, frame.epoch, self._decoder.decode(frame.body)))
        except FrameRefused as error:
            self._refuse(error, now_s)

    def _handle_welcome(self, frame: Frame, now_s: float, events: list[LinkEvent[M]]) -> None:
        if self._session is None:
            self._session = Session(self.incarnation, frame.sender, now_s)
            events.append(Connected(self.peer, frame.sender))
        elif self._session.peer == frame.sender:
            self._session.receive(frame, now_s)
        else:
            # The listener has restarted. The next hello starts a new session with it.
            self._end_session("restarted", events)

    def _send_due_frames(self, now_s: float) -> None:
        if self._session is None:
            if self._reconnect_policy.is_due(self.socket.handshake_failures()):
                self.socket.reconnect(_unique(self._identity))
            self.counters.strangers = self._reconnect_policy.failures
            if now_s - self._hello_at_s >= limits.HELLO_INTERVAL_S:
                self._hello_at_s = now_s
                hello = Frame(0, self.incarnation, Incarnation(0), 0, 0, delivery.HELLO)
                self.socket.send(framing.pack(hello))
        elif self._session.due_in_s(now_s) <= 0.0:
            for frame in self._session.due_frames(now_s):
                self.socket.send(framing.pack(frame))

    def _end_session(self, cause: str, events: list[LinkEvent[M]]) -> None:
        if self._session is not None:
            self._session = None
            # A new incarnation keeps frames of the ended session out of the next one.
            self.incarnation = new_incarnation()
            self._reconnect_policy.session_lost()
            events.append(Lost(self.peer, cause))


__all__ = ["Connected", "Dialer", "LinkEvent", "LinkSet", "Listener", "Lost", "Quiet", "Received"]
