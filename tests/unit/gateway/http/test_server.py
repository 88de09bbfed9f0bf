"""Bounds of connections that need no whole gateway: answers that nobody reads, open files."""

import asyncio
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

from services.gateway.http import server
from services.gateway.http.server import GuardedRunner, raise_descriptor_limit
from shared.configuration.settings import GatewayConfig

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
    """A server with one large answer and one small."""
    app = web.Application(middlewares=[_drained])
    app.router.add_get("/large", _large)
    app.router.add_get("/small", _small)
    runner = GuardedRunner(app, GatewayConfig(), connections_max=100)
    await runner.setup()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        await web.SockSite(runner, listener).start()
        yield listener.getsockname()[1]
        await runner.cleanup()


async def _get(port: int, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=4_096)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    return reader, writer


async def test_who_does_not_read_a_whole_answer_is_cut_off(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer's end is waited for only so long; others are answered meanwhile."""
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


async def test_who_reads_gets_the_whole_answer(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that reads, however late in the time that it has, loses nothing."""
    monkeypatch.setattr(server, "RESPONSE_TIMEOUT_S", 30.0)
    reader, writer = await _get(port, "/large")
    await asyncio.sleep(0.5)
    assert (await reader.read()).endswith(_BODY)
    writer.close()


def test_the_limit_of_open_files_is_raised_as_far_as_it_goes() -> None:
    """From what macOS gives to what is needed or allowed; a higher one is left alone."""
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
