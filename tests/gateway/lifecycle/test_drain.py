"""SIGTERM: not ready at once, what is here is answered, and the exit code says what was not."""

import contextlib
import json
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from shared import limits
from tests.gateway import raw_client, tiny_tokenizer
from tests.gateway.running_gateway import RunningGateway
from tests.gateway.scripted_scheduler import hold, say, status

_TOKENIZER = tiny_tokenizer.train()
_TOKENS: list[int] = _TOKENIZER.encode("one two three " * 100).ids
_MESSAGES = [{"role": "user", "content": "Hello"}]
_NEVER_S = 20.0
"""A drain that takes so long has waited for what it should not wait for: tests wait for half."""


class _Reading:
    """A request that is answered in a thread."""

    def __init__(self, gateway: RunningGateway, *, is_streamed: bool) -> None:
        self.events: list[Any] = []
        self.answer: tuple[int, dict[str, Any]] = (0, {})
        self._gateway = gateway
        self._thread = threading.Thread(target=self._stream if is_streamed else self._whole)
        self._thread.start()

    def join(self) -> None:
        """Wait for the end of the answer."""
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _stream(self) -> None:
        self.events = self._gateway.stream(raw_client.CHAT, {"messages": _MESSAGES})

    def _whole(self) -> None:
        self.answer = self._gateway.chat()


def _wait_orders(gateway: RunningGateway, count: int) -> None:
    until_s = time.monotonic() + 20
    while len(gateway.scheduler.orders) < count:
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_what_runs_is_answered_and_nothing_new(model_folder: Path, tmp_path: Path) -> None:
    """Promise 17: /readyz says no at once; new requests are told to go elsewhere; code 0."""
    may_end = threading.Event()
    with RunningGateway.start(model_folder, tmp_path, drain_s=_NEVER_S) as gateway:
        gateway.scheduler.reply = hold(_TOKENS[:40], may_end)
        readings = [_Reading(gateway, is_streamed=is_streamed) for is_streamed in (True, False)]
        _wait_orders(gateway, 2)
        gateway.process.send_signal(signal.SIGTERM)
        gateway.wait_draining(5.0)
        assert gateway.get("/readyz")[0] == 503
        body = {"model": "tiny", "messages": _MESSAGES}
        got, answer, headers = gateway.post(raw_client.CHAT, body)
        assert (got, answer["error"]["code"]) == (503, "unavailable")
        assert (headers["retry-after"], headers["connection"]) == ("10", "close")
        assert gateway.get("/livez")[0] == 200
        may_end.set()
        for reading in readings:
            reading.join()
        assert readings[0].events[-1] == "[DONE]"
        assert readings[1].answer[0] == 200
        assert gateway.process.wait(_NEVER_S / 2) == limits.EXIT_OK
        assert len(gateway.scheduler.orders) == 2
        assert gateway.scheduler.aborts == []


def test_what_does_not_finish_in_time_is_cut_off_with_an_error(
    model_folder: Path, tmp_path: Path
) -> None:
    """After drain_s a stream ends with an error event, a whole answer with 503; code 69."""
    with RunningGateway.start(model_folder, tmp_path, drain_s=3.0) as gateway:
        gateway.scheduler.reply = say(_TOKENS, pause_s=0.1)
        readings = [_Reading(gateway, is_streamed=is_streamed) for is_streamed in (True, False)]
        _wait_orders(gateway, 2)
        signalled_s = time.monotonic()
        gateway.process.send_signal(signal.SIGTERM)
        for reading in readings:
            reading.join()
        assert readings[0].events[-1]["error"]["code"] == "unavailable"
        assert readings[1].answer[0] == 503
        assert gateway.process.wait(20) == limits.EXIT_UNAVAILABLE
        assert 2.5 < time.monotonic() - signalled_s < 3.0 + 15.0
        assert len(gateway.scheduler.wait_aborts(2)) == 2


def test_who_reads_slowly_has_all_of_the_answer(model_folder: Path, tmp_path: Path) -> None:
    """The scheduler has ended the request, but its bytes are still on their way at SIGTERM."""
    reports = status(context_tokens_max=1_000_000)
    with RunningGateway.start(model_folder, tmp_path, drain_s=60.0, reports=reports) as gateway:
        gateway.scheduler.reply = say(_TOKENS * 5)
        body = raw_client.request({"logprobs": True, "top_logprobs": 5, "max_tokens": 9_000})
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            client.connect(("127.0.0.1", gateway.port))
            client.sendall(body)
            received = client.recv(1_024)
            gateway.process.send_signal(signal.SIGTERM)
            pause_s = 0.02
            while piece := client.recv(65_536):
                received += piece
                time.sleep(pause_s)
                pause_s = pause_s if len(received) < 200_000 else 0.0
        head, _, content = received.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert len(json.loads(content)["choices"][0]["logprobs"]["content"]) == 5 * len(_TOKENS)
        assert gateway.process.wait(20) == limits.EXIT_OK


def test_half_requests_do_not_hold_up_the_end(model_folder: Path, tmp_path: Path) -> None:
    """Idle connections, half headers and half bodies are nothing that anybody was promised."""
    settings: dict[str, Any] = {"header_timeout_s": 60.0, "body_timeout_s": 60.0}
    started = RunningGateway.start(model_folder, tmp_path, drain_s=_NEVER_S, **settings)
    with started as gateway, contextlib.ExitStack() as opened:
        for begun in (b"", raw_client.request({})[:30], raw_client.request({})[:-5]):
            client = opened.enter_context(socket.create_connection(("127.0.0.1", gateway.port)))
            client.sendall(begun)
        # They are read before the answer to whoever comes later.
        assert gateway.get("/livez")[0] == 200
        gateway.process.send_signal(signal.SIGTERM)
        assert gateway.process.wait(_NEVER_S / 2) == limits.EXIT_OK


def test_a_scheduler_that_drains_makes_us_unready(model_folder: Path, tmp_path: Path) -> None:
    """/readyz says so; it is ready again when the order is taken back."""
    with RunningGateway.start(model_folder, tmp_path) as gateway:
        gateway.scheduler.status = status(draining=True, ready=False, reason="It stops.")
        until_s = time.monotonic() + 15
        while gateway.get("/readyz")[0] == 200:
            assert time.monotonic() < until_s
        reason = json.loads(gateway.get("/readyz")[1])["reason"]
        assert reason == "the scheduler is shutting down"
        gateway.scheduler.status = status()
        gateway.wait_ready()


@pytest.mark.proof
def test_who_waits_for_a_scheduler_is_answered_when_the_gateway_ends(
    model_folder: Path, tmp_path: Path
) -> None:
    """A second SIGTERM ends its wait with a 503 at once; it was cut off, so the code is 69."""
    with RunningGateway.start(model_folder, tmp_path, drain_s=_NEVER_S) as gateway:
        gateway.scheduler.stop()
        until_s = time.monotonic() + 15
        while gateway.get("/readyz")[0] == 200:
            assert time.monotonic() < until_s
            time.sleep(0.05)
        with socket.create_connection(("127.0.0.1", gateway.port)) as client:
            client.sendall(raw_client.request({}))
            # It is read before the answer to whoever comes later.
            assert gateway.get("/livez")[0] == 200
            client.settimeout(0.5)
            with pytest.raises(TimeoutError):
                client.recv(1)
            gateway.process.send_signal(signal.SIGTERM)
            gateway.wait_draining()
            gateway.process.send_signal(signal.SIGTERM)
            assert gateway.process.wait(_NEVER_S / 2) == limits.EXIT_UNAVAILABLE
            client.settimeout(10.0)
            answer = b"".join(iter(lambda: client.recv(65_536), b""))
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert json.loads(body)["error"]["message"] == "The server is shutting down."
