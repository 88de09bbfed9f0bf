"""Many clients at once: plain sockets in one event loop, each answer with its times."""

import asyncio
import contextlib
import dataclasses
import json
import time
from typing import Any

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]


@dataclasses.dataclass(slots=True)
class Answer:
    """One answer; status 0 when the connection ended without one."""

    status: int = 0
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    body: bytes = b""
    sent_s: float = 0.0
    ended_s: float = 0.0
    times_s: list[float] = dataclasses.field(default_factory=list)
    """When each piece arrived."""

    @property
    def is_whole(self) -> bool:
        """Tell whether a stream came to its regular end."""
        return self.status == 200 and b"data: [DONE]" in self.body

    @property
    def is_honest_refusal(self) -> bool:
        """Tell whether it says to come back, within bounds that clients obey."""
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


def request(body: dict[str, Any], path: str = CHAT) -> bytes:
    """Return a POST that ends its connection."""
    data = json.dumps({"model": "tiny", "messages": MESSAGES, **body}).encode()
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    ).encode() + data


async def ask(port: int, data: bytes, timeout_s: float = 60.0) -> Answer:
    """Send a request; return the answer, however it ended."""
    answer = Answer(sent_s=time.monotonic())
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(data)
                await _read(reader, answer)
            finally:
                writer.close()
    answer.ended_s = time.monotonic()
    return answer


async def _read(reader: asyncio.StreamReader, answer: Answer) -> None:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        line = await reader.readline()
        if not line:
            return
        head += line
    lines = head.decode().split("\r\n")
    answer.headers = {
        name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])
    }
    answer.status = int(lines[0].split()[1])
    while piece := await reader.read(65_536):
        answer.times_s.append(time.monotonic())
        answer.body += piece
