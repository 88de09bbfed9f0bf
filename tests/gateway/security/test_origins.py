"""Host and Origin headers: only own host names and configured origins are served."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.running_gateway import RunningGateway

_CHAT = "/v1/chat/completions"
_OK = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
_PAGE = "https://chat.example"
_CLOSE = "Connection: close\r\n"
"""The server closes the connection after the response, so that `send` returns at once."""


def _get(gateway: RunningGateway, host: str) -> bytes:
    return gateway.send(f"GET /health HTTP/1.1\r\nHost: {host}\r\n{_CLOSE}\r\n".encode())


def _preflight(gateway: RunningGateway, origin: str, headers: str = "authorization") -> bytes:
    return gateway.send(
        f"OPTIONS {_CHAT} HTTP/1.1\r\nHost: localhost\r\n{_CLOSE}Origin: {origin}\r\n"
        "Access-Control-Request-Method: POST\r\n"
        f"Access-Control-Request-Headers: {headers}\r\n\r\n".encode()
    ).lower()


@pytest.fixture(scope="module")
def configured(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    """A gateway with a configured host name and configured origins."""
    run_dir = tmp_path_factory.mktemp("configured")
    settings: dict[str, Any] = {
        "allowed_hosts": ["LLM.example"],
        "allowed_origins": [_PAGE, "app://notes"],
    }
    with RunningGateway.start(model_folder, run_dir, **settings) as running:
        yield running


@pytest.mark.parametrize(
    "host",
    [
        "evil.com",
        "evil.com:8080",
        "localhost.evil.com",
        "127.0.0.1.evil.com",
        "127.0.0.1@evil.com",
        "evil.com/localhost",
        "evil.com#localhost",
        "localhost:x",
        "localhost\r\nHost: evil.com",
        "192.168.1.5",
        "",
        "[::2]",
        "[::1",
    ],
)
def test_gateway_refuses_request_with_foreign_host_header(
    gateway: RunningGateway, configured: RunningGateway, host: str
) -> None:
    """B19: a page that rebinds its name to 127.0.0.1 gets nothing, not even probes."""
    for server in (gateway, configured):
        response = _get(server, host)
        assert response.startswith((b"HTTP/1.1 403 ", b"HTTP/1.1 400 ", b"HTTP/1.0 400 ")), response
        assert b'"status"' not in response


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:99", "LocalHost", "127.0.0.1:1", "127.9.9.9", "[::1]", "[::1]:7"],
)
def test_gateway_serves_request_with_loopback_host_header_and_any_port(
    gateway: RunningGateway, host: str
) -> None:
    """Loopback names are served with any port, as a tunnel may change the port."""
    assert _get(gateway, host).startswith(b"HTTP/1.1 200 ")


def test_gateway_serves_request_with_configured_host_header(
    gateway: RunningGateway, configured: RunningGateway
) -> None:
    """A name in gateway.allowed_hosts is served with any port and in any case."""
    assert _get(configured, "llm.example").startswith(b"HTTP/1.1 200 ")
    assert _get(configured, "LLM.EXAMPLE:443").startswith(b"HTTP/1.1 200 ")
    assert _get(gateway, "llm.example").startswith(b"HTTP/1.1 403 ")


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.com",
        "null",
        "https://localhost.evil.com",
        "http://localhost:3000",
        "https://chat.example.evil.com",
        "http://chat.example",
        "https://chat.example:8443",
        "x",
        "",
    ],
)
def test_gateway_answers_403_to_foreign_origin(
    gateway: RunningGateway, configured: RunningGateway, origin: str
) -> None:
    """B20: a foreign origin gets a 403 without CORS headers; so do other local pages."""
    for server in (gateway, configured):
        server.scheduler.reset()
        status, body, headers = server.post(_CHAT, _OK, {"Origin": origin})
        assert (status, body["error"]["code"]) == (403, "origin_not_allowed")
        assert not [name for name in headers if name.startswith("access-control")]
        assert server.scheduler.submitted == []
        response = _preflight(server, origin)
        assert response.startswith(b"http/1.1 403 ")
        assert b"access-control" not in response
        # A page can send this request, but without the header its browser hides the response.
        response = server.send(
            f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n{_CLOSE}"
            f"Origin: {origin}\r\n\r\n".encode()
        )
        assert response.startswith(b"HTTP/1.1 200 ")
        assert b"access-control" not in response.lower()


def test_response_has_no_cors_headers_when_no_origin_is_configured(gateway: RunningGateway) -> None:
    """Without gateway.allowed_origins no response has a CORS header."""
    for headers in ({}, {"Origin": f"http://127.0.0.1:{gateway.port}"}):
        status, _, response_headers = gateway.post(_CHAT, _OK, headers)
        assert status == 200
        assert not [name for name in response_headers if name.startswith("access-control")]
        assert "vary" not in response_headers


@pytest.mark.parametrize("origin", [_PAGE, "app://notes"])
def test_response_to_configured_origin_has_cors_headers(
    configured: RunningGateway, origin: str
) -> None:
    """A configured origin's preflight succeeds, and its page can read responses and errors."""
    response = _preflight(configured, origin, "authorization, x-stainless-lang")
    assert response.startswith(b"http/1.1 204 ")
    assert f"access-control-allow-origin: {origin}\r\n".encode() in response
    assert b"access-control-allow-headers: authorization, x-stainless-lang\r\n" in response
    assert b"access-control-allow-methods: get, post\r\n" in response
    assert b"access-control-allow-credentials" not in response
    for body, expected in ((_OK, 200), ({**_OK, "n": 0}, 400)):
        status, _, headers = configured.post(_CHAT, body, {"Origin": origin})
        assert (status, headers["access-control-allow-origin"]) == (expected, origin)
        assert headers["vary"] == "Origin"


def test_event_stream_to_configured_origin_has_cors_headers(configured: RunningGateway) -> None:
    """Event streams have the CORS header too."""
    body = b'{"model":"tiny","stream":true,"messages":[{"role":"user","content":"x"}]}'
    head = (
        f"POST {_CHAT} HTTP/1.1\r\nHost: localhost\r\n{_CLOSE}Origin: {_PAGE}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    response = configured.send(head.encode() + body)
    assert f"Access-Control-Allow-Origin: {_PAGE}\r\n".encode() in response
    assert b"data: [DONE]" in response


def test_gateway_answers_405_to_options_request_without_origin(gateway: RunningGateway) -> None:
    """OPTIONS without an Origin header is not a preflight and gets a 405."""
    head = f"OPTIONS {_CHAT} HTTP/1.1\r\nHost: localhost\r\n{_CLOSE}\r\n"
    response = gateway.send(head.encode())
    assert response.startswith(b"HTTP/1.1 405 ")
