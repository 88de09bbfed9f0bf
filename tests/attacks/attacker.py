"""Raw HTTP over sockets for attackers, who do not keep to what client libraries do."""

import contextlib
import dataclasses
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

from tests.attacks.target import ATTACKER_KEY, HOST

CONNECT_TIMEOUT_S = 10.0
MODEL = "lockstep-demo"


@dataclasses.dataclass(frozen=True, slots=True)
class Attacker:
    """One attacker: where it attacks, and until when."""

    port: int
    ends_at_s: float
    """Monotonic time at which it stops."""
    source: str = HOST
    """Its own address, by which the gateway knows it where no API keys exist."""

    @property
    def is_over(self) -> bool:
        """Tell whether it is time to stop."""
        return time.monotonic() >= self.ends_at_s

    @property
    def left_s(self) -> float:
        """Seconds until it is time to stop, at least 0.01."""
        return max(0.01, self.ends_at_s - time.monotonic())

    @contextlib.contextmanager
    def connected(self) -> Iterator[socket.socket]:
        """Open a connection and close it after the block."""
        address = (HOST, self.port)
        source = (self.source, 0)
        with socket.create_connection(address, CONNECT_TIMEOUT_S, source) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield connection

    def sleep_to_the_end(self) -> None:
        """Wait until it is time to stop."""
        time.sleep(self.left_s)

    def exchange(self, request: bytes) -> bytes:
        """Send a request on a connection of its own and return all bytes of the response.

        The connection is closed when it is time to stop.
        """
        received = bytearray()
        with contextlib.suppress(OSError), self.connected() as connection:
            connection.settimeout(self.left_s)
            connection.sendall(request)
            while part := connection.recv(1 << 16):
                received += part
                connection.settimeout(self.left_s)
        return bytes(received)


def completion(**fields: Any) -> dict[str, Any]:
    """Return the body of a completions request with the fields and the demo model's name."""
    return {"model": MODEL, "prompt": "Once", **fields}


def post(
    body: dict[str, Any] | bytes,
    path: str = "/v1/completions",
    *,
    version: str = "1.1",
    headers: str = "Connection: close\r\n",
) -> bytes:
    """Return the bytes of a POST request.

    Args:
        body: JSON as a dict, or the bytes of the body.
        path: path of the endpoint.
        version: HTTP version.
        headers: further header lines, each ending with CRLF.
    """
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head(len(content), path, version=version, headers=headers) + content


def head(
    content_length: int, path: str = "/v1/completions", *, version: str = "1.1", headers: str = ""
) -> bytes:
    """Return the request line and headers of a POST request, up to the empty line.

    Args:
        content_length: announced length of the body in bytes.
        path: path of the endpoint.
        version: HTTP version.
        headers: further header lines, each ending with CRLF.
    """
    return (
        f"POST {path} HTTP/{version}\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {ATTACKER_KEY}\r\nContent-Length: {content_length}\r\n"
        f"{headers}\r\n"
    ).encode()
