"""HTTP client on plain sockets in one event loop, for many connections with times."""

import asyncio
import contextlib
import dataclasses
import json
import time
from typing import Any

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]


@dataclasses.dataclass(slots=True)
class Response:
    """One response; status 0 if the connection ended without one."""

    status: int = 0
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    body: bytes = b""
    sent_s: float = 0.0
    ended_s: float = 0.0
    times_s: list[float] = dataclasses.field(default_factory=list)
    """Arrival of each piece of the body."""

    @property
    def is_complete(self) -> bool:
        """Whether a stream came to its regular end."""
        return self.status == 200 and b"data: [DONE]" in self.body

    @property
    def is_refused_with_retry(self) -> bool:
        """Whether it is a 429 with a Retry-After of 1 to 120 seconds."""
        after = self.headers.get("retry-after", "")
        return self.status == 429 and after.isdigit() and 1 <= int(after) <= 120

    @property
    def text(self) -> str:
        """The text of a streamed chat's only choice."""
        pieces = []
        for line in self.body.split(b"\n"):
            if line.startswith(b"data: {"):
                event = json.loads(line.removeprefix(b"data: "))
                choices = event.get("choices") or [{}]
                pieces.append(choices[0].get("delta", {}).get("content") or "")
        return "".join(pieces)


def encode_request(body: dict[str, Any], path: str = CHAT) -> bytes:
    """Return the bytes of a POST with `Connection: close`."""
    data = json.dumps({"model": "tiny", "messages": MESSAGES, **body}).encode()
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    ).encode() + data


async def send(port: int, data: bytes, timeout_s: float = 60.0) -> Response:
    """Send the bytes of a request; return the response, also if it is incomplete."""
    response = Response(sent_s=time.monotonic())
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(data)
                await _read(reader, response)
            finally:
                writer.close()
    response.ended_s = time.monotonic()
    return response


async def _read(reader: asyncio.StreamReader, response: Response) -> None:
    header = b""
    while not header.endswith(b"\r\n\r\n"):
        line = await reader.readline()
        if not line:
            return
        header += line
    lines = header.decode().split("\r\n")
    response.headers = {
        name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])
    }
    response.status = int(lines[0].split()[1])
    while piece := await reader.read(65_536):
        response.times_s.append(time.monotonic())
        response.body += piece
