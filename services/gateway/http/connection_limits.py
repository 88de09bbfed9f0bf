"""Bounds on connections: how many there may be, and how long one may take nothing.

A process without descriptors cannot even say that it is full: asyncio then stops accepting for a
second at a time. So some are spared, and a connection too many is told so and closed.
"""

import asyncio
import socket

from services.gateway.http.errors import ApiError

DESCRIPTORS_SPARED = 160
"""Open files that are kept for this process itself and for connections that are being refused."""
SPARED_SHARE = 8
"""... or one in so many, when that is more."""
ACCEPTED_AT_ONCE = 8
"""Connections taken in one turn of the event loop; more wait in the system's backlog. One that is
closed at once holds its descriptor for five turns."""
REFUSED_AT_ONCE = 64
"""Refusals whose clients may still read them; one more is closed without a word. With
those that
are being closed and this process's own files it is less than what is spared."""
REFUSED_LINGER_S = 1.0
"""Who is refused may read the answer for so long."""
STALLED_S = 30.0
"""A client whose side of the connection takes no byte for so long is cut off."""
SEND_BUFFER_BYTES = 32 * 1024
"""What the system keeps unsent for one client (Linux doubles it). It would keep megabytes, out of
our bounds, and take nothing more from us before a third of them is gone."""

_RETRY_S = 5.0


def connections_max(descriptors: int) -> int:
    """Return how many connections a process with so many descriptors may have."""
    return max(1, descriptors - max(DESCRIPTORS_SPARED, descriptors // SPARED_SHARE))


def bound_sending(listener: socket.socket) -> None:
    """Bound what the connections of a listener keep unsent, and for how long."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # Linux also sees clients that vanished, and windows that stay shut over an empty buffer.
        timeout_ms = int(STALLED_S * 1_000)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)


class ConnectionRefusals:
    """Makes what answers connections that are too many."""

    def __init__(self) -> None:
        self.open = 0

    def __call__(self) -> asyncio.Protocol:
        """Return the protocol of a new connection."""
        return ConnectionRefusal(self)


class ConnectionRefusal(asyncio.Protocol):
    """A connection too many: it is told so, whatever it asks, and closed."""

    def __init__(self, refusals: ConnectionRefusals) -> None:
        self._refusals = refusals
        refusals.open += 1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Answer at once; what the client sends is read, or it might not see the answer."""
        assert isinstance(transport, asyncio.Transport)
        if self._refusals.open > REFUSED_AT_ONCE:
            transport.abort()
            return
        transport.write(_ANSWER)
        transport.write_eof()
        asyncio.get_running_loop().call_later(REFUSED_LINGER_S, transport.abort)

    def connection_lost(self, _exc: BaseException | None) -> None:
        """Make room for another."""
        self._refusals.open -= 1


def _answer() -> bytes:
    error = ApiError(429, "Too many connections are open.", code="queue_full")
    body = error.body()
    return (
        b"HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/json\r\n"
        b"Retry-After: %d\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"
        % (_RETRY_S, len(body), body)
    )


_ANSWER = _answer()
