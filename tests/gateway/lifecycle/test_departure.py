"""Clients that leave, half-close or speak HTTP/1.0: their answers, and when they are noticed."""

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway import raw_client, tiny_tokenizer
from tests.gateway.running_gateway import RunningGateway
from tests.gateway.scripted_scheduler import reply_with
from tests.support.waiting import wait_until

_TOKENS: list[int] = tiny_tokenizer.train().encode("one two three " * 10).ids[:10]
_NOTICED_S = 1.0
_MARGIN_S = 1.0
"""Allowance for a busy test machine."""


@pytest.fixture(scope="module")
def patient_gateway(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    """A gateway whose streams without tokens are silent for long, for all tests of the module."""
    run_dir = tmp_path_factory.mktemp("patient")
    with RunningGateway.start(model_folder, run_dir, keepalive_s=60.0) as running:
        yield running


@pytest.fixture
def gateway(patient_gateway: RunningGateway) -> RunningGateway:
    """The module's gateway, with the scheduler's script and records reset."""
    patient_gateway.scheduler.reset()
    return patient_gateway


def _request(*, is_streamed: bool, version: str = "1.1", headers: str = "") -> bytes:
    head = f"POST {raw_client.CHAT} HTTP/{version}\r\nHost: localhost\r\n{headers}"
    body = json.dumps({"model": "tiny", "messages": raw_client.MESSAGES, "stream": is_streamed})
    return (
        f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    ).encode()


def _connect(gateway: RunningGateway, data: bytes) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", gateway.port))
    client.settimeout(10.0)
    client.sendall(data)
    return client


def _wait_submitted(gateway: RunningGateway, count: int = 1) -> None:
    wait_until(lambda: len(gateway.scheduler.submitted) >= count, 10.0)


def _received(client: socket.socket) -> bytes:
    return b"".join(iter(lambda: client.recv(65_536), b""))


def _aborted_after_s(gateway: RunningGateway) -> float:
    start_s = time.monotonic()
    gateway.scheduler.wait_aborts(1, 10.0)
    return time.monotonic() - start_s


_BEHIND = {
    "requests": b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 40,
    "junk": b"\x81\x05junk!" * 10_000,
}


@pytest.mark.parametrize("behind", _BEHIND.values(), ids=_BEHIND.keys())
@pytest.mark.parametrize("is_streamed", [False, True])
def test_generation_is_aborted_within_a_second_after_pipelining_client_leaves(
    gateway: RunningGateway, behind: bytes, is_streamed: bool
) -> None:
    """Generation ends with its client, also while the first token is awaited."""
    headers = "Connection: Upgrade\r\nUpgrade: websocket\r\n"
    for upgrade in ("", headers):
        gateway.scheduler.reset()
        gateway.scheduler.reply = reply_with(_TOKENS, pause_s=20.0)
        with _connect(gateway, _request(is_streamed=is_streamed, headers=upgrade) + behind):
            _wait_submitted(gateway)
        assert _aborted_after_s(gateway) < _NOTICED_S + _MARGIN_S


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_generation_is_aborted_within_a_second_after_half_closed_client_leaves(
    gateway: RunningGateway, version: str, is_streamed: bool
) -> None:
    """A client that ends its sending and then leaves is noticed while no token comes."""
    gateway.scheduler.reply = reply_with(_TOKENS, pause_s=20.0)
    with _connect(gateway, _request(is_streamed=is_streamed, version=version)) as client:
        _wait_submitted(gateway)
        client.shutdown(socket.SHUT_WR)
        time.sleep(0.1)
    assert _aborted_after_s(gateway) < _NOTICED_S + _MARGIN_S


@pytest.mark.parametrize("is_streamed", [False, True])
def test_half_closed_client_gets_its_whole_answer(
    gateway: RunningGateway, is_streamed: bool
) -> None:
    """A client that ends its sending after the request gets the response, however slow."""
    gateway.scheduler.reply = reply_with(_TOKENS, pause_s=0.15)
    with _connect(gateway, _request(is_streamed=is_streamed)) as client:
        client.shutdown(socket.SHUT_WR)
        received = _received(client)
    while received.startswith(b"HTTP/1.1 100 Continue\r\n\r\n"):
        received = received.partition(b"\r\n\r\n")[2]
    assert received.startswith(b"HTTP/1.1 200 ")
    if is_streamed:
        assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    else:
        choice = json.loads(received.partition(b"\r\n\r\n")[2])["choices"][0]
        assert choice["finish_reason"] == "stop"
    assert gateway.scheduler.aborts == []


def test_stream_over_http_1_0_ends_with_the_connection(gateway: RunningGateway) -> None:
    """A stream without chunks and length is ended by closing, although the client asks not to."""
    gateway.scheduler.reply = reply_with(_TOKENS)
    data = _request(is_streamed=True, version="1.0", headers="Connection: keep-alive\r\n")
    start_s = time.monotonic()
    with _connect(gateway, data) as client:
        received = _received(client)
    assert time.monotonic() - start_s < 5.0
    head, _, events = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 200 ")
    assert b"keep-alive" not in head
    assert b"chunked" not in head
    assert events.endswith(b"data: [DONE]\n\n")


def test_whole_answer_over_http_1_0_keeps_connection_that_asks_for_it(
    gateway: RunningGateway,
) -> None:
    """A response with a length leaves the connection open for the next request."""
    gateway.scheduler.reply = reply_with(_TOKENS)
    data = _request(is_streamed=False, version="1.0", headers="Connection: keep-alive\r\n")
    with _connect(gateway, data) as client:
        assert client.recv(65_536).startswith(b"HTTP/1.0 200 ")
        client.sendall(data.replace(b"keep-alive", b"close"))
        assert _received(client).startswith(b"HTTP/1.0 200 ")


@pytest.mark.parametrize("path", ["/health", "/livez", "/readyz"])
def test_health_probe_over_http_1_0_needs_no_host_header(
    gateway: RunningGateway, path: str
) -> None:
    """Load balancers probe like this; other paths still need the header."""
    assert gateway.send(f"GET {path} HTTP/1.0\r\n\r\n".encode()).startswith(b"HTTP/1.0 200 ")
    assert gateway.send(b"GET /v1/models HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.0 403 ")


def test_unknown_expectation_gets_417_in_format_of_the_api(gateway: RunningGateway) -> None:
    """The error has OpenAI's fields, and nothing is generated."""
    headers = "Expect: foo\r\n"
    response = gateway.send(_request(is_streamed=False, headers=headers))
    assert response.startswith(b"HTTP/1.1 417 ")
    error = json.loads(response.partition(b"\r\n\r\n")[2])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert gateway.scheduler.submitted == []


def test_gateway_logs_no_traceback_when_clients_leave(model_folder: Path, tmp_path: Path) -> None:
    """Departures, further requests behind one and half-closed connections are ordinary."""
    with RunningGateway.start(model_folder, tmp_path) as gateway:
        gateway.scheduler.reply = reply_with(_TOKENS, pause_s=20.0)
        for number, behind in enumerate([b"", *_BEHIND.values()], 1):
            for is_streamed in (False, True):
                with _connect(gateway, _request(is_streamed=is_streamed) + behind) as client:
                    _wait_submitted(gateway, 2 * number - 1 + is_streamed)
                    client.shutdown(socket.SHUT_WR)
            gateway.scheduler.wait_aborts(2 * number, 10.0)
        assert "Traceback" not in gateway.stop()
