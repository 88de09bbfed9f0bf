"""Raw HTTP over sockets for attackers, who do not keep to what client libraries do."""

import contextlib
import dataclasses
import json
import re
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tests.attacks.target import ATTACKER_KEY, HOST

CONNECT_TIMEOUT_S = 10.0
MODEL = "lockstep-demo"
QUESTION = {"role": "user", "content": "Hello."}
"""A message in all dialects."""
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")


@dataclasses.dataclass(frozen=True, slots=True)
class Attacker:
    """One attacker: where it attacks, and until when."""

    port: int
    ends_at_s: float
    """Monotonic time at which it stops."""
    source: str = HOST
    """Its own address, by which the gateway knows it where no API keys exist."""
    statuses: list[int] = dataclasses.field(default_factory=list)
    """HTTP statuses of the answers that it has read."""

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
        return self.exchange_all([request])[0]

    def exchange_all(self, requests: Sequence[bytes]) -> list[bytes]:
        """Send requests at the same time, each on a connection of its own; return the responses.

        The connections are closed when it is time to stop.
        """
        responses = [b""] * len(requests)
        with contextlib.ExitStack() as connections, contextlib.suppress(OSError):
            opened = []
            for request in requests:
                opened.append(connections.enter_context(self.connected()))
                opened[-1].settimeout(self.left_s)
                # A refused body is answered before its end, and then the connection is closed.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    opened[-1].sendall(request)
            for number, connection in enumerate(opened):
                responses[number] = self._read(connection)
        for response in responses:
            self.note(response)
        return responses

    def note(self, response: bytes) -> None:
        """Record the status of a response, of which the first bytes are given."""
        if status := _STATUS.match(response):
            self.statuses.append(int(status[1]))

    def _read(self, connection: socket.socket) -> bytes:
        received = bytearray()
        with contextlib.suppress(OSError):
            connection.settimeout(self.left_s)
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
    key: str = ATTACKER_KEY,
) -> bytes:
    """Return the bytes of a POST request.

    Args:
        body: JSON as a dict, or the bytes of the body.
        path: path of the endpoint.
        version: HTTP version.
        headers: further header lines, each ending with CRLF.
        key: the API key.
    """
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head(len(content), path, version=version, headers=headers, key=key) + content


def head(
    content_length: int,
    path: str = "/v1/completions",
    *,
    version: str = "1.1",
    headers: str = "",
    key: str = ATTACKER_KEY,
) -> bytes:
    """Return the request line and headers of a POST request, up to the empty line.

    Args:
        content_length: announced length of the body in bytes.
        path: path of the endpoint.
        version: HTTP version.
        headers: further header lines, each ending with CRLF.
        key: the API key.
    """
    return (
        f"POST {path} HTTP/{version}\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {key}\r\nContent-Length: {content_length}\r\n"
        f"{headers}\r\n"
    ).encode()


def get(path: str) -> bytes:
    """Return the bytes of a GET request with the attacker's key."""
    return (
        f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\nAuthorization: Bearer {ATTACKER_KEY}\r\n"
        "Connection: close\r\n\r\n"
    ).encode()
