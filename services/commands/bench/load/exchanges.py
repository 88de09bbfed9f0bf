"""HTTP exchanges of many clients in one selector loop. Owns sending and reading; parses nothing.

The load shares the machine with the measured server. An asyncio event loop spends 30 microseconds
on a read of 200 bytes, most of it on callbacks and on allocating large buffers; with 16 streams
that is a twentieth of a small step. Hence this bare loop with one read buffer.
"""

import dataclasses
import errno
import heapq
import selectors
import socket
import time
from collections.abc import Sequence

from services.commands.bench.load.sse import is_chunked

READ_BYTES = 256 * 1024
_DONE = b"data: [DONE]"
_TAIL_BYTES = 64
_HEAD_END = b"\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_CONNECTING = (0, errno.EINPROGRESS, errno.EWOULDBLOCK)


@dataclasses.dataclass(slots=True)
class HttpExchange:
    """The time of one HTTP request, and the bytes of its answer with their times of arrival."""

    sent_s: float = 0.0
    """Time at which the connection was requested, from `time.perf_counter`."""
    received: list[tuple[float, bytes]] = dataclasses.field(default_factory=list)
    """(time of arrival from `time.perf_counter`, bytes) of each read, in order."""


def run_exchanges(
    host: str, port: int, clients: Sequence[Sequence[tuple[float, bytes]]], timeout_s: float
) -> tuple[list[list[HttpExchange]], float]:
    """Let each client send its requests one after the other, each over its own connection.

    Args:
        host: IPv4 address of the server.
        port: port of the server.
        clients: per client its requests as (earliest time of sending in seconds after the
            beginning, bytes of the request).
        timeout_s: longest time for one exchange, in seconds.

    Returns:
        Per client its exchanges in order, and the seconds from the beginning to the end of the last
        exchange.

    Raises:
        TimeoutError: when an exchange takes longer than `timeout_s`.
        OSError: when a connection fails.
    """
    return _ClientLoop(host, port, clients, timeout_s).run()


class _Connection:
    """A connection with one request; reads until the stream's end mark or the connection's end."""

    __slots__ = ("_chunked", "_tail", "_unsent", "client", "exchange", "socket")

    def __init__(self, client: int, address: tuple[str, int], request: bytes) -> None:
        self.client = client
        self.exchange = HttpExchange(time.perf_counter())
        self._unsent = memoryview(request)
        self._tail = b""
        self._chunked: bool | None = None
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        problem = self.socket.connect_ex(address)
        if problem not in _CONNECTING:
            raise OSError(problem, f"no connection to {address[0]}:{address[1]}")

    def write(self) -> bool:
        """Send as much as the socket accepts; return whether the whole request is sent."""
        problem = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if problem:
            raise OSError(problem, "the connection was refused")
        try:
            self._unsent = self._unsent[self.socket.send(self._unsent) :]
        except BlockingIOError:
            return False
        return not self._unsent

    def take(self, data: bytes) -> bool:
        """Store bytes with their time of arrival; return whether the answer is complete."""
        self.exchange.received.append((time.perf_counter(), data))
        if self._chunked is None and _HEAD_END in data:
            self._chunked = is_chunked(data.partition(_HEAD_END)[0])
        size = len(data)
        tail = data[-_TAIL_BYTES:] if size >= _TAIL_BYTES else (self._tail + data)[-_TAIL_BYTES:]
        self._tail = tail
        return _DONE in tail and (not self._chunked or tail.endswith(_LAST_CHUNK))


class _ClientLoop:
    """All clients of one measurement."""

    def __init__(
        self,
        host: str,
        port: int,
        clients: Sequence[Sequence[tuple[float, bytes]]],
        timeout_s: float,
    ) -> None:
        self._address = host, port
        self._timeout_s = timeout_s
        self._waiting = [list(reversed(requests)) for requests in clients]
        self._done: list[list[HttpExchange]] = [[] for _ in clients]
        self._open: dict[_Connection, float] = {}
        """Connection -> deadline; the first one has the earliest deadline."""
        self._selector = selectors.DefaultSelector()
        self._buffer = bytearray(READ_BYTES)
        self._view = memoryview(self._buffer)
        self._began_s = time.perf_counter()
        self._due: list[tuple[float, int]] = []
        """Heap of (time of the next request, client)."""

    def run(self) -> tuple[list[list[HttpExchange]], float]:
        try:
            for client in range(len(self._waiting)):
                self._schedule_next(client)
            while self._due or self._open:
                self._begin_due()
                for key, _ in self._selector.select(self._wait_s()):
                    self._advance(key.data)
                self._check_deadlines()
            return self._done, time.perf_counter() - self._began_s
        finally:
            for connection in self._open:
                connection.socket.close()
            self._selector.close()

    def _schedule_next(self, client: int) -> None:
        """Schedule the client's next request for its earliest time."""
        if self._waiting[client]:
            heapq.heappush(self._due, (self._began_s + self._waiting[client][-1][0], client))

    def _begin_due(self) -> None:
        now_s = time.perf_counter()
        while self._due and self._due[0][0] <= now_s:
            _, client = heapq.heappop(self._due)
            connection = _Connection(client, self._address, self._waiting[client].pop()[1])
            self._done[client].append(connection.exchange)
            self._open[connection] = connection.exchange.sent_s + self._timeout_s
            self._selector.register(connection.socket, selectors.EVENT_WRITE, connection)

    def _wait_s(self) -> float | None:
        at_s = [self._due[0][0]] if self._due else []
        if self._open:
            at_s.append(next(iter(self._open.values())))
        return max(0.0, min(at_s) - time.perf_counter()) if at_s else None

    def _advance(self, connection: _Connection) -> None:
        """Write or read once."""
        if not connection.exchange.received and self._continue_request(connection):
            return
        try:
            size = connection.socket.recv_into(self._buffer)
        except BlockingIOError:
            return
        except ConnectionError:
            size = 0
        if not size or connection.take(bytes(self._view[:size])):
            self._selector.unregister(connection.socket)
            connection.socket.close()
            del self._open[connection]
            self._schedule_next(connection.client)

    def _continue_request(self, connection: _Connection) -> bool:
        """Send more of a request; return False when the request was already sent."""
        if self._selector.get_key(connection.socket).events != selectors.EVENT_WRITE:
            return False
        if connection.write():
            self._selector.modify(connection.socket, selectors.EVENT_READ, connection)
        return True

    def _check_deadlines(self) -> None:
        if self._open and next(iter(self._open.values())) < time.perf_counter():
            raise TimeoutError(f"a request was not answered within {self._timeout_s:.0f} s")
