"""A stream that runs while a test sends other requests."""

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.gateway import raw_client, tiny_tokenizer
from tests.gateway.running_gateway import RunningGateway
from tests.gateway.scripted_scheduler import finished, generated

_TOKENIZER = tiny_tokenizer.train()
_TOKENS: list[int] = (_TOKENIZER.encode("one two three " * 100).ids * 10)[:4_000]


class BackgroundStream:
    """A stream that runs until `end`, with the arrival times of its pieces."""

    def __init__(self, gateway: RunningGateway, token_s: float) -> None:
        """Start the stream.

        Args:
            gateway: serves the stream.
            token_s: pause between two tokens in seconds.
        """
        self.gateway = gateway
        self._token_s = token_s
        self._may_end = threading.Event()
        self._sent = 0
        self._events: list[Any] = []
        self._times_s: list[float] = []
        gateway.scheduler.reply = self._reply
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def p99_s(self, action: Callable[[], None]) -> float:
        """Return the 99th percentile of the gaps between pieces in seconds while `action` runs."""
        start = len(self._times_s)
        action()
        times_s = self._times_s[start:]
        gaps = [after - before for before, after in itertools.pairwise(times_s)]
        return statistics.quantiles(gaps, n=100)[98]

    def end(self) -> None:
        """End the stream; check that it has every token and that no other request was submitted."""
        self._may_end.set()
        self._thread.join(30)
        text = "".join(
            event["choices"][0]["delta"].get("content") or "" for event in self._events[:-1]
        )
        assert self._events[-1] == "[DONE]"
        assert text == _TOKENIZER.decode(_TOKENS[: self._sent])
        assert len(self.gateway.scheduler.submitted) == 1

    def _read(self) -> None:
        body = {"messages": [{"role": "user", "content": "watched"}]}
        for event in self.gateway.iter_events(raw_client.CHAT, body):
            self._times_s.append(time.monotonic())
            self._events.append(event)

    def _reply(self, request: Any) -> Iterator[Any]:
        for position, token in enumerate(_TOKENS):
            yield generated(request, position, [token])
            self._sent += 1
            yield self._token_s
            if self._may_end.is_set():
                break
        yield finished(request, self._sent, "stop")
