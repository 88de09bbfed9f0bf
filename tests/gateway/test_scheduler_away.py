"""A scheduler that dies, hands over or hangs: open requests are kept, and say so when they end."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.messages import RequestAccepted
from tests.gateway import load, tiny_tokenizer
from tests.gateway.running_gateway import RunningGateway
from tests.gateway.scripted_scheduler import ScriptedScheduler, finished, generated, say

_TOKENIZER = tiny_tokenizer.train()
_TOKENS: list[int] = _TOKENIZER.encode("one two three " * 100).ids[:60]
_MESSAGES = [{"role": "user", "content": "Hello"}]


class _Asking:
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
            thread.join(30)
            assert not thread.is_alive()

    def check(self) -> None:
        """Everybody has the whole text, each token once."""
        self.join()
        text = _TOKENIZER.decode(_TOKENS)
        assert [one["choices"][0]["message"]["content"] for one in self.answers] == [text] * 2
        for events in self.streams:
            assert events[-1] == "[DONE]"
            pieces = [event["choices"][0]["delta"].get("content", "") for event in events[:-1]]
            assert "".join(pieces) == text

    def _whole(self) -> None:
        self.answers.append(self._gateway.chat(**self._fields)[1])

    def _stream(self) -> None:
        self.streams.append(
            self._gateway.stream(load.CHAT, {"messages": _MESSAGES, **self._fields})
        )


def _until(holds: Any, timeout_s: float = 10.0) -> None:
    until_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < until_s, "it never did"
        time.sleep(0.02)


def _replace(gateway: RunningGateway, *, says_goodbye: bool, pause_s: float) -> None:
    """End the scheduler, and start another one after a while."""
    before = gateway.scheduler
    gateway.scheduler.stop(says_goodbye=says_goodbye)
    time.sleep(pause_s)
    gateway.scheduler = ScriptedScheduler(before.address)
    gateway.scheduler.reply = before.reply


@pytest.mark.parametrize("says_goodbye", [True, False])
def test_nobody_notices_a_new_scheduler(
    model_folder: Path, tmp_path: Path, says_goodbye: bool
) -> None:
    """Part 2: killed or handed over twice, streamed and whole answers have each token once."""
    with RunningGateway.start(model_folder, tmp_path) as gateway:
        gateway.scheduler.reply = say(_TOKENS, pause_s=0.03)
        asking = _Asking(gateway)
        for _ in range(2):
            _until(lambda: len(gateway.scheduler.orders) == 4)
            time.sleep(0.5)
            _replace(gateway, says_goodbye=says_goodbye, pause_s=0.3)
        _until(lambda: len(gateway.scheduler.orders) == 4)
        generated_before = [order.generated for order in gateway.scheduler.orders]
        assert all(0 < len(tokens) < len(_TOKENS) for tokens in generated_before)
        asking.check()
        assert all(_TOKENS[: len(tokens)] == tokens for tokens in generated_before)


def test_what_ended_or_left_meanwhile_is_not_offered(model_folder: Path, tmp_path: Path) -> None:
    """A stop string's end is not confirmed any more, a client leaves: neither comes back."""
    with RunningGateway.start(model_folder, tmp_path) as gateway:
        gateway.scheduler.reply = say(_TOKENS, pause_s=0.05)
        asking = _Asking(gateway, count=1)
        _until(lambda: len(gateway.scheduler.orders) == 2)
        leaving = load.request({"stream": True})
        client = _open(gateway, leaving)
        _until(lambda: len(gateway.scheduler.orders) == 3)
        address = gateway.scheduler.address
        gateway.scheduler.stop(says_goodbye=False)
        client.close()
        time.sleep(0.3)
        gateway.scheduler = ScriptedScheduler(address)
        gateway.scheduler.reply = say(_TOKENS, pause_s=0.01)
        asking.join()
        assert len(gateway.scheduler.orders) == 2
        assert gateway.scheduler.aborts == []


def _open(gateway: RunningGateway, data: bytes) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", gateway.port))
    client.sendall(data)
    return client


def test_a_scheduler_that_hangs_makes_us_unready(model_folder: Path, tmp_path: Path) -> None:
    """F15: within 5 s /readyz is false and new requests a 503; all goes on when it goes on."""
    with RunningGateway.start(model_folder, tmp_path) as gateway:
        gateway.scheduler.reply = say(_TOKENS, pause_s=0.03)
        asking = _Asking(gateway)
        _until(lambda: len(gateway.scheduler.orders) == 4)
        time.sleep(0.3)
        with gateway.scheduler.stopped():
            _until(lambda: gateway.get("/readyz")[0] == 503, 5.0)
            reason = json.loads(gateway.get("/readyz")[1])["reason"]
            assert reason == "the scheduler does not report"
            body = {"model": "tiny", "messages": _MESSAGES}
            got, _, headers = gateway.post(load.CHAT, body)
            assert (got, headers["retry-after"]) == (503, "5")
            assert gateway.get("/livez")[0] == 200
        gateway.wait_ready()
        asking.check()
        assert len(gateway.scheduler.orders) == 4


def test_a_scheduler_that_hangs_for_longer_than_a_session(
    model_folder: Path, tmp_path: Path
) -> None:
    """After PEER_SILENCE_S the session is given up; when it wakes, a new one has all requests."""
    with RunningGateway.start(model_folder, tmp_path) as gateway:
        gateway.scheduler.reply = say(_TOKENS, pause_s=0.05)
        asking = _Asking(gateway)
        _until(lambda: len(gateway.scheduler.orders) == 4)
        time.sleep(0.3)
        with gateway.scheduler.stopped():
            time.sleep(12.0)
        asking.check()
        assert len(gateway.scheduler.orders) == 8


def test_the_deadline_holds_while_the_scheduler_is_away(model_folder: Path, tmp_path: Path) -> None:
    """A request that nobody serves ends at its deadline: 504, or an error event."""
    with RunningGateway.start(model_folder, tmp_path, request_timeout_s=1.0) as gateway:
        gateway.scheduler.reply = say(_TOKENS, pause_s=0.2)
        asking = _Asking(gateway, count=1)
        _until(lambda: len(gateway.scheduler.orders) == 2)
        time.sleep(0.4)
        gateway.scheduler.stop(says_goodbye=False)
        asking.join()
        assert asking.answers[0]["error"]["code"] == "deadline_exceeded"
        assert asking.streams[0][-1]["error"]["code"] == "deadline_exceeded"


def test_a_scheduler_that_stays_away_ends_open_requests(model_folder: Path, tmp_path: Path) -> None:
    """After LOST_S_MAX: a 503 for whole answers, an error event for streams; nobody hangs."""
    prelude = "import services.gateway.requests as r; r.LOST_S_MAX = 1.0"
    with RunningGateway.start(model_folder, tmp_path, prelude=prelude) as gateway:
        gateway.scheduler.reply = say(_TOKENS, pause_s=0.2)
        asking = _Asking(gateway, count=1)
        _until(lambda: len(gateway.scheduler.orders) == 2)
        time.sleep(0.4)
        gateway.scheduler.stop()
        asking.join()
        assert asking.answers[0]["error"]["message"] == "The scheduler has been away for too long."
        assert asking.streams[0][-1]["error"]["code"] == "unavailable"
        assert b"lockstep_gateway_open_requests 0.0" in gateway.get("/metrics")[1]


def test_tokens_of_the_session_before_are_nobodys(model_folder: Path, tmp_path: Path) -> None:
    """Sent to the session that ended, they never arrive twice: each position once, no error."""
    with RunningGateway.start(model_folder, tmp_path) as gateway:
        gateway.scheduler.reply = say(_TOKENS, pause_s=0.03)
        asking = _Asking(gateway)
        _until(lambda: len(gateway.scheduler.orders) == 4)
        time.sleep(0.3)
        # It forgets the gateway's session but goes on with its requests under the same names.
        gateway.scheduler.forget_sessions()
        _until(lambda: len(gateway.scheduler.orders) == 8)
        asking.check()


def test_a_resumed_request_may_end_at_once(model_folder: Path, tmp_path: Path) -> None:
    """A new scheduler sees that `generated` is complete, and says the end and nothing else."""

    def reply(request: Any) -> Iterator[Any]:
        yield RequestAccepted(request_id=request.request_id, queued_ahead=0)
        for place in range(len(request.generated), len(_TOKENS)):
            yield generated(request, place, [_TOKENS[place]])
        if not request.generated:
            yield 60.0
        yield finished(request, len(_TOKENS), "stop")

    with RunningGateway.start(model_folder, tmp_path) as gateway:
        gateway.scheduler.reply = reply
        asking = _Asking(gateway)
        _until(lambda: len(gateway.scheduler.orders) == 4)
        time.sleep(0.3)
        _replace(gateway, says_goodbye=False, pause_s=0.1)
        asking.check()
