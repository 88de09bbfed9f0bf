"""Server limits: unread responses and open files."""

import asyncio
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

from services.gateway.http import server
from services.gateway.http.server import GuardedRunner, raise_descriptor_limit
from shared.configuration.settings import GatewayConfig
from shared.tenants.fair_share import FairShare

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_BODY = b"x" * 32 * 1024 * 1024


@web.middleware
async def _drained(request: web.Request, handler: _Handler) -> web.StreamResponse:
    response = await handler(request)
    await server.finish_response(request, response)
    return response


async def _large(_: web.Request) -> web.Response:
    return web.Response(body=_BODY)


async def _small(_: web.Request) -> web.Response:
    return web.Response(text="small")


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """A server with a large and a small response."""
    app = web.Application(middlewares=[_drained])
    app.router.add_get("/large", _large)
    app.router.add_get("/small", _small)
    runner = GuardedRunner(app, GatewayConfig(), FairShare(100, 1.0))
    await runner.setup()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        await web.SockSite(runner, listener).start()
        yield listener.getsockname()[1]
        await runner.cleanup()


async def _get(port: int, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=4_096)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    return reader, writer


async def test_gateway_closes_connection_that_does_not_read_response_until_timeout(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections that do not read are closed after RESPONSE_TIMEOUT_S; others are served."""
    monkeypatch.setattr(server, "RESPONSE_TIMEOUT_S", 1.0)
    slow = [await _get(port, "/large") for _ in range(5)]
    reader, writer = await _get(port, "/small")
    assert (await reader.read()).endswith(b"small")
    writer.close()
    await asyncio.sleep(2.5)
    for reader, writer in slow:
        received = 0
        try:
            while part := await reader.read(2**20):
                received += len(part)
        except ConnectionError:
            pass
        writer.close()
        assert received < len(_BODY)


async def test_client_that_reads_slowly_gets_whole_response(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that reads within the timeout gets the whole response."""
    monkeypatch.setattr(server, "RESPONSE_TIMEOUT_S", 30.0)
    reader, writer = await _get(port, "/large")
    await asyncio.sleep(0.5)
    assert (await reader.read()).endswith(_BODY)
    writer.close()


def test_gateway_raises_its_descriptor_limit_to_wanted_number() -> None:
    """A low limit is raised; a limit above DESCRIPTORS_WANTED is unchanged."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        raised = raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == raised > 256
        if hard == resource.RLIM_INFINITY or hard >= server.DESCRIPTORS_WANTED + 1:
            resource.setrlimit(resource.RLIMIT_NOFILE, (server.DESCRIPTORS_WANTED + 1, hard))
            assert raise_descriptor_limit() == server.DESCRIPTORS_WANTED + 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
