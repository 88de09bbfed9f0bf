"""Drain after SIGTERM: readiness, running requests and exit codes."""

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
from tests.gateway.scripted_scheduler import ready_status, reply_after, reply_with
from tests.support.waiting import wait_until

_TOKENIZER = tiny_tokenizer.train()
_TOKENS: list[int] = _TOKENIZER.encode("one two three " * 100).ids
_MESSAGES = [{"role": "user", "content": "Hello"}]
_DRAIN_S = 20.0
"""Drain time that no test should need: tests fail after half of it."""


class _ThreadedRequest:
    """A request that is sent and read in a thread."""

    def __init__(self, gateway: RunningGateway, *, is_streamed: bool) -> None:
        self.events: list[Any] = []
        self.response: tuple[int, dict[str, Any]] = (0, {})
        self._gateway = gateway
        self._thread = threading.Thread(target=self._stream if is_streamed else self._post)
        self._thread.start()

    def join(self) -> None:
        """Wait for the end of the response."""
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _stream(self) -> None:
        self.events = self._gateway.stream(raw_client.CHAT, {"messages": _MESSAGES})

    def _post(self) -> None:
        self.response = self._gateway.chat()


def _wait_submitted(gateway: RunningGateway, count: int) -> None:
    wait_until(lambda: len(gateway.scheduler.submitted) >= count, 20.0)


def test_gateway_after_sigterm_finishes_running_requests_and_refuses_new_ones(
    model_folder: Path, tmp_path: Path
) -> None:
    """Promise 17: /readyz is 503 at once, new requests get a 503, running ones end, exit code 0."""
    release = threading.Event()
    with RunningGateway.start(model_folder, tmp_path, drain_s=_DRAIN_S) as gateway:
        gateway.scheduler.reply = reply_after(_TOKENS[:40], release)
        requests = [
            _ThreadedRequest(gateway, is_streamed=is_streamed) for is_streamed in (True, False)
        ]
        _wait_submitted(gateway, 2)
        gateway.process.send_signal(signal.SIGTERM)
        gateway.wait_draining(5.0)
        assert gateway.get("/readyz")[0] == 503
        body = {"model": "tiny", "messages": _MESSAGES}
        status_code, response, headers = gateway.post(raw_client.CHAT, body)
        assert (status_code, response["error"]["code"]) == (503, "unavailable")
        assert (headers["retry-after"], headers["connection"]) == ("10", "close")
        assert gateway.get("/livez")[0] == 200
        release.set()
        for request in requests:
            request.join()
        assert requests[0].events[-1] == "[DONE]"
        assert requests[1].response[0] == 200
        assert gateway.process.wait(_DRAIN_S / 2) == limits.EXIT_OK
        assert len(gateway.scheduler.submitted) == 2
        assert gateway.scheduler.aborts == []


def test_open_requests_end_with_error_when_drain_time_ends(
    model_folder: Path, tmp_path: Path
) -> None:
    """After drain_s a stream gets an error event, a response is a 503, and the exit code is 69."""
    with RunningGateway.start(model_folder, tmp_path, drain_s=3.0) as gateway:
        gateway.scheduler.reply = reply_with(_TOKENS, pause_s=0.1)
        requests = [
            _ThreadedRequest(gateway, is_streamed=is_streamed) for is_streamed in (True, False)
        ]
        _wait_submitted(gateway, 2)
        signalled_s = time.monotonic()
        gateway.process.send_signal(signal.SIGTERM)
        for request in requests:
            request.join()
        assert requests[0].events[-1]["error"]["code"] == "unavailable"
        assert requests[1].response[0] == 503
        assert gateway.process.wait(20) == limits.EXIT_UNAVAILABLE
        assert 2.5 < time.monotonic() - signalled_s < 3.0 + 15.0
        assert len(gateway.scheduler.wait_aborts(2)) == 2


def test_slow_reader_gets_whole_response_during_drain(model_folder: Path, tmp_path: Path) -> None:
    """A response whose request has ended is sent completely after SIGTERM."""
    report = ready_status(context_tokens_max=1_000_000)
    with RunningGateway.start(model_folder, tmp_path, drain_s=60.0, report=report) as gateway:
        gateway.scheduler.reply = reply_with(_TOKENS * 5)
        body = raw_client.encode_request({"logprobs": True, "top_logprobs": 5, "max_tokens": 9_000})
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


def test_incomplete_requests_do_not_delay_exit_of_draining_gateway(
    model_folder: Path, tmp_path: Path
) -> None:
    """Idle connections and incomplete requests do not delay the end."""
    settings: dict[str, Any] = {"header_timeout_s": 60.0, "body_timeout_s": 60.0}
    started = RunningGateway.start(model_folder, tmp_path, drain_s=_DRAIN_S, **settings)
    with started as gateway, contextlib.ExitStack() as opened:
        for data in (b"", raw_client.encode_request({})[:30], raw_client.encode_request({})[:-5]):
            client = opened.enter_context(socket.create_connection(("127.0.0.1", gateway.port)))
            client.sendall(data)
        # The gateway reads these bytes before it answers a later request.
        assert gateway.get("/livez")[0] == 200
        gateway.process.send_signal(signal.SIGTERM)
        assert gateway.process.wait(_DRAIN_S / 2) == limits.EXIT_OK


def test_gateway_is_unready_while_scheduler_drains(model_folder: Path, tmp_path: Path) -> None:
    """/readyz is 503 while the scheduler drains, and 200 again afterwards."""
    with RunningGateway.start(model_folder, tmp_path) as gateway:
        gateway.scheduler.status = ready_status(draining=True, ready=False, reason="It stops.")
        wait_until(lambda: gateway.get("/readyz")[0] != 200)
        reason = json.loads(gateway.get("/readyz")[1])["reason"]
        assert reason == "the scheduler is shutting down"
        gateway.scheduler.status = ready_status()
        gateway.wait_ready()


@pytest.mark.proof
def test_request_that_waits_for_scheduler_gets_503_at_second_sigterm(
    model_folder: Path, tmp_path: Path
) -> None:
    """A request that waits for a scheduler gets a 503 at the second SIGTERM; exit code 69."""
    with RunningGateway.start(model_folder, tmp_path, drain_s=_DRAIN_S) as gateway:
        gateway.scheduler.stop()
        wait_until(lambda: gateway.get("/readyz")[0] != 200, poll_s=0.05)
        with socket.create_connection(("127.0.0.1", gateway.port)) as client:
            client.sendall(raw_client.encode_request({}))
            # The gateway reads this request before it answers a later one.
            assert gateway.get("/livez")[0] == 200
            client.settimeout(0.5)
            with pytest.raises(TimeoutError):
                client.recv(1)
            gateway.process.send_signal(signal.SIGTERM)
            gateway.wait_draining()
            gateway.process.send_signal(signal.SIGTERM)
            assert gateway.process.wait(_DRAIN_S / 2) == limits.EXIT_UNAVAILABLE
            client.settimeout(10.0)
            response = b"".join(iter(lambda: client.recv(65_536), b""))
        head, _, body = response.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert json.loads(body)["error"]["message"] == "The server is shutting down."
