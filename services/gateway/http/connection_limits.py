"""Limits on connections: their number, their send buffers, and how long a client may stall.

A process without free descriptors cannot refuse connections: asyncio then stops accepting for a
second at a time. So some descriptors are reserved for refusals.
"""

import asyncio
import dataclasses
import socket

from services.gateway.http.errors import ApiError
from shared.tenants.fair_share import FairShare

DESCRIPTORS_RESERVED = 160
"""Descriptors kept for this process itself and for connections that are being refused."""
RESERVED_SHARE = 8
"""One descriptor in this many is reserved, when that is more than `DESCRIPTORS_RESERVED`."""
ACCEPTS_PER_TURN = 8
"""Connections accepted in one turn of the event loop; others wait in the system's backlog. A
refused connection holds its descriptor for five turns."""
REFUSALS_MAX = 64
"""Refusals that are sent at the same time; further connections are closed without a response.
These, connections being closed and this process's own files need fewer descriptors than are
reserved."""
REFUSAL_LINGER_S = 1.0
"""Time for which a refused client may read the response."""
STALL_TIMEOUT_S = 30.0
"""A client that reads no byte for this long is disconnected."""
SEND_BUFFER_BYTES = 32 * 1024
"""Send buffer of one connection (Linux doubles it). The default would hold megabytes that no limit
of this server counts, and would accept more only after a third of them was sent."""

_RETRY_AFTER_S = 5.0
_FULL = "Too many connections are open."
_SHARE_USED = (
    "Your address uses up its own share of the connections: close some of them, or use them for "
    "further requests."
)


def connections_max(descriptors: int) -> int:
    """Return how many connections a process may serve; the other descriptors are reserved.

    Args:
        descriptors: limit of the process on open files.
    """
    return max(1, descriptors - max(DESCRIPTORS_RESERVED, descriptors // RESERVED_SHARE))


def limit_send_buffers(listener: socket.socket) -> None:
    """Limit the unsent bytes of each connection to `SEND_BUFFER_BYTES`.

    On Linux, bytes that stay unsent for `STALL_TIMEOUT_S` also end the connection.

    Args:
        listener: listening socket, from which its connections inherit the limits.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # On Linux this also finds vanished clients, and closed windows over an empty buffer.
        timeout_ms = int(STALL_TIMEOUT_S * 1_000)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)


class ConnectionRefusal(asyncio.Protocol):
    """Protocol of one connection over the limit: it sends a 429 and closes the connection."""

    def __init__(self, refusals: "set[ConnectionRefusal]", *, is_full: bool) -> None:
        """Create the protocol and add it to `refusals`, which has it until its connection is lost.

        Args:
            refusals: all refused connections of the server that are not closed yet.
            is_full: the cause is the number of all connections, not that of the client's address.
        """
        self._refusals = refusals
        self._cause = _FULL if is_full else _SHARE_USED
        refusals.add(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the 429 without waiting for a request, and disconnect after `REFUSAL_LINGER_S`.

        Until then the client's bytes are read, because a reset could lose the 429. If more than
        `REFUSALS_MAX` refusals are open, disconnect at once without a response.
        """
        assert isinstance(transport, asyncio.Transport)
        if len(self._refusals) > REFUSALS_MAX:
            transport.abort()
            return
        transport.write(_response(self._cause))
        transport.write_eof()
        asyncio.get_running_loop().call_later(REFUSAL_LINGER_S, transport.abort)

    def connection_lost(self, _exc: BaseException | None) -> None:
        """Stop counting this connection as one that is being refused."""
        self._refusals.discard(self)


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits that all connections of a server have in common, and the connections that count."""

    header_timeout_s: float
    """Seconds within which a request's headers must be complete."""
    by_address: FairShare
    """Connections that are served, by client address; refused ones do not count."""
    refusals: set[ConnectionRefusal] = dataclasses.field(default_factory=set)
    """Connections that are being refused."""


def _response(message: str) -> bytes:
    body = ApiError(429, message, code="queue_full").body()
    return (
        b"HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/json\r\n"
        b"Retry-After: %d\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b"
        % (_RETRY_AFTER_S, len(body), body)
    )
