"""A wire in place of ZeroMQ: sockets with `LinkSocket`'s interface, on simulated connections.

What it keeps of the real thing: order within a connection; what is under way when a connection ends
is lost; nothing can be sent without a connection; a listener tells nobody when a peer goes, and
ignores a connection under an identity that another one still holds; a closing socket's last words
leave. What comes late comes late, over each connection at its own pace.
"""

import contextlib
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Protocol

from shared.errors import ConfigError
from tests.simulation.environment.event_heap import Heap

RECONNECT_S = (0.02, 0.5)
"""As RECONNECT_IVL and RECONNECT_IVL_MAX."""
HEARTBEAT_LOST_S = (2.0, 12.0)
"""So long a side may believe in a connection that the other has given up (ZMTP heartbeats)."""


class Owner(Protocol):
    """The process that has a socket."""

    sockets: list["SimulatedSocket"]

    def wake(self) -> None:
        """There is news."""
        ...

    def about_to_send(self) -> None:
        """A frame is about to leave: the last moment to die."""
        ...


class Pipe:
    """One direction of a connection."""

    __slots__ = ("base_s", "chance", "held_until_s", "is_open", "last_s", "target")

    def __init__(self, target: "SimulatedSocket", wire: "Wire", name: str) -> None:
        self.target = target
        self.chance = wire.heap.chance(name)
        self.base_s = wire.delay_s * (0.2 + self.chance.random())
        self.held_until_s = 0.0
        self.last_s = 0.0
        self.is_open = True


class Connection:
    """Between one dialler and one listener."""

    def __init__(
        self, wire: "Wire", dialer: "SimulatedSocket", listener: "SimulatedSocket", name: str
    ) -> None:
        self.dialer = dialer
        self.listener = listener
        self.identity = dialer.identity
        self.to_listener = Pipe(listener, wire, f"{name}>")
        self.to_dialer = Pipe(dialer, wire, f"{name}<")

    def close(self) -> None:
        """Lose what is under way, and whatever is sent from now on."""
        self.to_listener.is_open = False
        self.to_dialer.is_open = False


class SimulatedSocket:
    """What `shared.transport.links` uses of a `LinkSocket`."""

    def __init__(self, wire: "Wire", address: str, owner: Owner, identity: bytes = b"") -> None:
        self.address = address
        self.owner = owner
        self.identity = identity
        self.is_closed = False
        self.inbox: deque[list[bytes]] = deque()
        self.routes: dict[bytes, Connection] = {}
        """Of a listener: the connection that holds each identity."""
        self.connection: Connection | None = None
        """Of a dialler: the one that it believes in."""
        self.attempt = 0
        self.blocked_until_s = {"in": 0.0, "out": 0.0}
        """Of a dialler: until when nothing passes in this direction."""
        self._wire = wire

    def wait(self, timeout_s: float) -> None:
        """Return at once: time is the heap's."""

    def wake(self) -> None:
        """Let the process have a turn."""
        self.owner.wake()

    def receive(self, count_max: int) -> Iterator[tuple[list[bytes], str]]:
        """Return what has arrived, as a socket without keys."""
        for _ in range(min(count_max, len(self.inbox))):
            yield self.inbox.popleft(), ""
        if self.inbox:
            self.owner.wake()

    def send(self, parts: list[bytes]) -> bool:
        """Send if there is a connection; a listener is told when there is none."""
        self.owner.about_to_send()
        if self.identity:
            if self.connection is not None:
                self._wire.carry(self.connection.to_listener, [self.identity, *parts])
        else:
            connection = self.routes.get(parts[0])
            if connection is None:
                return False
            self._wire.carry(connection.to_dialer, parts[1:])
        return True

    def reconnect(self, identity: bytes) -> None:
        """Connect anew under another identity; over ipc nothing is done, as in the real one."""
        if self._wire.is_local:
            return
        self._wire.hang_up(self)
        self.identity = identity
        self._wire.dial_soon(self)

    def handshake_failures(self) -> list[tuple[str, bool]]:
        """Return that none failed."""
        return []

    def close(self) -> None:
        """Close; what was sent still arrives."""
        if not self.is_closed:
            self._wire.sever(self, keep_tail=True)


class Wire:
    """All connections of a run, and what goes wrong on them."""

    def __init__(self, heap: Heap, delay_s: float) -> None:
        self.heap = heap
        self.delay_s = delay_s
        self.lost = 0
        self._chance = heap.chance("wire")
        self.is_local = self._chance.random() < 0.5
        """As over ipc: no connection dies halfway, and none is dialled anew for its silence."""
        self._listeners: dict[str, SimulatedSocket] = {}
        self._waiting: defaultdict[str, list[SimulatedSocket]] = defaultdict(list)
        self._connections = 0
        self._owner: Owner | None = None

    @contextlib.contextmanager
    def opened_by(self, owner: Owner) -> Iterator[None]:
        """Sockets that are opened inside are this process'."""
        self._owner = owner
        try:
            yield
        finally:
            self._owner = None

    # --- what shared.transport.links calls ---

    def listen(self, address: str, own: object = None, gate: object = None) -> SimulatedSocket:
        """Bind an address, as `sockets.listen`."""
        if address in self._listeners:
            raise ConfigError(f"Cannot listen on {address}: it is in use.")
        socket = self._open(address)
        self._listeners[address] = socket
        for dialer in self._waiting.pop(address, []):
            self.dial_soon(dialer)
        return socket

    def dial(
        self, address: str, identity: bytes, own: object = None, listener_key: str = ""
    ) -> SimulatedSocket:
        """Connect to an address, as `sockets.dial`."""
        socket = self._open(address, identity)
        self._connect(socket, 0)
        return socket

    def _open(self, address: str, identity: bytes = b"") -> SimulatedSocket:
        assert self._owner is not None
        socket = SimulatedSocket(self, address, self._owner, identity)
        self._owner.sockets.append(socket)
        return socket

    # --- carrying ------------------------------------------------------------------------------

    def carry(self, pipe: Pipe, parts: list[bytes]) -> None:
        """Bring a frame to the other side, behind those before it."""
        if not pipe.is_open:
            self.lost += 1
            return
        draw = pipe.chance.random()
        # Now and then one takes long: reordering across links.
        delay_s = pipe.base_s * (0.5 + draw) if draw < 0.98 else 50.0 * pipe.base_s
        arrives_s = max(self.heap.now_s + delay_s, pipe.last_s, pipe.held_until_s)
        pipe.last_s = arrives_s
        self.heap.at(arrives_s, self._arrive, pipe, parts)

    def _arrive(self, pipe: Pipe, parts: list[bytes]) -> None:
        target = pipe.target
        if not pipe.is_open or target.is_closed:
            self.lost += 1
            return
        target.inbox.append(parts)
        target.owner.wake()

    # --- connecting ----------------------------------------------------------------------------

    def dial_soon(self, dialer: SimulatedSocket) -> None:
        """Connect after the time that a reconnect takes."""
        dialer.attempt += 1
        self.heap.after(self._chance.uniform(*RECONNECT_S), self._connect, dialer, dialer.attempt)

    def _connect(self, dialer: SimulatedSocket, attempt: int) -> None:
        if dialer.is_closed or dialer.connection is not None or attempt != dialer.attempt:
            return
        blocked_until_s = max(dialer.blocked_until_s.values())
        if blocked_until_s > self.heap.now_s:
            self.heap.at(blocked_until_s, self._connect, dialer, attempt)
            return
        listener = self._listeners.get(dialer.address)
        if listener is None:
            self._waiting[dialer.address].append(dialer)
            return
        self._connections += 1
        connection = Connection(self, dialer, listener, f"connection {self._connections}")
        dialer.connection = connection
        if dialer.identity in listener.routes:
            connection.close()
        else:
            listener.routes[dialer.identity] = connection

    def hang_up(self, dialer: SimulatedSocket) -> None:
        """End a dialler's connection; both sides know."""
        connection = dialer.connection
        dialer.connection = None
        if connection is not None:
            connection.close()
            self._unroute(connection)

    def _unroute(self, connection: Connection) -> None:
        if connection.listener.routes.get(connection.identity) is connection:
            del connection.listener.routes[connection.identity]

    # --- what goes wrong -----------------------------------------------------------------------

    def sever(self, socket: SimulatedSocket, *, keep_tail: bool) -> None:
        """A socket is gone, closed or with its process; perhaps what it sent still arrives."""
        if socket.is_closed:
            return
        socket.is_closed = True
        socket.inbox.clear()
        if socket.identity:
            connection = socket.connection
            if connection is not None:
                connection.to_dialer.is_open = False
                connection.to_listener.is_open &= keep_tail
                self.heap.at(
                    max(self.heap.now_s, connection.to_listener.last_s), self._unroute, connection
                )
            return
        if self._listeners.get(socket.address) is socket:
            del self._listeners[socket.address]
        for connection in socket.routes.values():
            connection.to_listener.is_open = False
            connection.to_dialer.is_open &= keep_tail
            gone_s = max(self.heap.now_s, connection.to_dialer.last_s)
            self.heap.at(gone_s, self._notice, connection)
        socket.routes.clear()

    def _notice(self, connection: Connection) -> None:
        """A dialler sees that its connection is gone, and dials again."""
        connection.close()
        dialer = connection.dialer
        if dialer.connection is connection and not dialer.is_closed:
            dialer.connection = None
            self.dial_soon(dialer)

    def cut(self, dialer: SimulatedSocket) -> None:
        """The connection breaks; both sides see it, and what was under way is lost."""
        if dialer.connection is not None:
            self._unroute(dialer.connection)
            self._notice(dialer.connection)

    def partition(
        self, dialer: SimulatedSocket, direction: str, seconds: float, *, breaks: bool
    ) -> None:
        """Nothing passes in one direction for a while; then it comes late, or is lost."""
        until_s = self.heap.now_s + seconds
        dialer.blocked_until_s[direction] = until_s
        connection = dialer.connection
        if connection is None:
            return
        pipe = connection.to_dialer if direction == "in" else connection.to_listener
        pipe.held_until_s = until_s
        if breaks:
            self.heap.at(until_s, self._break, dialer, connection)

    def _break(self, dialer: SimulatedSocket, connection: Connection) -> None:
        if dialer.connection is connection:
            self.cut(dialer)

    def half_open(self, dialer: SimulatedSocket, *, dialer_knows: bool) -> None:
        """One side believes in a connection that the other has given up."""
        connection = dialer.connection
        if connection is None or self.is_local:
            return
        believed_s = self._chance.uniform(*HEARTBEAT_LOST_S)
        connection.close()
        if dialer_knows:
            dialer.connection = None
            self.dial_soon(dialer)
            self.heap.after(believed_s, self._unroute, connection)
        else:
            self._unroute(connection)
            self.heap.after(believed_s, self._notice, connection)
