"""Server-sent events written straight to the connection, without a task switch per token.

Between two receives from the bus every stream collects its events; then each is written once. A
client that does not read lets bytes pile up in its own connection only, and is cut off when they
pass a bound.
"""

import asyncio
import contextlib

import orjson
from aiohttp import hdrs, web

from services.gateway.completion.completion_text import LogprobEntry
from services.gateway.completion.generation import Choice, Generation
from services.gateway.completion.response_format import ResponseFormat
from services.gateway.http import authentication, cache_header, connection_limits
from services.gateway.metrics.gateway import GatewayMetrics
from services.gateway.tokenizing.tool_calls import ParsedCall
from shared.log import Log

DONE = b"data: [DONE]\n\n"
ACCOUNT_WAIT_S = 1.0
"""After a stop string the text ends at once; token counts wait so long for the scheduler."""

_HEADERS = {
    hdrs.CONTENT_TYPE: "text/event-stream; charset=utf-8",
    hdrs.CACHE_CONTROL: "no-cache",
    "X-Accel-Buffering": "no",
}
_log = Log("gateway.streaming")


class FlushList:
    """The streams that have something to write."""

    def __init__(self) -> None:
        self._streams: list[EventStream] = []

    def add(self, stream: "EventStream") -> None:
        """Remember a stream; it must not be in the list already."""
        self._streams.append(stream)

    def flush(self) -> None:
        """Write what every stream in the list has collected."""
        streams, self._streams = self._streams, []
        for stream in streams:
            stream.flush()


class EventStream:
    """One streamed response, the outlet of its generation."""

    def __init__(
        self,
        shape: ResponseFormat,
        flush_list: FlushList,
        buffer_bytes_max: int,
        metrics: GatewayMetrics,
        choice_count: int,
    ) -> None:
        self._shape = shape
        self._flush_list = flush_list
        self._buffer_bytes_max = buffer_bytes_max
        self._metrics = metrics
        self._count = choice_count
        self._frames = [shape.text_frame(index) for index in range(choice_count)]
        self._pending: list[bytes] = []
        self._loop = asyncio.get_running_loop()
        self._is_listed = False
        self._is_chunked = True
        self._transport: asyncio.Transport | None = None
        self._written_s = 0.0
        self._written_bytes = 0
        self._taken_bytes = 0
        self._taken_s = 0.0
        self._key = ""

    def add_text(self, choice: Choice, text: str, logprobs: list[LogprobEntry]) -> None:
        """Collect one event with text."""
        if logprobs:
            self._add(self._shape.logprobs_event(choice.index, text, logprobs))
            return
        before, after = self._frames[choice.index]
        self._pending += (before, orjson.dumps(text), after)
        if not self._is_listed:
            self._is_listed = True
            self._flush_list.add(self)

    def add_call(self, choice: Choice, number: int, call: ParsedCall) -> None:
        """Collect one event with a tool call."""
        self._add(self._shape.call_event(choice.index, number, call))

    def end_choice(self, choice: Choice) -> None:
        """Collect the event that ends a choice."""
        self._add(self._shape.finish_event(choice.index, choice.finish_reason))

    def flush(self) -> None:
        """Write what was collected, as one chunk."""
        self._is_listed = False
        transport = self._transport
        if transport is None or not self._pending:
            return
        data = b"".join(self._pending)
        self._pending.clear()
        if not data or transport.is_closing():
            return
        self._written_s = self._loop.time()
        if self._is_chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        self._written_bytes += len(data)
        transport.write(data)
        unsent_bytes = transport.get_write_buffer_size()
        if unsent_bytes:
            self._check_reader(transport, unsent_bytes)

    def _check_reader(self, transport: asyncio.Transport, unsent_bytes: int) -> None:
        """Cut a client off that reads too slowly, or not at all."""
        taken_bytes = self._written_bytes - unsent_bytes
        if taken_bytes != self._taken_bytes:
            self._taken_bytes = taken_bytes
            self._taken_s = self._written_s
        stalled_s = self._written_s - self._taken_s
        if unsent_bytes > self._buffer_bytes_max or stalled_s > connection_limits.STALLED_S:
            self._metrics.slow_clients_closed += 1
            _log.warning(
                "slow_client_closed",
                key=self._key,
                unsent_bytes=unsent_bytes,
                stalled_s=round(stalled_s, 1),
            )
            # The connection's end cancels the handler, which aborts the request.
            transport.abort()

    async def run(
        self, request: web.Request, generation: Generation, keepalive_s: float, *, has_usage: bool
    ) -> web.StreamResponse:
        """Send events until the generation ends.

        Raises:
            ApiError: it failed before anything was sent.
        """
        await _within(generation.begun, keepalive_s)
        generation.check_failed()
        response = await self._start(request, generation)
        while not generation.ended.is_set():
            silent_s = self._loop.time() - self._written_s
            if silent_s >= keepalive_s:
                self._keep_alive(generation)
                silent_s = 0.0
            await _within(generation.ended, keepalive_s - silent_s)
        if generation.error is not None:
            self._add(b"data: %b\n\n" % generation.error.body())
            _log.warning(
                "stream_failed",
                name=generation.name,
                key=authentication.key_name(request),
                cause=generation.error.message,
            )
        else:
            if has_usage:
                await _within(generation.accounted, ACCOUNT_WAIT_S)
                self._add(self._shape.usage_event(generation.usage()))
            self._add(DONE)
        self.flush()
        return response

    async def _start(self, request: web.Request, generation: Generation) -> web.StreamResponse:
        headers = {**_HEADERS, cache_header.HEADER: generation.cache_line()}
        response = web.StreamResponse(headers=headers)
        self._is_chunked = request.version >= (1, 1)
        if self._is_chunked:
            response.enable_chunked_encoding()
        await response.prepare(request)
        first = [self._shape.first_event(index) for index in range(self._count)]
        # Only the headers: a larger write might wait for the client, unbounded by our own rule.
        await response.write(b"")
        # From here on nothing but this object writes to the connection, until the handler returns.
        self._written_s = self._taken_s = self._loop.time()
        self._transport = request.transport
        self._key = authentication.key_name(request)
        self._pending[:0] = first
        # An echoed prompt may be long, and is the client's own doing.
        self._buffer_bytes_max += sum(map(len, first))
        if not b"".join(self._pending):
            self._keep_alive(generation)
        self.flush()
        return response

    def _keep_alive(self, generation: Generation) -> None:
        for choice in generation.choices:
            if not choice.finish_reason:
                self._add(self._shape.keepalive_event(choice.index))
        self.flush()

    def _add(self, event: bytes) -> None:
        self._pending.append(event)
        if not self._is_listed:
            self._is_listed = True
            self._flush_list.add(self)


class BodyCollector:
    """The outlet of a generation that is sent as one body."""

    def __init__(self, choice_count: int) -> None:
        self.texts: list[list[str]] = [[] for _ in range(choice_count)]
        self.logprobs: list[list[LogprobEntry]] = [[] for _ in range(choice_count)]
        self.calls: list[list[ParsedCall]] = [[] for _ in range(choice_count)]

    def add_text(self, choice: Choice, text: str, logprobs: list[LogprobEntry]) -> None:
        """Keep a piece of text."""
        self.texts[choice.index].append(text)
        self.logprobs[choice.index] += logprobs

    def add_call(self, choice: Choice, _number: int, call: ParsedCall) -> None:
        """Keep a tool call."""
        self.calls[choice.index].append(call)

    def end_choice(self, choice: Choice) -> None:
        """Nothing to do: the body is made when all have ended."""

    async def wait(self, generation: Generation) -> None:
        """Wait until the generation has ended.

        Raises:
            ApiError: it failed.
        """
        await generation.ended.wait()
        generation.check_failed()
        await _within(generation.accounted, ACCOUNT_WAIT_S)


async def _within(event: asyncio.Event, timeout_s: float) -> None:
    """Wait for an event, but no longer than so."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
