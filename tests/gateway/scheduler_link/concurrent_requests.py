"""Concurrent requests, streamed and not, and a check of their responses."""

import threading
from typing import Any

from tests.gateway import raw_client, tiny_tokenizer
from tests.gateway.running_gateway import RunningGateway
from tests.gateway.scripted_scheduler import reply_with
from tests.support.waiting import wait_until

TOKENIZER = tiny_tokenizer.train()
TOKENS: list[int] = TOKENIZER.encode("one two three " * 100).ids[:60]
MESSAGES = [{"role": "user", "content": "Hello"}]


class ConcurrentRequests:
    """`count` streamed and `count` other requests, each in a thread."""

    def __init__(self, gateway: RunningGateway, count: int = 2, **fields: Any) -> None:
        self._gateway = gateway
        self._fields = fields
        self.bodies: list[dict[str, Any]] = []
        self.streams: list[list[Any]] = []
        self._threads = [
            threading.Thread(target=target)
            for target in (self._post, self._stream)
            for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait until all requests have ended."""
        for thread in self._threads:
            thread.join(90)
            assert not thread.is_alive()

    def check(self) -> None:
        """Wait for all responses, and check that each has every token once."""
        self.join()
        text = TOKENIZER.decode(TOKENS)
        assert [body["choices"][0]["message"]["content"] for body in self.bodies] == [text] * 2
        for events in self.streams:
            assert events[-1] == "[DONE]"
            pieces = [event["choices"][0]["delta"].get("content", "") for event in events[:-1]]
            assert "".join(pieces) == text

    def _post(self) -> None:
        self.bodies.append(self._gateway.chat(**self._fields)[1])

    def _stream(self) -> None:
        body = {"messages": MESSAGES, **self._fields}
        self.streams.append(self._gateway.stream(raw_client.CHAT, body))


def start_requests(
    gateway: RunningGateway, count: int = 2, pause_s: float = 0.1
) -> ConcurrentRequests:
    """Send requests whose tokens come every `pause_s` seconds; wait until all are submitted."""
    gateway.scheduler.reply = reply_with(TOKENS, pause_s=pause_s)
    requests = ConcurrentRequests(gateway, count)
    wait_until(lambda: len(gateway.scheduler.submitted) == 2 * count)
    return requests
