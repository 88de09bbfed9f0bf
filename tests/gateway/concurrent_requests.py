"""Requests under way while the scheduler is away, and what their clients have in the end."""

import threading
import time
from collections.abc import Callable
from typing import Any

from tests.gateway import raw_client, tiny_tokenizer
from tests.gateway.running_gateway import RunningGateway

TOKENIZER = tiny_tokenizer.train()
TOKENS: list[int] = TOKENIZER.encode("one two three " * 100).ids[:60]
MESSAGES = [{"role": "user", "content": "Hello"}]


class Asking:
    """Some requests, streamed and whole, each in a thread."""

    def __init__(self, gateway: RunningGateway, count: int = 2, **fields: Any) -> None:
        self._gateway = gateway
        self._fields = fields
        self.answers: list[dict[str, Any]] = []
        self.streams: list[list[Any]] = []
        self._threads = [
            threading.Thread(target=target)
            for target in (self._whole, self._stream)
            for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait until all are answered."""
        for thread in self._threads:
            thread.join(90)
            assert not thread.is_alive()

    def check(self) -> None:
        """Everybody has the whole text, each token once."""
        self.join()
        text = TOKENIZER.decode(TOKENS)
        assert [one["choices"][0]["message"]["content"] for one in self.answers] == [text] * 2
        for events in self.streams:
            assert events[-1] == "[DONE]"
            pieces = [event["choices"][0]["delta"].get("content", "") for event in events[:-1]]
            assert "".join(pieces) == text

    def _whole(self) -> None:
        self.answers.append(self._gateway.chat(**self._fields)[1])

    def _stream(self) -> None:
        self.streams.append(
            self._gateway.stream(raw_client.CHAT, {"messages": MESSAGES, **self._fields})
        )


def until(holds: Callable[[], bool], timeout_s: float = 15.0) -> None:
    """Wait until it holds; it never does if it did not when it was asked after the deadline."""
    until_s = time.monotonic() + timeout_s
    while True:
        asked_s = time.monotonic()
        if holds():
            return
        assert asked_s < until_s, "it never did"
        time.sleep(0.02)
