"""Every request ends once: rejections, failures, disconnects, signals, a new scheduler."""

import http.client
import json
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from shared import limits
from shared.messages import RequestAccepted, RequestFailed, token_ids
from shared.messages.gateway_link import FailureCause
from tests.gateway import tiny_tokenizer
from tests.gateway.running_gateway import RunningGateway
from tests.gateway.scripted_scheduler import (
    ScriptedScheduler,
    finished,
    generated,
    ready_status,
    reject_with,
    reply_after,
    reply_with,
)
from tests.support.waiting import wait_until

_TOKENIZER = tiny_tokenizer.train()
_MESSAGES = [{"role": "user", "content": "Hello"}]
_LONG: list[int] = _TOKENIZER.encode("one two three " * 100).ids


def _post(gateway: RunningGateway, **fields: Any) -> tuple[int, dict[str, Any], dict[str, str]]:
    body = {"model": "tiny", "messages": _MESSAGES, **fields}
    return gateway.post("/v1/chat/completions", body)


def _connect(gateway: RunningGateway, path: str, body: dict[str, Any]) -> socket.socket:
    """Send a request, and return the socket without reading."""
    data = json.dumps({"model": "tiny", **body}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    client = socket.create_connection(("127.0.0.1", gateway.port))
    client.sendall(head.encode() + data)
    return client


def _wait_submitted(scheduler: ScriptedScheduler, count: int) -> None:
    wait_until(lambda: len(scheduler.submitted) >= count, 20.0)
    assert len(scheduler.submitted) == count


def _read(gateway: RunningGateway, result: list[Any]) -> threading.Thread:
    """Stream a chat in a thread; each event is in `result` when it arrives."""

    def read() -> None:
        for event in gateway.iter_events("/v1/chat/completions", {"messages": _MESSAGES}):
            result.append(event)  # noqa: PERF402  # the test reads it before the end

    thread = threading.Thread(target=read)
    thread.start()
    return thread


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("cause", "retry_after_s", "expected", "code", "header"),
    [
        ("queue_full", 7.2, 429, "queue_full", "8"),
        ("queue_full", 900.0, 429, "queue_full", "120"),
        ("queue_full", 0.0, 429, "queue_full", "1"),
        ("too_long", None, 400, "context_length_exceeded", None),
        ("invalid", None, 400, None, None),
        ("draining", 30.0, 503, "unavailable", "30"),
        ("not_ready", None, 503, "unavailable", "5"),
        ("deadline", None, 504, "deadline_exceeded", None),
    ],
)
def test_rejection_by_scheduler_becomes_http_error_with_its_status(
    gateway: RunningGateway,
    cause: str,
    retry_after_s: float | None,
    expected: int,
    code: str | None,
    header: str | None,
    is_streamed: bool,
) -> None:
    """Each cause has its status, for streams too: no byte was sent before."""
    gateway.scheduler.reply = reject_with(cause, "No room.", retry_after_s)
    status_code, body, headers = _post(gateway, stream=is_streamed)
    assert (status_code, body["error"]["code"]) == (expected, code)
    assert body["error"]["message"] == "No room."
    assert headers.get("retry-after") == header


@pytest.mark.parametrize(
    ("cause", "status", "code"),
    [
        ("failed", 500, "request_failed"),
        ("deadline", 504, "deadline_exceeded"),
        ("stopping", 503, "unavailable"),
        ("grammar", 400, "grammar_failed"),
        ("grammar_deadline", 503, "unavailable"),
    ],
)
def test_request_that_fails_before_first_token_gets_http_error(
    gateway: RunningGateway, cause: FailureCause, status: int, code: str
) -> None:
    """Each cause has its status, streamed or not, while no byte was sent."""

    def reply(request: Any) -> Any:
        yield RequestAccepted(request_id=request.request_id, queued_ahead=0)
        yield _failed(request, cause)

    gateway.scheduler.reply = reply
    for is_streamed in (False, True):
        status_code, body, _ = _post(gateway, stream=is_streamed, n=2)
        kind = "invalid_request_error" if status == 400 else "server_error"
        assert (status_code, body["error"]["type"]) == (status, kind)
        assert (body["error"]["code"], body["error"]["message"]) == (code, "The world broke.")


def _failed(request: Any, cause: FailureCause = "failed") -> RequestFailed:
    return RequestFailed(request_id=request.request_id, cause=cause, detail="The world broke.")


@pytest.mark.parametrize("kind", ["failed", "gap", "repeat", "count", "error"])
def test_request_that_fails_in_stream_gets_error_event_without_done(
    gateway: RunningGateway, kind: str
) -> None:
    """The stream ends with an error event without [DONE]; wrong positions and counts fail too."""

    def reply(request: Any) -> Any:
        yield generated(request, 0, _LONG[:2])
        yield 0.1
        if kind == "failed":
            yield _failed(request)
        elif kind == "gap":
            yield generated(request, 3, _LONG[3:4])
        elif kind == "repeat":
            yield generated(request, 1, _LONG[1:2])
        elif kind == "count":
            yield finished(request, 3, "stop")
        else:
            yield finished(request, 2, "error")

    gateway.scheduler.reply = reply
    events = gateway.stream("/v1/chat/completions", {"messages": _MESSAGES})
    last = events[-1]
    assert isinstance(last, dict)
    assert last["error"]["type"] == "server_error"
    assert "[DONE]" not in events
    assert gateway.get("/health")[0] == 200


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("phase", ["queue", "prefill", "tokens"])
def test_gateway_aborts_every_choice_when_client_disconnects(
    gateway: RunningGateway, phase: str, is_streamed: bool
) -> None:
    """A client that leaves in the queue, in prefill or between tokens aborts every choice."""

    def reply(request: Any) -> Any:
        if phase != "queue":
            yield RequestAccepted(request_id=request.request_id, queued_ahead=0)
        if phase == "tokens":
            for position, token in enumerate(_LONG):
                yield generated(request, position, [token])
                yield 0.02
        yield 60.0

    gateway.scheduler.reply = reply
    body = {"messages": _MESSAGES, "n": 2, "stream": is_streamed}
    client = _connect(gateway, "/v1/chat/completions", body)
    _wait_submitted(gateway.scheduler, 2)
    time.sleep(0.2)
    client.close()
    aborts = gateway.scheduler.wait_aborts(2)
    assert sorted(abort.request_id for abort in aborts) == sorted(
        request.request_id for request in gateway.scheduler.submitted
    )
    assert {abort.reason for abort in aborts} == {"abort"}
    assert b"lockstep_gateway_open_requests 0.0" in gateway.get("/metrics")[1]


def test_stream_that_client_does_not_read_is_aborted_at_buffer_limit(
    model_folder: Path, tmp_path: Path
) -> None:
    """The unread stream is aborted, and another stream is served completely."""
    many = _LONG[:200] * 10

    def flood(request: Any) -> Any:
        for position in range(0, 100 * len(many), len(many)):
            yield generated(request, position, many)
            yield 0.001

    report = ready_status(context_tokens_max=1_000_000)
    started = RunningGateway.start(
        model_folder, tmp_path, report=report, stream_buffer_bytes_max=65_536
    )
    with started as gateway:
        gateway.scheduler.reply = flood
        body = {"messages": _MESSAGES, "stream": True, "max_tokens": 900_000}
        body |= {"logprobs": True, "top_logprobs": 5}
        client = _connect(gateway, "/v1/chat/completions", body)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        _wait_submitted(gateway.scheduler, 1)
        aborts = gateway.scheduler.wait_aborts(1, 20.0)
        assert len(aborts) == 1
        gateway.scheduler.reply = reply_with(_LONG[:20], pause_s=0.01)
        assert gateway.stream("/v1/chat/completions", {"messages": _MESSAGES})[-1] == "[DONE]"
        assert b"lockstep_slow_clients_closed_total 1.0" in gateway.get("/metrics")[1]
        client.close()


def test_stream_continues_with_every_token_once_after_scheduler_is_replaced(
    model_folder: Path, tmp_path: Path
) -> None:
    """The scheduler is replaced during a stream: the client gets a pause and every token once."""
    with RunningGateway.start(model_folder, tmp_path) as gateway:
        tokens = _LONG[:40]
        gateway.scheduler.reply = reply_after(tokens, threading.Event())
        result: list[Any] = []
        reader = _read(gateway, result)
        wait_until(lambda: bool(result))
        rejections = [2]

        def reply(request: Any) -> Any:
            if rejections[0]:
                rejections[0] -= 1
                yield from reject_with("not_ready", "Loading.")(request)
            else:
                yield from reply_with(tokens, pause_s=0.01)(request)

        gateway.scheduler.stop()
        gateway.scheduler = ScriptedScheduler(gateway.scheduler.address, reply=reply)
        reader.join(60)
        text = "".join(event["choices"][0]["delta"].get("content", "") for event in result[:-1])
        assert result[-1] == "[DONE]"
        assert text == _TOKENIZER.decode(tokens)
        submitted = gateway.scheduler.submitted
        assert len(submitted) == 3
        received = submitted[0].generated_tokens
        assert 0 < received < 40
        assert submitted[-1].generated == token_ids.pack(tokens[:received])


@pytest.mark.proof
def test_requests_get_503_when_no_scheduler_connects_in_time(
    model_folder: Path, tmp_path: Path
) -> None:
    """After RESTART_WAIT_S_MAX a 503 with Retry-After; /readyz says why, /livez stays 200."""
    prelude = "import services.gateway.completion.open_requests as r; r.RESTART_WAIT_S_MAX = 2.0"
    with RunningGateway.start(model_folder, tmp_path, prelude=prelude) as gateway:
        gateway.scheduler.stop()
        wait_until(lambda: gateway.get("/readyz")[0] != 200)
        status_code, body = gateway.get("/readyz")
        assert status_code == 503
        assert json.loads(body)["reason"] == "the scheduler does not report"
        assert gateway.get("/livez")[0] == 200
        status_code, response, headers = _post(gateway)
        assert (status_code, headers["retry-after"]) == (503, "5")
        assert response["error"]["code"] == "unavailable"
        gateway.scheduler = ScriptedScheduler(
            gateway.scheduler.address, reply=reply_with(_LONG[:3])
        )
        gateway.wait_ready()
        assert _post(gateway)[0] == 200


def test_gateway_lets_running_streams_finish_after_sigterm(
    model_folder: Path, tmp_path: Path
) -> None:
    """After SIGTERM new requests get a 503, running streams finish, and the exit code is 0."""
    release = threading.Event()
    with RunningGateway.start(model_folder, tmp_path, drain_s=20.0) as gateway:
        gateway.scheduler.reply = reply_after(_LONG[:30], release)
        result: list[Any] = []
        reader = _read(gateway, result)
        _wait_submitted(gateway.scheduler, 1)
        gateway.process.send_signal(signal.SIGTERM)
        gateway.wait_draining()
        status_code, _, headers = _post(gateway)
        assert (status_code, headers["retry-after"]) == (503, "10")
        assert gateway.get("/readyz")[0] == 503
        release.set()
        reader.join(10)
        assert result[-1] == "[DONE]"
        assert gateway.process.wait(10) == 0


def test_running_streams_end_with_error_event_at_second_sigterm(
    model_folder: Path, tmp_path: Path
) -> None:
    """Running streams get an error event, and the exit code is EXIT_UNAVAILABLE."""
    with RunningGateway.start(model_folder, tmp_path, drain_s=20.0) as gateway:
        gateway.scheduler.reply = reply_after(_LONG, threading.Event())
        result: list[Any] = []
        reader = _read(gateway, result)
        wait_until(lambda: bool(result))
        gateway.process.send_signal(signal.SIGINT)
        gateway.wait_draining()
        gateway.process.send_signal(signal.SIGINT)
        assert gateway.process.wait(10) == limits.EXIT_UNAVAILABLE
        reader.join(10)
        assert result[-1]["error"]["code"] == "unavailable"
        assert len(gateway.scheduler.wait_aborts(1)) == 1


def test_request_gets_429_when_its_choices_exceed_open_requests_max(
    model_folder: Path, tmp_path: Path
) -> None:
    """The gateway's own bound counts choices, not requests."""
    with RunningGateway.start(
        model_folder, tmp_path, open_requests_max=2, tenant_share=1.0
    ) as gateway:
        gateway.scheduler.reply = reply_with(_LONG, pause_s=0.05)
        client = _connect(gateway, "/v1/chat/completions", {"messages": _MESSAGES, "n": 2})
        _wait_submitted(gateway.scheduler, 2)
        status_code, _, headers = _post(gateway)
        assert (status_code, headers["retry-after"]) == (429, "2")
        client.close()
        gateway.scheduler.wait_aborts(2)
        gateway.scheduler.reply = reply_with(_LONG[:2])
        assert _post(gateway)[0] == 200


def test_http_1_0_client_gets_unchunked_stream(gateway: RunningGateway) -> None:
    """The stream of an HTTP/1.0 client is not chunked and ends with the connection."""
    gateway.scheduler.reply = reply_with(_LONG[:5])
    data = json.dumps({"model": "tiny", "messages": _MESSAGES, "stream": True}).encode()
    client = socket.create_connection(("127.0.0.1", gateway.port))
    client.sendall(
        b"POST /v1/chat/completions HTTP/1.0\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data)
    )
    response = http.client.HTTPResponse(client)
    response.begin()
    body = response.read()
    client.close()
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")
