"""Simulated network: sockets with the interface of `LinkSocket` in place of ZeroMQ.

It keeps these properties of ZeroMQ: frames of a connection arrive in order; frames on their way are
lost when the connection ends; nothing can be sent without a connection; a listener is not told when
a peer goes, and it ignores a connection whose identity another connection holds; frames that a
closing socket has sent still arrive. Each connection has its own delay.
"""

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Protocol

from shared.errors import ConfigError
from tests.simulation.environment.event_heap import EventHeap

RECONNECT_S = (0.02, 0.5)
"""Range of the reconnect delay, as RECONNECT_IVL and RECONNECT_IVL_MAX."""
HEARTBEAT_LOST_S = (2.0, 12.0)
"""Range of the time until one side notices that the other has given up the connection (ZMTP
heartbeats)."""


class Owner(Protocol):
    """The process that has a socket."""

    sockets: list["SimulatedSocket"]

    def wake(self) -> None:
        """Schedule a turn because a frame has arrived."""
        ...

    def about_to_send(self) -> None:
        """Called before each frame; the process may die here."""
        ...


class Pipe:
    """One direction of a connection."""

    __slots__ = ("base_s", "held_until_s", "is_open", "last_s", "rng", "target")

    def __init__(self, target: "SimulatedSocket", network: "Network", name: str) -> None:
        self.target = target
        self.rng = network.heap.random_stream(name)
        self.base_s = network.delay_s * (0.2 + self.rng.random())
        self.held_until_s = 0.0
        self.last_s = 0.0
        self.is_open = True


class Connection:
    """A connection between one dialler and one listener."""

    def __init__(
        self, network: "Network", dialer: "SimulatedSocket", listener: "SimulatedSocket", name: str
    ) -> None:
        self.dialer = dialer
        self.listener = listener
        self.identity = dialer.identity
        self.to_listener = Pipe(listener, network, f"{name}>")
        self.to_dialer = Pipe(dialer, network, f"{name}<")

    def close(self) -> None:
        """Lose all frames on their way and all frames sent from now on."""
        self.to_listener.is_open = False
        self.to_dialer.is_open = False


class SimulatedSocket:
    """The part of `LinkSocket` that `shared.transport.links` uses."""

    def __init__(
        self, network: "Network", address: str, owner: Owner, identity: bytes = b""
    ) -> None:
        self.address = address
        self.owner = owner
        self.identity = identity
        self.is_closed = False
        self.bind: Callable[[str], None] = lambda _: None
        self.inbox: deque[list[bytes]] = deque()
        self.routes: dict[bytes, Connection] = {}
        """Of a listener: the connection of each identity."""
        self.connection: Connection | None = None
        """Of a dialler: the connection that it uses."""
        self.attempt = 0
        self.blocked_until_s = {"in": 0.0, "out": 0.0}
        """Of a dialler: no frame passes in this direction before this time."""
        self._network = network

    def wait(self, timeout_s: float) -> None:
        """Return at once: time belongs to the heap."""

    def wake(self) -> None:
        """Schedule a turn of the process."""
        self.owner.wake()

    def receive(self, count_max: int) -> Iterator[tuple[list[bytes], str]]:
        """Yield the frames that have arrived, as a socket without keys does."""
        for _ in range(min(count_max, len(self.inbox))):
            yield self.inbox.popleft(), ""
        if self.inbox:
            self.owner.wake()

    def send(self, parts: list[bytes]) -> bool:
        """Send over the connection; return False when a listener has no connection to the peer."""
        self.owner.about_to_send()
        if self.identity:
            if self.connection is not None:
                self._network.carry(self.connection.to_listener, [self.identity, *parts])
        else:
            connection = self.routes.get(parts[0])
            if connection is None:
                return False
            self._network.carry(connection.to_dialer, parts[1:])
        return True

    def reconnect(self, identity: bytes) -> None:
        """Reconnect under another identity; over ipc do nothing, as the real socket."""
        if self._network.is_local:
            return
        self._network.hang_up(self)
        self.identity = identity
        self._network.dial_soon(self)

    def handshake_failures(self) -> list[tuple[str, bool]]:
        """Return no failures."""
        return []

    def close(self) -> None:
        """Close the socket; frames already sent still arrive."""
        if not self.is_closed:
            self._network.sever(self, keep_tail=True)


class Network:
    """All connections of a run and the faults on them."""

    def __init__(self, heap: EventHeap, delay_s: float) -> None:
        self.heap = heap
        self.delay_s = delay_s
        self.lost = 0
        self._rng = heap.random_stream("wire")
        self.is_local = self._rng.random() < 0.5
        """As over ipc: no connection becomes half-open, and a silent one is not dialled again."""
        self._listeners: dict[str, SimulatedSocket] = {}
        self._waiting: defaultdict[str, list[SimulatedSocket]] = defaultdict(list)
        self._connections = 0
        self._owner: Owner | None = None

    @contextlib.contextmanager
    def opened_by(self, owner: Owner) -> Iterator[None]:
        """Give all sockets that are opened in this context to `owner`."""
        self._owner = owner
        try:
            yield
        finally:
            self._owner = None

    # --- what shared.transport.links calls ---

    def listen(self, address: str, own: object = None, gate: object = None) -> SimulatedSocket:
        """Bind an address, as `sockets.listen`.

        Raises:
            ConfigError: the address is in use.
        """
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

    # --- carrying ---------------------------------------------------------------------------------

    def carry(self, pipe: Pipe, parts: list[bytes]) -> None:
        """Deliver a frame to the other side after all earlier frames of this direction."""
        if not pipe.is_open:
            self.lost += 1
            return
        draw = pipe.rng.random()
        # A few frames take 50 times longer, which reorders frames of different links.
        delay_s = pipe.base_s * (0.5 + draw) if draw < 0.98 else 50.0 * pipe.base_s
        arrives_s = max(self.heap.now_s + delay_s, pipe.last_s, pipe.held_until_s)
        pipe.last_s = arrives_s
        self.heap.call_at(arrives_s, self._arrive, pipe, parts)

    def _arrive(self, pipe: Pipe, parts: list[bytes]) -> None:
        target = pipe.target
        if not pipe.is_open or target.is_closed:
            self.lost += 1
            return
        target.inbox.append(parts)
        target.owner.wake()

    # --- connecting -------------------------------------------------------------------------------

    def dial_soon(self, dialer: SimulatedSocket) -> None:
        """Connect after a reconnect delay."""
        dialer.attempt += 1
        self.heap.call_after(self._rng.uniform(*RECONNECT_S), self._connect, dialer, dialer.attempt)

    def _connect(self, dialer: SimulatedSocket, attempt: int) -> None:
        if dialer.is_closed or dialer.connection is not None or attempt != dialer.attempt:
            return
        blocked_until_s = max(dialer.blocked_until_s.values())
        if blocked_until_s > self.heap.now_s:
            self.heap.call_at(blocked_until_s, self._connect, dialer, attempt)
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

    # --- faults -----------------------------------------------------------------------------------

    def sever(self, socket: SimulatedSocket, *, keep_tail: bool) -> None:
        """Close a socket, alone or with its process.

        Args:
            socket: the socket.
            keep_tail: frames that it has sent still arrive.
        """
        if socket.is_closed:
            return
        socket.is_closed = True
        socket.inbox.clear()
        if socket.identity:
            connection = socket.connection
            if connection is not None:
                connection.to_dialer.is_open = False
                connection.to_listener.is_open &= keep_tail
                self.heap.call_at(
                    max(self.heap.now_s, connection.to_listener.last_s), self._unroute, connection
                )
            return
        if self._listeners.get(socket.address) is socket:
            del self._listeners[socket.address]
        for connection in socket.routes.values():
            connection.to_listener.is_open = False
            connection.to_dialer.is_open &= keep_tail
            gone_s = max(self.heap.now_s, connection.to_dialer.last_s)
            self.heap.call_at(gone_s, self._notice, connection)
        socket.routes.clear()

    def _notice(self, connection: Connection) -> None:
        """Let a dialler notice that its connection is gone, and dial again."""
        connection.close()
        dialer = connection.dialer
        if dialer.connection is connection and not dialer.is_closed:
            dialer.connection = None
            self.dial_soon(dialer)

    def cut(self, dialer: SimulatedSocket) -> None:
        """Break the connection: both sides notice, and frames on their way are lost."""
        if dialer.connection is not None:
            self._unroute(dialer.connection)
            self._notice(dialer.connection)

    def partition(
        self, dialer: SimulatedSocket, direction: str, seconds: float, *, breaks: bool
    ) -> None:
        """Hold back all frames of one direction for `seconds`; afterwards they arrive, or are lost
        when the connection breaks."""
        until_s = self.heap.now_s + seconds
        dialer.blocked_until_s[direction] = until_s
        connection = dialer.connection
        if connection is None:
            return
        pipe = connection.to_dialer if direction == "in" else connection.to_listener
        pipe.held_until_s = until_s
        if breaks:
            self.heap.call_at(until_s, self._break, dialer, connection)

    def _break(self, dialer: SimulatedSocket, connection: Connection) -> None:
        if dialer.connection is connection:
            self.cut(dialer)

    def half_open(self, dialer: SimulatedSocket, *, dialer_knows: bool) -> None:
        """Let one side give up the connection while the other still believes in it."""
        connection = dialer.connection
        if connection is None or self.is_local:
            return
        believed_s = self._rng.uniform(*HEARTBEAT_LOST_S)
        connection.close()
        if dialer_knows:
            dialer.connection = None
            self.dial_soon(dialer)
            self.heap.call_after(believed_s, self._unroute, connection)
        else:
            self._unroute(connection)
            self.heap.call_after(believed_s, self._notice, connection)
