"""HTTP server with limits on headers, bodies and slow clients. Owns the deadlines of bodies.

aiohttp's defaults keep an incomplete request open for ever and decompress bodies. Here every phase
of a connection has a deadline, and unknown encodings and expectations are refused.
"""

import asyncio
import resource
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import hdrs, web
from aiohttp.http import HttpVersion11

from services.gateway.http.connection import GuardedHandler
from services.gateway.http.connection_limits import ConnectionLimits
from services.gateway.http.errors import ApiError, closing
from shared.configuration.settings import GatewayConfig
from shared.tenants.fair_share import FairShare

HEADER_BYTES_MAX = 8_190
"""Longest request line and longest header."""
HEADERS_MAX = 128
IDLE_CONNECTION_S = 75.0
"""Lifetime of a connection without a request; longer than the 60 s of load balancers."""
LINGER_S = 1.0
"""Time for which the body is read after an early response, so that the client sees the response."""
RESPONSE_TIMEOUT_S = 30.0
"""Time within which a client must read the end of a response, or it is disconnected."""
DESCRIPTORS_WANTED = 8_192
"""Open files to ask for; each connection is one. macOS allows 256 by default, many Linuxes
1,024."""

_Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class GuardedServer(web.Server):
    """Server that makes a `GuardedHandler` per connection."""

    def __init__(self, *args: Any, limits: ConnectionLimits, **kwargs: Any) -> None:
        """Create a server without connections.

        Args:
            args: aiohttp's own arguments.
            limits: the limits of all connections.
            kwargs: aiohttp's own arguments.
        """
        super().__init__(*args, **kwargs)
        self._limits = limits

    def __call__(self) -> GuardedHandler:
        """Return the protocol of a new connection, which serves it or refuses it."""
        return GuardedHandler(self, self._limits, loop=self._loop, **self._kwargs)


class GuardedRunner(web.AppRunner):
    """Runner that serves an application with a `GuardedServer` and limits the size of headers."""

    __slots__ = ("_config", "_connections")

    def __init__(self, app: web.Application, config: GatewayConfig, connections: FairShare) -> None:
        """Create the runner; it serves nothing before its `setup`.

        Args:
            app: the application.
            config: the limits of requests.
            connections: number of connections and the largest share of them for one client address.
        """
        self._config = config
        self._connections = connections
        super().__init__(
            app,
            access_log=None,
            shutdown_timeout=1.0,
            keepalive_timeout=IDLE_CONNECTION_S,
            lingering_time=LINGER_S,
            max_line_size=HEADER_BYTES_MAX,
            max_field_size=HEADER_BYTES_MAX,
            max_headers=HEADERS_MAX,
            auto_decompress=False,
        )

    @property
    def unsent_bytes(self) -> int:
        """Bytes of responses in this process that the system has not taken over for sending yet."""
        handlers = self.server.connections if self.server is not None else []
        transports = [handler.transport for handler in handlers]
        return sum(
            transport.get_write_buffer_size() for transport in transports if transport is not None
        )

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        return GuardedServer(
            _refusing_expectations(server.request_handler),
            request_factory=server.request_factory,
            # A closed connection cancels its handler, which aborts the request.
            handler_cancellation=True,
            loop=asyncio.get_running_loop(),
            limits=ConnectionLimits(self._config.header_timeout_s, self._connections),
            **server._kwargs,  # noqa: SLF001  # aiohttp offers no other access
        )


def raise_descriptor_limit() -> int:
    """Raise the process's limit of open files up to `DESCRIPTORS_WANTED`, never lower it.

    Returns:
        The resulting limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_WANTED if hard == resource.RLIM_INFINITY else min(DESCRIPTORS_WANTED, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


async def read_json_body(
    request: web.Request, config: GatewayConfig, reserve: Callable[[int], None]
) -> bytes:
    """Read and return a request's body as bytes, which are not parsed.

    Args:
        request: a request whose headers were read.
        config: the limits on size and time.
        reserve: reserves memory for the bytes that have arrived so far, whose number is its
            argument. It may raise ApiError to refuse the body.

    Raises:
        ApiError: 400 when the body ends early or has an unknown transfer encoding, 408 when it is
            too slow, 413 when it is too large, 415 when it is not plain JSON.
    """
    coding = request.headers.get(hdrs.TRANSFER_ENCODING)
    if coding is not None and coding.strip().lower() != "chunked":
        raise closing(400, "Only the transfer encoding chunked is supported.")
    if request.headers.get(hdrs.CONTENT_ENCODING, "identity").strip().lower() != "identity":
        raise closing(415, "Compressed bodies are not supported.", "unsupported_encoding")
    charset = (request.charset or "utf-8").lower()
    if request.content_type != "application/json" or charset not in ("utf-8", "utf8"):
        raise closing(415, "The Content-Type must be application/json.", "unsupported_type")
    if (request.content_length or 0) > config.body_bytes_max:
        raise _too_large(config)
    try:
        async with asyncio.timeout(config.body_timeout_s):
            return await _read(request, config, reserve)
    except TimeoutError:
        problem = f"The body did not arrive within {config.body_timeout_s:g} s."
        raise closing(408, problem) from None
    except web.PayloadAccessError:
        raise closing(400, "The body ended early.") from None


async def _read(
    request: web.Request, config: GatewayConfig, reserve: Callable[[int], None]
) -> bytes:
    body = bytearray()
    while True:
        part = await request.content.readany()
        if not part:
            return bytes(body)
        body += part
        if len(body) > config.body_bytes_max:
            raise _too_large(config)
        reserve(len(body))


async def finish_response(request: web.Request, response: web.StreamResponse) -> None:
    """Send the end of a response; disconnect a client that needs over `RESPONSE_TIMEOUT_S`."""
    try:
        async with asyncio.timeout(RESPONSE_TIMEOUT_S):
            await response.prepare(request)
            await response.write_eof()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()


def _refusing_expectations(handler: _Handler) -> _Handler:
    """Return a handler that answers 417 to an unknown Expect header, else calls another one.

    aiohttp's own 417 is plain text. HTTP/1.0 has no expectations.
    """

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        expected = request.headers.get(hdrs.EXPECT, "").strip().lower()
        if expected in ("", "100-continue") or request.version < HttpVersion11:
            return await handler(request)
        problem = "The only supported value of the header Expect is 100-continue."
        return closing(417, problem, "unsupported_expectation").response()

    return handle


def _too_large(config: GatewayConfig) -> ApiError:
    problem = f"The body is larger than {config.body_bytes_max} bytes."
    return closing(413, problem, "body_too_large")
