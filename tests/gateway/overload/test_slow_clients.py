"""Slow clients: cut off in time and memory without effect on others."""

import contextlib
import json
import re
import resource
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway import tiny_tokenizer
from tests.gateway.running_gateway import RunningGateway
from tests.gateway.scripted_scheduler import finished, generated, ready_status, reply_with

_CHAT = "/v1/chat/completions"
_TOKENIZER = tiny_tokenizer.train()
_TOKENS: list[int] = _TOKENIZER.encode("one two three " * 100).ids
_MESSAGES = [{"role": "user", "content": "Hello"}]
_BUFFER_BYTES = 65_536
_HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
)


def _connect(gateway: RunningGateway) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    client.connect(("127.0.0.1", gateway.port))
    return client


def _post(**fields: Any) -> bytes:
    body = json.dumps({"model": "tiny", "messages": _MESSAGES, **fields}).encode()
    return _HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


def _flood(request: Any) -> Iterator[Any]:
    """Reply to max_tokens 900,000 with a flood of tokens, to others with a few slow tokens."""
    if request.max_tokens != 900_000:
        for position, token in enumerate(_TOKENS[:100]):
            yield generated(request, position, [token])
            yield 0.02
        yield finished(request, 100, "stop")
        return
    for position in range(0, 900_000, 20):
        yield generated(request, position, _TOKENS[:20])
        yield 0.001


@pytest.mark.proof
def test_stream_that_client_does_not_read_ends_at_buffer_limit(
    model_folder: Path, tmp_path: Path
) -> None:
    """F18: three unread streams end at the buffer's bound; a stream beside them is complete."""
    settings: dict[str, Any] = {"stream_buffer_bytes_max": _BUFFER_BYTES}
    report = ready_status(context_tokens_max=1_000_000)
    with RunningGateway.start(model_folder, tmp_path, report=report, **settings) as gateway:
        gateway.scheduler.reply = _flood
        events: list[Any] = []
        reader = threading.Thread(
            target=lambda: events.extend(gateway.stream(_CHAT, {"messages": _MESSAGES}))
        )
        reader.start()
        clients = [_connect(gateway) for _ in range(3)]
        for client in clients:
            client.sendall(_post(stream=True, max_tokens=900_000, logprobs=True, top_logprobs=5))
        aborts = gateway.scheduler.wait_aborts(3, 30.0)
        reader.join(30)
        text = "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1])
        assert (events[-1], text) == ("[DONE]", _TOKENIZER.decode(_TOKENS[:100]))
        flooded = {
            one.request_id for one in gateway.scheduler.submitted if one.max_tokens == 900_000
        }
        assert {abort.request_id for abort in aborts} == flooded
        assert len(flooded) == 3
        assert b"lockstep_slow_clients_closed_total 3.0" in gateway.get("/metrics")[1]
        assert b"lockstep_gateway_open_requests 0.0" in gateway.get("/metrics")[1]
        for client in clients:
            client.close()
        logged = gateway.stop()
    unsent = [
        int(found) for found in re.findall(r"slow_client_closed .*unsent_bytes=(\d+)", logged)
    ]
    assert len(unsent) == 3
    # Tokens of one receive are collected before they are written.
    assert all(_BUFFER_BYTES < size < 40 * _BUFFER_BYTES for size in unsent), unsent


@pytest.fixture(scope="module")
def low_descriptor_gateway(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    """A gateway with 256 descriptors, the default of macOS."""
    settings: dict[str, Any] = {"header_timeout_s": 2.0, "body_timeout_s": 2.0}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    started = contextlib.ExitStack()
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        running = started.enter_context(
            RunningGateway.start(model_folder, tmp_path_factory.mktemp("few"), **settings)
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1_024), hard))
    with started:
        yield running
        assert "socket.accept() out of system resource" not in running.stop()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


_INCOMPLETE = {
    "silence": b"",
    "half a line": b"POST /v1/ch",
    "half the headers": _HEAD,
    "half a body": _HEAD + b'Content-Length: 500\r\n\r\n{"model":',
    "half a chunk": _HEAD + b"Transfer-Encoding: chunked\r\n\r\n50\r\n{",
    "no length": _HEAD + b"Expect: 100-continue\r\nContent-Length: 9\r\n\r\n",
}


@pytest.mark.proof
def test_gateway_serves_others_while_it_closes_60_incomplete_requests(
    low_descriptor_gateway: RunningGateway,
) -> None:
    """B17: 60 connections of each kind are closed, and other requests are served meanwhile."""
    low_descriptor_gateway.scheduler.reset()
    low_descriptor_gateway.scheduler.reply = reply_with(_TOKENS[:5])
    with contextlib.ExitStack() as opened, selectors.DefaultSelector() as selector:
        for data in _INCOMPLETE.values():
            for _ in range(60):
                client = opened.enter_context(_connect(low_descriptor_gateway))
                client.sendall(data)
                client.setblocking(False)
                selector.register(client, selectors.EVENT_READ)
        for _ in range(5):
            assert low_descriptor_gateway.chat()[0] == 200
        responses = _read_until_closed(selector, 20.0)
    assert len(responses) == 60 * len(_INCOMPLETE)
    assert all(response == b"" or b" 408 " in response[:120] for response in responses), responses
    assert low_descriptor_gateway.chat()[0] == 200


def _read_until_closed(selector: selectors.BaseSelector, timeout_s: float) -> list[bytes]:
    """Return the bytes that each connection received before the server closed it."""
    received: dict[int, bytes] = {}
    until_s = time.monotonic() + timeout_s
    while selector.get_map() and time.monotonic() < until_s:
        for key, _ in selector.select(0.5):
            client = key.fileobj
            assert isinstance(client, socket.socket)
            try:
                part = client.recv(65_536)
            except ConnectionError:
                part = b""
            received[key.fd] = received.get(key.fd, b"") + part
            if not part:
                selector.unregister(client)
    assert not selector.get_map(), f"{len(selector.get_map())} connections are still open"
    return list(received.values())


@pytest.mark.parametrize(
    "coding", [b"Content-Length: 5000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"]
)
def test_gateway_closes_connection_after_timeout_when_body_arrives_slowly(
    low_descriptor_gateway: RunningGateway, coding: bytes
) -> None:
    """B17: one byte every tenth of a second does not extend the body's timeout."""
    piece = b" " if b"Length" in coding else b"1\r\n \r\n"
    start_s = time.monotonic()
    with _connect(low_descriptor_gateway) as client:
        client.sendall(_HEAD + coding)
        client.settimeout(0.1)
        response = b""
        while time.monotonic() - start_s < 15.0:
            try:
                client.sendall(piece)
                part = client.recv(65_536)
            except TimeoutError:
                continue
            except ConnectionError:
                break
            response += part
            if not part:
                break
        else:
            raise AssertionError("the connection is still open")
    assert response == b"" or response.startswith(b"HTTP/1.1 408 ")


def test_request_is_refused_when_prompts_times_choices_exceed_limit(
    low_descriptor_gateway: RunningGateway,
) -> None:
    """B23: neither `n` nor many prompts with `n` may exceed the bound on sequences."""
    low_descriptor_gateway.scheduler.reset()
    for prompts, count in ((17, 8), (64, 3), (1, 9), (65, 1)):
        body = {"model": "tiny", "prompt": ["x"] * prompts, "n": count}
        status_code, response, _ = low_descriptor_gateway.post("/v1/completions", body)
        assert (status_code, response["error"]["type"]) == (400, "invalid_request_error")
    assert low_descriptor_gateway.scheduler.submitted == []
