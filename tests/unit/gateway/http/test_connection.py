"""Connections: further requests behind one, departed and half-closed clients, shares, 417."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from services.gateway.http.connection import PIPELINED_BYTES_MAX
from services.gateway.http.server import GuardedRunner
from shared.configuration.settings import GatewayConfig
from shared.tenants.fair_share import FairShare

_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
_NOTICED_S = 1.0


class _Server:
    """A server with a quick response and one that waits until the test releases it."""

    def __init__(self, connections: FairShare) -> None:
        self.connections = connections
        self.released = asyncio.Event()
        self.started = asyncio.Event()
        self.departed = asyncio.Event()
        self.answered: list[str] = []
        self.port = 0
        app = web.Application()
        app.router.add_get("/quick/{name}", self._quick)
        app.router.add_post("/slow", self._slow)
        self.runner = GuardedRunner(app, GatewayConfig(), connections)

    async def _quick(self, request: web.Request) -> web.Response:
        self.answered.append(request.match_info["name"])
        return web.Response(text=f"<{request.match_info['name']}>")

    async def _slow(self, request: web.Request) -> web.Response:
        await request.read()
        self.started.set()
        try:
            await self.released.wait()
        except asyncio.CancelledError:
            self.departed.set()
            raise
        return web.Response(text="<slow>")

    async def connected(self, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect and send bytes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        return reader, writer


async def _serve(connections: FairShare) -> AsyncIterator[_Server]:
    serving = _Server(connections)
    await serving.runner.setup()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        await web.SockSite(serving.runner, listener).start()
        serving.port = listener.getsockname()[1]
        yield serving
        serving.released.set()
        await serving.runner.cleanup()


@pytest.fixture
async def server() -> AsyncIterator[_Server]:
    """A server for many connections."""
    async for serving in _serve(FairShare(100, 1.0)):
        yield serving


@pytest.fixture
async def small_server() -> AsyncIterator[_Server]:
    """A server for four connections, three of them from one address."""
    async for serving in _serve(FairShare(4, 0.75)):
        yield serving


def _slow(body: bytes = b"{}", version: str = "1.1", headers: str = "") -> bytes:
    return (
        f"POST /slow HTTP/{version}\r\nHost: localhost\r\n{headers}"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body


def _quick(name: object, headers: str = "") -> bytes:
    return f"GET /quick/{name} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n".encode()


async def _departure_s(server: _Server) -> float:
    """Return after how many seconds the server notices that the client has gone."""
    start_s = time.monotonic()
    async with asyncio.timeout(10.0):
        await server.departed.wait()
    return time.monotonic() - start_s


_BEHIND = {
    "nothing": b"",
    "40 requests": b"".join(map(_quick, range(40))),
    "a request with a large body": _slow(b"x" * 2**20),
    "junk": b"\x81\x05junk!" * 100_000,
}


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("headers", ["", "Connection: Upgrade\r\nUpgrade: websocket\r\n"])
@pytest.mark.parametrize("behind", _BEHIND.values(), ids=_BEHIND.keys())
async def test_departed_client_is_noticed_within_a_second_whatever_it_has_sent(
    server: _Server, behind: bytes, headers: str, version: str
) -> None:
    """The handler is cancelled, however many bytes stand between its request and the end."""
    _, writer = await server.connected(_slow(version=version, headers=headers) + behind)
    await server.started.wait()
    writer.close()
    assert await _departure_s(server) < _NOTICED_S
    assert server.answered == []


async def test_requests_behind_one_are_answered_in_order_after_it(server: _Server) -> None:
    """Pipelined requests get their responses, whether they came with the first or later."""
    data = _slow() + b"".join(map(_quick, range(50)))
    reader, writer = await server.connected(data)
    await server.started.wait()
    for name in range(50, 100):
        writer.write(_quick(name))
        await asyncio.sleep(0)
    last = _quick("last", "Connection: close\r\n")
    writer.write(last[:30])
    await asyncio.sleep(0.05)
    assert server.answered == []
    server.released.set()
    await asyncio.sleep(0.05)
    writer.write(last[30:])
    received = await reader.read()
    assert received.startswith(b"HTTP/1.1 200 ")
    assert server.answered == [*map(str, range(100)), "last"]
    assert received.count(b"HTTP/1.1 200 OK") == 102
    writer.close()


async def test_request_with_unread_body_does_not_delay_the_one_behind_it(server: _Server) -> None:
    """The rest of a body is skipped, and the request behind its end is answered."""
    head = b"GET /quick/a HTTP/1.1\r\nHost: localhost\r\nContent-Length: 300000\r\n\r\n"
    reader, writer = await server.connected(head)
    assert b"<a>" in await reader.readuntil(b"<a>")
    writer.write(b" " * 300_000 + _quick("b") + _quick("c", "Connection: close\r\n"))
    received = await reader.read()
    assert received.count(b"HTTP/1.1 200 OK") == 2
    writer.close()


async def test_connection_is_closed_after_response_when_too_much_was_sent_behind(
    server: _Server,
) -> None:
    """More bytes than are kept behind a request are dropped; its own response is complete."""
    reader, writer = await server.connected(_slow())
    await server.started.wait()
    writer.write(_quick("x") + b"y" * PIPELINED_BYTES_MAX)
    await asyncio.sleep(0.1)
    server.released.set()
    received = await reader.read()
    assert received.endswith(b"<slow>")
    assert server.answered == []
    writer.close()


@pytest.mark.parametrize("protocol", ["websocket", "h2c"])
async def test_request_for_another_protocol_is_answered_as_if_without_upgrade(
    server: _Server, protocol: str
) -> None:
    """The connection serves further requests, sent after the response."""
    headers = f"Connection: Upgrade\r\nUpgrade: {protocol}\r\n"
    server.released.set()
    reader, writer = await server.connected(_slow(headers=headers))
    await reader.readuntil(b"<slow>")
    for name in ("a", "b"):
        writer.write(_quick(name, headers))
        assert b" 200 OK" in await reader.readuntil(f"<{name}>".encode())
    writer.close()


async def test_request_behind_one_for_another_protocol_is_answered(server: _Server) -> None:
    """What follows a refused upgrade is the next request."""
    server.released.set()
    headers = "Connection: Upgrade\r\nUpgrade: websocket\r\n"
    data = _slow(headers=headers) + _quick("a", headers) + _quick("b", "Connection: close\r\n")
    reader, writer = await server.connected(data)
    assert (await reader.read()).count(b"HTTP/1.1 200 OK") == 3
    assert server.answered == ["a", "b"]
    writer.close()


async def test_half_closed_client_gets_answers_to_all_complete_requests(server: _Server) -> None:
    """A client that ends its sending gets its responses; one without its end is dropped."""
    reader, writer = await server.connected(_slow() + _quick("a") + _quick("b") + b"GET /quick/c")
    writer.write_eof()
    await server.started.wait()
    await asyncio.sleep(0.7)
    server.released.set()
    received = await reader.read()
    assert received.startswith(_INTERIM)
    responses = received.replace(_INTERIM, b"")
    assert responses.count(b"HTTP/1.1 200 OK") == 3
    assert server.answered == ["a", "b"]
    writer.close()


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_half_closed_client_gets_quick_answer_without_interim_response(
    server: _Server, version: str
) -> None:
    """A health probe from a shell, whose sending ends with its input, gets only its response."""
    data = _quick("a").replace(b"HTTP/1.1", f"HTTP/{version}".encode())
    reader, writer = await server.connected(data)
    writer.write_eof()
    received = await reader.read()
    assert received.endswith(b"<a>")
    assert _INTERIM not in received
    writer.close()


async def test_half_closed_client_that_leaves_later_is_noticed_within_a_second(
    server: _Server,
) -> None:
    """Interim responses find out that a client has gone, even if it has read some of them."""
    reader, writer = await server.connected(_slow())
    writer.write_eof()
    await server.started.wait()
    await reader.readuntil(_INTERIM)
    assert not server.departed.is_set()
    writer.close()
    assert await _departure_s(server) < _NOTICED_S


async def test_unfinished_request_of_half_closed_client_is_dropped(server: _Server) -> None:
    """A body that can no longer become complete ends the connection at once."""
    reader, writer = await server.connected(_slow(b"x" * 100)[:-50])
    await asyncio.sleep(0.05)
    writer.write_eof()
    async with asyncio.timeout(_NOTICED_S):
        assert await reader.read() == b""
    writer.close()


async def test_unknown_expectation_gets_417_as_json(server: _Server) -> None:
    """On known and unknown paths; the only known expectation is served, and HTTP/1.0 has none."""
    for path in (b"/quick/a", b"/nothing"):
        reader, writer = await server.connected(
            b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\nExpect: foo\r\n\r\n"
        )
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 417 ")
        assert b"Content-Type: application/json" in head
        assert json.loads(body)["error"]["code"] == "unsupported_expectation"
        writer.close()
    server.released.set()
    data = _slow(headers="Expect: 100-Continue\r\nConnection: close\r\n")
    reader, writer = await server.connected(data)
    received = await reader.read()
    assert received.startswith(_INTERIM)
    assert received.endswith(b"<slow>")
    writer.close()
    reader, writer = await server.connected(_slow(version="1.0", headers="Expect: foo\r\n"))
    assert (await reader.read()).endswith(b"<slow>")
    writer.close()


async def test_address_that_uses_up_its_share_of_connections_is_refused_with_that_cause(
    small_server: _Server,
) -> None:
    """The fourth connection of one address gets a 429; a closed one makes room for it."""
    opened = [await small_server.connected(_quick(name)) for name in range(3)]
    for reader, _ in opened:
        await reader.readuntil(b">")
    reader, writer = await small_server.connected(b"")
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 429 ")
    assert b"Retry-After: 5" in head
    assert "Your address uses up" in json.loads(body)["error"]["message"]
    writer.close()
    opened[0][1].close()
    await asyncio.sleep(0.05)
    reader, writer = await small_server.connected(_quick("later"))
    assert b" 200 OK" in await reader.readuntil(b">")
    for _, one in [*opened, (reader, writer)]:
        one.close()


async def test_connections_of_one_address_leave_room_for_another_address(
    small_server: _Server,
) -> None:
    """The last place is for another address; then the server is full for everybody."""
    for _ in range(3):
        assert small_server.connections.take("address 192.0.2.1", 1)
    assert not small_server.connections.has_room("address 192.0.2.1", 1)
    reader, writer = await small_server.connected(_quick("other"))
    assert b" 200 OK" in await reader.readuntil(b">")
    refused, last = await small_server.connected(b"")
    assert b"Too many connections are open." in await refused.read()
    for one in (writer, last):
        one.close()
