"""Bounds on what a stranger's HTTP may cost: headers, bodies, slow readers.

aiohttp's own defaults leave half a request open for ever and decompress what they are sent; here
every phase of a connection has a deadline, and what is not understood is refused.
"""

import asyncio
import resource
from collections.abc import Callable
from typing import Any

from aiohttp import hdrs, web
from aiohttp.web_protocol import RequestHandler

from services.gateway.http.connection_limits import ConnectionRefusals
from services.gateway.http.errors import ApiError, invalid
from shared.configuration.settings import GatewayConfig

HEADER_BYTES_MAX = 8_190
"""Longest request line and longest header."""
HEADERS_MAX = 128
IDLE_CONNECTION_S = 75.0
"""A connection without a request is closed after so long; longer than load balancers' 60 s."""
LINGER_S = 1.0
"""After an early answer the body is read for so long, so that the client sees the answer."""
CLIENT_LEFT = 499
"""nginx's status for a request whose client did not wait."""
RESPONSE_DRAIN_S = 30.0
"""A client that does not read the end of its answer is cut off after so long."""
DESCRIPTORS = 8_192
"""Open files that are asked for: each connection is one. macOS gives 256, many Linuxes 1,024."""


class GuardedHandler(RequestHandler):
    """One connection; closed when a request's headers do not end in time."""

    __slots__ = ("_guarded", "_header_timeout_s", "_header_timer")

    def __init__(self, server: "GuardedServer", *, header_timeout_s: float, **kwargs: Any) -> None:
        self._guarded = server
        self._header_timeout_s = header_timeout_s
        self._header_timer: asyncio.TimerHandle | None = None
        super().__init__(server, **kwargs)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._arm()

    def data_received(self, data: bytes) -> None:
        """Parse; a request whose headers are complete stops the clock, part of one starts it."""
        before = self._request_count
        super().data_received(data)
        if self._request_count != before:
            self._disarm()
        elif not self._request_in_progress and not self._messages:
            self._arm()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget the clock."""
        self._guarded.open_connections -= 1
        self._disarm()
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what is no HTTP in our shape; aiohttp would log a traceback for each."""
        if isinstance(exc, ConnectionError):
            # The client left while it was answered: nobody reads this.
            return web.Response(status=CLIENT_LEFT)
        if status >= 500:
            return super().handle_error(request, status, exc, message)
        cause = " ".join((message or "").split())[:200]
        return ApiError(status, f"This is not valid HTTP: {cause}.", close=True).response()

    def _arm(self) -> None:
        if self._header_timer is None:
            self._header_timer = self._loop.call_later(
                self._header_timeout_s, self._give_up, self._request_count
            )

    def _disarm(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _give_up(self, count: int) -> None:
        self._header_timer = None
        if self._request_count == count and not self._request_in_progress:
            self.force_close()


class GuardedServer(web.Server):
    """Makes guarded connections, up to a bound."""

    def __init__(
        self, *args: Any, header_timeout_s: float, connections_max: int, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._header_timeout_s = header_timeout_s
        self._connections_max = connections_max
        self._refusals = ConnectionRefusals()
        self.open_connections = 0

    def __call__(self) -> asyncio.Protocol:  # type: ignore[override]  # a refusal reads no HTTP
        """Return the protocol of a new connection."""
        if self.open_connections >= self._connections_max:
            return self._refusals()
        # Counted here and not when it is made: that is a turn of the event loop later.
        self.open_connections += 1
        return GuardedHandler(
            self, loop=self._loop, header_timeout_s=self._header_timeout_s, **self._kwargs
        )


class GuardedRunner(web.AppRunner):
    """Runs an application behind guarded connections."""

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
        """Bytes of answers that wait for their clients to read."""
        handlers = self.server.connections if self.server is not None else []
        transports = [handler.transport for handler in handlers]
        return sum(one.get_write_buffer_size() for one in transports if one is not None)

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        return GuardedServer(
            server.request_handler,
            request_factory=server.request_factory,
            # A client that goes away cancels its handler, which aborts the request.
            handler_cancellation=True,
            loop=asyncio.get_running_loop(),
            header_timeout_s=self._config.header_timeout_s,
            connections_max=self._connections_max,
            **server._kwargs,  # noqa: SLF001  # aiohttp has no other way to pass them on
        )


def raise_descriptor_limit() -> int:
    """Allow this process as many connections as the system lets it have; return how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


async def read_json_body(
    request: web.Request, config: GatewayConfig, hold: Callable[[int], None]
) -> bytes:
    """Return a request's body within its bounds.

    Args:
        request: whose headers are here.
        config: the bounds.
        hold: is told how long the body is or will be; raises ApiError to refuse that.

    Raises:
        ApiError: 400, 408, 413 or 415.
    """
    coding = request.headers.get(hdrs.TRANSFER_ENCODING)
    if coding is not None and coding.strip().lower() != "chunked":
        error = invalid("Only the transfer encoding chunked is understood.")
        error.close = True
        raise error
    if request.headers.get(hdrs.CONTENT_ENCODING, "identity").strip().lower() != "identity":
        raise ApiError(
            415, "Compressed bodies are refused.", code="unsupported_encoding", close=True
        )
    charset = (request.charset or "utf-8").lower()
    if request.content_type != "application/json" or charset not in ("utf-8", "utf8"):
        raise ApiError(
            415, "The Content-Type must be application/json.", code="unsupported_type", close=True
        )
    if (request.content_length or 0) > config.body_bytes_max:
        raise _too_large(config)
    hold(request.content_length or 0)
    try:
        async with asyncio.timeout(config.body_timeout_s):
            return await _read(request, config, hold)
    except TimeoutError:
        raise ApiError(
            408, f"The body did not arrive within {config.body_timeout_s:g} s.", close=True
        ) from None
    except web.PayloadAccessError:
        raise ApiError(400, "The body ended early.", close=True) from None


async def _read(request: web.Request, config: GatewayConfig, hold: Callable[[int], None]) -> bytes:
    body = bytearray()
    held = request.content_length or 0
    while True:
        part = await request.content.readany()
        if not part:
            return bytes(body)
        body += part
        if len(body) > config.body_bytes_max:
            raise _too_large(config)
        if len(body) > held:
            held = len(body)
            hold(held)


async def drain(request: web.Request, response: web.StreamResponse) -> None:
    """Send the end of a response; a client that does not read it is cut off."""
    try:
        async with asyncio.timeout(RESPONSE_DRAIN_S):
            await response.prepare(request)
            await response.write_eof()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()


def _too_large(config: GatewayConfig) -> ApiError:
    return ApiError(
        413,
        f"The body is larger than {config.body_bytes_max} bytes.",
        code="body_too_large",
        close=True,
    )
