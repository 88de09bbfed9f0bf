"""HTTP server with limits on headers, bodies and slow clients. Owns a connection's deadlines.

aiohttp's defaults keep an incomplete request open for ever and decompress bodies. Here every phase
of a connection has a deadline, and unknown encodings are refused.
"""

import asyncio
import resource
from collections.abc import Callable
from typing import Any

from aiohttp import hdrs, web
from aiohttp.web_protocol import RequestHandler

from services.gateway.http.connection_limits import ConnectionRefusal
from services.gateway.http.errors import ApiError, closing
from shared.configuration.settings import GatewayConfig

HEADER_BYTES_MAX = 8_190
"""Longest request line and longest header."""
HEADERS_MAX = 128
IDLE_CONNECTION_S = 75.0
"""Lifetime of a connection without a request; longer than the 60 s of load balancers."""
LINGER_S = 1.0
"""Time for which the body is read after an early response, so that the client sees the response."""
CLIENT_CLOSED_STATUS = 499
"""nginx's status for a request whose client closed the connection."""
RESPONSE_TIMEOUT_S = 30.0
"""Time within which a client must read the end of a response, or it is disconnected."""
DESCRIPTORS_WANTED = 8_192
"""Open files to ask for; each connection is one. macOS allows 256 by default, many Linuxes
1,024."""


class GuardedHandler(RequestHandler):
    """One HTTP connection, closed if a request's headers are not complete in time."""

    __slots__ = ("_guarded", "_header_timer")

    def __init__(self, server: "GuardedServer", **kwargs: Any) -> None:
        self._guarded = server
        self._header_timer: asyncio.TimerHandle | None = None
        super().__init__(server, **kwargs)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the timer that closes the connection if no headers are complete in time."""
        super().connection_made(transport)
        self._start_header_timer()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, and start or stop the timer of the headers.

        Complete headers stop it; the first bytes of a further request start it.
        """
        before = self._request_count
        super().data_received(data)
        if self._request_count != before:
            self._stop_header_timer()
        elif not self._request_in_progress and not self._messages:
            self._start_header_timer()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Stop the timer of the headers and count the connection as closed."""
        self._guarded.open_connections -= 1
        self._stop_header_timer()
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the response to a request that is not valid HTTP, with OpenAI's error body.

        Replaces aiohttp's method, which would log a traceback for each such request.

        Args:
            request: the request with its parsed parts.
            status: HTTP status of the error.
            exc: the exception that aiohttp caught, if any.
            message: aiohttp's sentence about the error.
        """
        if isinstance(exc, ConnectionError):
            # The client closed the connection, so this response is not read.
            return web.Response(status=CLIENT_CLOSED_STATUS)
        if status >= 500:
            return super().handle_error(request, status, exc, message)
        cause = " ".join((message or "").split())[:200]
        return closing(status, f"This is not valid HTTP: {cause}.").response()

    def _start_header_timer(self) -> None:
        if self._header_timer is None:
            self._header_timer = self._loop.call_later(
                self._guarded.header_timeout_s, self._close_incomplete, self._request_count
            )

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _close_incomplete(self, count: int) -> None:
        self._header_timer = None
        if self._request_count == count and not self._request_in_progress:
            self.force_close()


class GuardedServer(web.Server):
    """Server that makes a `GuardedHandler` per connection, and refuses those over its limit."""

    def __init__(
        self, *args: Any, header_timeout_s: float, connections_max: int, **kwargs: Any
    ) -> None:
        """Create a server without connections.

        Args:
            args: aiohttp's own arguments.
            header_timeout_s: seconds within which a request's headers must be complete.
            connections_max: connections beyond this number are refused.
            kwargs: aiohttp's own arguments.
        """
        super().__init__(*args, **kwargs)
        self.header_timeout_s = header_timeout_s
        """Seconds within which a request's headers must be complete."""
        self._connections_max = connections_max
        self._refusals: set[ConnectionRefusal] = set()
        self.open_connections = 0
        """Connections that are served; refused ones do not count."""

    def __call__(self) -> asyncio.Protocol:  # type: ignore[override]  # a refusal reads no HTTP
        """Return the protocol of a new connection, which serves it or refuses it."""
        if self.open_connections >= self._connections_max:
            return ConnectionRefusal(self._refusals)
        # Count here: `connection_made` runs one turn of the event loop later.
        self.open_connections += 1
        return GuardedHandler(self, loop=self._loop, **self._kwargs)


class GuardedRunner(web.AppRunner):
    """Runner that serves an application with a `GuardedServer` and limits the size of headers."""

    __slots__ = ("_config", "_connections_max")

    def __init__(self, app: web.Application, config: GatewayConfig, connections_max: int) -> None:
        self._config = config
        self._connections_max = connections_max
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
            server.request_handler,
            request_factory=server.request_factory,
            # A closed connection cancels its handler, which aborts the request.
            handler_cancellation=True,
            loop=asyncio.get_running_loop(),
            header_timeout_s=self._config.header_timeout_s,
            connections_max=self._connections_max,
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
        reserve: reserves memory for the body; called first with its announced length in bytes, then
            with the larger of announced and received length. It may raise ApiError to refuse the
            body.

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
    reserve(request.content_length or 0)
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
    announced_bytes = request.content_length or 0
    while True:
        part = await request.content.readany()
        if not part:
            return bytes(body)
        body += part
        if len(body) > config.body_bytes_max:
            raise _too_large(config)
        reserve(max(len(body), announced_bytes))


async def finish_response(request: web.Request, response: web.StreamResponse) -> None:
    """Send the end of a response; disconnect a client that needs over `RESPONSE_TIMEOUT_S`."""
    try:
        async with asyncio.timeout(RESPONSE_TIMEOUT_S):
            await response.prepare(request)
            await response.write_eof()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()


def _too_large(config: GatewayConfig) -> ApiError:
    problem = f"The body is larger than {config.body_bytes_max} bytes."
    return closing(413, problem, "body_too_large")
