"""HTTP exchanges of many clients over one selector: what load costs beside the bytes themselves.

The load shares the machine with what it measures. An event loop spends 30 microseconds on a read
of 200 bytes, most of it on its own callbacks and on buffers for reads that might be large; with 16
streams that is a twentieth of a small step. So this is a bare loop that reads into one buffer.
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
_UNDER_WAY = (0, errno.EINPROGRESS, errno.EWOULDBLOCK)


@dataclasses.dataclass(slots=True)
class HttpExchange:
    """One request and what came back."""

    sent_s: float = 0.0
    """When its connection was asked for, `time.perf_counter`."""
    received: list[tuple[float, bytes]] = dataclasses.field(default_factory=list)
    """(seconds, bytes) of each read."""


def run_exchanges(
    host: str, port: int, clients: Sequence[Sequence[tuple[float, bytes]]], timeout_s: float
) -> tuple[list[list[HttpExchange]], float]:
    """Let each client send its requests one after the other, each over a connection of its own.

    Args:
        host: IPv4 address.
        port: where the server listens.
        clients: per client (seconds after the begin before which it is not sent, request).
        timeout_s: longest exchange.

    Returns:
        The exchanges in the same order, and the seconds from the begin to the last end.

    Raises:
        TimeoutError: an exchange did not end in time.
        OSError: no connection.
    """
    return _Loop(host, port, clients, timeout_s).run()


class _Stream:
    """A connection with one request; collects until the end mark or the connection's end."""

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
        if problem not in _UNDER_WAY:
            raise OSError(problem, f"no connection to {address[0]}:{address[1]}")

    def write(self) -> bool:
        """Send what can be sent; True when the request has left."""
        problem = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if problem:
            raise OSError(problem, "the connection was refused")
        try:
            self._unsent = self._unsent[self.socket.send(self._unsent) :]
        except BlockingIOError:
            return False
        return not self._unsent

    def take(self, data: bytes) -> bool:
        """Keep what was read; True when that is all."""
        self.exchange.received.append((time.perf_counter(), data))
        if self._chunked is None and _HEAD_END in data:
            self._chunked = is_chunked(data.partition(_HEAD_END)[0])
        size = len(data)
        tail = data[-_TAIL_BYTES:] if size >= _TAIL_BYTES else (self._tail + data)[-_TAIL_BYTES:]
        self._tail = tail
        return _DONE in tail and (not self._chunked or tail.endswith(_LAST_CHUNK))


class _Loop:
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
        self._open: dict[_Stream, float] = {}
        """Until when each must have ended; the oldest is the first."""
        self._selector = selectors.DefaultSelector()
        self._buffer = bytearray(READ_BYTES)
        self._view = memoryview(self._buffer)
        self._began_s = time.perf_counter()
        self._due: list[tuple[float, int]] = []

    def run(self) -> tuple[list[list[HttpExchange]], float]:
        try:
            for client in range(len(self._waiting)):
                self._next(client)
            while self._due or self._open:
                self._begin_due()
                for key, _ in self._selector.select(self._wait_s()):
                    self._turn(key.data)
                self._check_deadlines()
            return self._done, time.perf_counter() - self._began_s
        finally:
            for stream in self._open:
                stream.socket.close()
            self._selector.close()

    def _next(self, client: int) -> None:
        """Let a client's next request wait for its time."""
        if self._waiting[client]:
            heapq.heappush(self._due, (self._began_s + self._waiting[client][-1][0], client))

    def _begin_due(self) -> None:
        now_s = time.perf_counter()
        while self._due and self._due[0][0] <= now_s:
            _, client = heapq.heappop(self._due)
            stream = _Stream(client, self._address, self._waiting[client].pop()[1])
            self._done[client].append(stream.exchange)
            self._open[stream] = stream.exchange.sent_s + self._timeout_s
            self._selector.register(stream.socket, selectors.EVENT_WRITE, stream)

    def _wait_s(self) -> float | None:
        at_s = [self._due[0][0]] if self._due else []
        if self._open:
            at_s.append(next(iter(self._open.values())))
        return max(0.0, min(at_s) - time.perf_counter()) if at_s else None

    def _turn(self, stream: _Stream) -> None:
        """Write or read once."""
        if not stream.exchange.received and self._writes(stream):
            return
        try:
            size = stream.socket.recv_into(self._buffer)
        except BlockingIOError:
            return
        except ConnectionError:
            size = 0
        if not size or stream.take(bytes(self._view[:size])):
            self._selector.unregister(stream.socket)
            stream.socket.close()
            del self._open[stream]
            self._next(stream.client)

    def _writes(self, stream: _Stream) -> bool:
        """Go on with a request that has not left; False when there is something to read instead."""
        if self._selector.get_key(stream.socket).events != selectors.EVENT_WRITE:
            return False
        if stream.write():
            self._selector.modify(stream.socket, selectors.EVENT_READ, stream)
        return True

    def _check_deadlines(self) -> None:
        if self._open and next(iter(self._open.values())) < time.perf_counter():
            raise TimeoutError(f"a request was not answered within {self._timeout_s:.0f} s")
