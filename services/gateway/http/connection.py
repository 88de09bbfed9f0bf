"""One HTTP connection. Owns the deadline of headers, and noticing that a client has gone.

aiohttp stops reading a connection while requests or bodies wait on it, and then does not see that
its client has gone. Here every connection is read at all times: what a client sends behind a
request whose response is not finished is kept unparsed, up to a limit.

The end of what a client sends looks the same whether the client has gone or still reads. Only
bytes that the server writes tell: if the client has gone, its system answers them with a reset.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.http import HttpRequestParser, HttpVersion11
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.web_protocol import RequestHandler, RequestPayloadError

from services.gateway.http import authentication
from services.gateway.http.connection_limits import ConnectionLimits, ConnectionRefusal
from services.gateway.http.errors import closing

CLIENT_CLOSED_STATUS = 499
"""nginx's status for a request whose client closed the connection."""
PIPELINED_BYTES_MAX = 64 * 1024
"""Bytes kept behind a request whose response is not finished. If a client sends more, all of them
are dropped and the connection is closed after the response."""
PROBE_INTERVAL_S = 0.3
"""Interval of the bytes written to a client that sends no more. The first ones after its departure
are answered with a reset, and writing the second ones fails, so it is noticed within twice this
time."""
UNPROBED_S = 2 * PROBE_INTERVAL_S
"""Time after which an HTTP/1.0 client that sends no more counts as gone, unless its response has
begun. HTTP/1.0 has no interim responses, so it cannot be probed. Quick responses, such as those of
health probes, are sent before."""
PROBE: web.RequestKey[Callable[[], None]] = web.RequestKey("probe")
"""Writes bytes of a response that has begun which mean nothing to the client."""

_INTERIM_RESPONSE = b"HTTP/1.1 100 Continue\r\n\r\n"


class GuardedHandler(RequestHandler):
    """One HTTP connection, closed if headers are not complete in time or its client has gone."""

    __slots__ = (
        "_answered",
        "_half_closed_s",
        "_header_timer",
        "_limits",
        "_payload",
        "_pipelined",
        "_probe_timer",
        "_tenant",
    )

    def __init__(self, server: web.Server, limits: ConnectionLimits, **kwargs: Any) -> None:
        """Create the protocol of a connection that is not made yet.

        Args:
            server: the server whose handler answers the requests.
            limits: the limits of all connections.
            kwargs: aiohttp's own arguments.
        """
        self._limits = limits
        self._tenant: str | None = None
        """Whom the connection counts for; None before it is counted."""
        self._header_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._half_closed_s: float | None = None
        """Time at which the client ended its sending; None before."""
        self._pipelined = bytearray()
        """Bytes behind a request whose response is not finished."""
        self._answered = 0
        """Requests whose responses are finished."""
        super().__init__(server, **kwargs)
        self._payload = EMPTY_PAYLOAD
        """Body of the latest request."""
        # As aiohttp's parser, but it stops behind each request.
        self._parser = HttpRequestParser(
            self,
            self._loop,
            self._read_bufsize,
            max_line_size=self.max_line_size,
            max_field_size=self.max_field_size,
            max_headers=self.max_headers,
            payload_exception=RequestPayloadError,
            auto_decompress=False,
            max_msg_queue_size=1,
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection and start the timer of its headers; refuse one over the limits."""
        tenant = authentication.address_tenant(_peer_address(transport))
        connections = self._limits.by_address
        if not connections.take(tenant, 1):
            assert isinstance(transport, asyncio.Transport)
            is_full = connections.used >= connections.total
            refusal = ConnectionRefusal(self._limits.refusals, is_full=is_full)
            transport.set_protocol(refusal)
            refusal.connection_made(transport)
            return
        self._tenant = tenant
        super().connection_made(transport)
        self._start_header_timer()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, or keep them until the response to a complete request is finished.

        Complete headers stop the timer of the headers; the first bytes of a further request start
        it.
        """
        if self._is_answering:
            self._keep(data)
            return
        before = self._request_count
        self._parse(data)
        if self._request_count != before:
            self._stop_header_timer()
        elif self._is_idle:
            self._start_header_timer()

    def eof_received(self) -> bool:  # type: ignore[override]  # aiohttp never keeps it open
        """Return whether to keep the connection open, for the responses to complete requests.

        While it is open, the client is probed, because it may have gone.
        """
        if not self._is_answering:
            return False
        self._half_closed_s = self._loop.time()
        self._probe_timer = self._loop.call_later(PROBE_INTERVAL_S, self._probe)
        return True

    def connection_lost(self, exc: BaseException | None) -> None:
        """Stop the timers and count the connection as closed."""
        if self._tenant is not None:
            self._limits.by_address.release(self._tenant, 1)
            self._tenant = None
        self._stop_header_timer()
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        super().connection_lost(exc)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send the end of a response, then parse the bytes received behind its request.

        Returns:
            The response, and whether the connection was lost meanwhile.
        """
        finished, is_lost = await super().finish_response(request, resp, start_time)
        self._answered += 1
        if not is_lost and finished.keep_alive:
            self._parse_pipelined()
        return finished, is_lost

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

    @property
    def _is_answering(self) -> bool:
        """A request was received completely, and its response is not finished."""
        return self._answered < self._request_count and self._payload.is_eof()

    @property
    def _is_idle(self) -> bool:
        """All requests were received completely, and their responses are finished."""
        return self._answered == self._request_count and self._payload.is_eof()

    def _keep(self, data: bytes) -> None:
        if len(self._pipelined) + len(data) > PIPELINED_BYTES_MAX:
            self._pipelined.clear()
            # It drops all further bytes, and closes after the response.
            self.close()
        elif not self._close:
            self._pipelined += data

    def _parse(self, data: bytes) -> None:
        """Parse bytes up to the end of a request, behind which the parser keeps the others."""
        is_progressing = True
        while is_progressing and not self._is_answering:
            before = self._request_count, self._payload.is_eof()
            super().data_received(data)
            data = b""
            if self._request_count != before[0]:
                self._payload = self._messages[-1][1]
            is_progressing = before != (self._request_count, self._payload.is_eof())
            if self._upgraded and self._parser is not None:
                # This server speaks no other protocol, so what follows is the next request.
                self._parser.set_upgraded(False)
                self._upgraded = False
                data, self._message_tail = self._message_tail, b""
                is_progressing = True
        self._pipelined[:0] = data

    def _parse_pipelined(self) -> None:
        """Parse the bytes behind the request whose response was finished, up to the next's end."""
        self._parse(b"")
        if self._pipelined and not self._is_answering:
            data = bytes(self._pipelined)
            self._pipelined.clear()
            self._parse(data)
            if self._is_idle:
                self._start_header_timer()
        if self._half_closed_s is not None and not self._is_answering:
            # The client sends no more, so no further request becomes complete.
            self.close()

    def _probe(self) -> None:
        """Write bytes that mean nothing to the client, and draw a reset if it has gone.

        Writing after the reset fails, which ends the connection and aborts its request.
        """
        self._probe_timer = self._loop.call_later(PROBE_INTERVAL_S, self._probe)
        request = self._current_request
        if request is None or self.transport is None or self._half_closed_s is None:
            return
        write_probe = request.get(PROBE)
        if write_probe is not None:
            write_probe()
        elif request.writer.output_size:
            # The response is being written, which shows whether the client has gone.
            return
        elif request.version >= HttpVersion11:
            self.transport.write(_INTERIM_RESPONSE)
        elif self._loop.time() - self._half_closed_s >= UNPROBED_S:
            self.force_close()

    def _start_header_timer(self) -> None:
        if self._header_timer is None:
            self._header_timer = self._loop.call_later(
                self._limits.header_timeout_s, self._close_incomplete, self._request_count
            )

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _close_incomplete(self, count: int) -> None:
        self._header_timer = None
        if self._request_count == count and not self._request_in_progress:
            self.force_close()


def _peer_address(transport: asyncio.BaseTransport) -> str:
    """Return the client's IP address, "" if it has none, as over a socket in a folder."""
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if isinstance(peer, tuple) and peer else ""
