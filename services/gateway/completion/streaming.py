"""Responses as server-sent events or as one body. Owns writing streams and closing slow clients.

Events are written straight to the connection, without a task switch per token. Each stream collects
the events of one receive from the scheduler and writes them at once. Bytes of a client that does
not read collect in its own connection only, up to a limit that closes it.
"""

import asyncio
import contextlib
import functools
from collections.abc import Callable, Iterator

from aiohttp import hdrs, web

from services.gateway.completion.completion_text import LogprobEntry
from services.gateway.completion.generation import Choice, Generation
from services.gateway.completion.serializer import CollectedChoice, Pieces, Serializer
from services.gateway.http import authentication, cache_header, connection_limits, server
from services.gateway.http.connection import PROBE
from services.gateway.metrics.gateway import GatewayMetrics
from services.gateway.output.events import OutputEvent, Text
from services.gateway.tracing.traced_request import TRACED_REQUEST, TracedRequest
from shared.configuration.settings import GatewayConfig
from shared.log import Log

PIECE_BYTES = 64 * 1024
"""Bytes of a body that are written at once."""
READ_BYTES_PER_S_MIN = 128 * 1024
"""A client must read a long body at least this fast, because its bytes are kept until then."""
CONFIRM_WAIT_S = 1.0
"""Time for which token counts wait for the scheduler after a stop string has ended the text."""

_HEADERS = {
    hdrs.CONTENT_TYPE: "text/event-stream; charset=utf-8",
    hdrs.CACHE_CONTROL: "no-cache",
    "X-Accel-Buffering": "no",
}
_log = Log("gateway.streaming")


class FlushList:
    """Event streams with buffered events, which are written to their connections together."""

    def __init__(self) -> None:
        self._streams: dict[EventStream, None] = {}

    def add(self, stream: "EventStream") -> None:
        """Add a stream that has buffered events, unless it is in the list already."""
        self._streams[stream] = None

    def flush(self, now_s: float) -> None:
        """Write the buffered events of every stream in the list and empty the list.

        Args:
            now_s: the event loop's time.
        """
        streams, self._streams = self._streams, {}
        for stream in streams:
            stream.flush(now_s)


class EventStream:
    """One response as server-sent events: buffers events and writes them to the connection.

    It is the sink of its generation. Each call buffers an event for the next `flush`, which writes
    all events of one receive from the scheduler at once. A client that reads too slowly is
    disconnected.
    """

    def __init__(
        self,
        serializer: Serializer,
        config: GatewayConfig,
        flush_list: FlushList,
        metrics: GatewayMetrics,
    ) -> None:
        """Create the stream; nothing is sent before `run`.

        Args:
            serializer: makes the events' bytes.
            config: the limit on bytes that a client leaves unread, and the keep-alive interval.
            flush_list: gets this stream whenever it has collected events.
            metrics: counts connections closed because the client was too slow.
        """
        self._serializer = serializer
        self._flush_list = flush_list
        self._buffer_bytes_max = config.stream_buffer_bytes_max
        self._keepalive_s = config.keepalive_s
        self._metrics = metrics
        self._pending: list[bytes] = []
        self._loop = asyncio.get_running_loop()
        self._is_chunked = True
        self._transport: asyncio.Transport | None = None
        self._written_s = 0.0
        self._written_bytes = 0
        self._read_bytes = 0
        self._read_s = 0.0
        self._key = ""
        self._traced: TracedRequest | None = None

    def add_text(self, choice: Choice, text: str, logprobs: list[LogprobEntry]) -> None:
        """Buffer an event for the next `flush`: text with its log probabilities, if any."""
        self._pending += self._serializer.text(choice.index, text, logprobs)
        self._flush_list.add(self)

    def add_event(self, choice: Choice, event: OutputEvent) -> None:
        """Buffer an event for the next `flush`: reasoning, or a part of a tool call."""
        self._add(self._serializer.event(choice.index, event))

    def end_choice(self, choice: Choice) -> None:
        """Buffer the event for the next `flush` that ends a choice and states its finish reason."""
        self._add(self._serializer.end_choice(choice.index, choice.finish_reason))

    def flush(self, now_s: float) -> None:
        """Write the buffered events to the connection; keep them before the headers were sent.

        Disconnects a client that has left too many bytes unread, or has read nothing for
        `STALL_TIMEOUT_S`.

        Args:
            now_s: the event loop's time.
        """
        transport = self._transport
        if transport is None or not self._pending:
            return
        data = b"".join(self._pending)
        self._pending.clear()
        if not data or transport.is_closing():
            return
        if self._is_chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        self._written_s = now_s
        self._written_bytes += len(data)
        traced = self._traced
        if traced is not None and traced.recorder.is_on:
            began_s = self._loop.time()
            transport.write(data)
            traced.add_write(began_s, len(data))
        else:
            transport.write(data)
        if unsent_bytes := transport.get_write_buffer_size():
            # The transport tries to send a write at once unless earlier bytes are left.
            left_bytes = max(0, unsent_bytes - len(data))
            self._close_if_stalled(transport, unsent_bytes, left_bytes)

    def _close_if_stalled(
        self, transport: asyncio.Transport, unsent_bytes: int, left_bytes: int
    ) -> None:
        """Close the connection of a client that reads too slowly.

        Args:
            transport: the connection.
            unsent_bytes: its unsent bytes.
            left_bytes: those of them that the client had left before the last write. Only they
                count for the limit: an event that repeats a whole answer may be longer.
        """
        read_bytes = self._written_bytes - unsent_bytes
        if read_bytes != self._read_bytes:
            self._read_bytes = read_bytes
            self._read_s = self._written_s
        stalled_s = self._written_s - self._read_s
        if left_bytes > self._buffer_bytes_max or stalled_s > connection_limits.STALL_TIMEOUT_S:
            self._metrics.slow_clients_closed += 1
            _log.warning(
                "slow_client_closed",
                key=self._key,
                unsent_bytes=unsent_bytes,
                stalled_s=round(stalled_s, 1),
                **(self._traced.log_fields if self._traced is not None else {}),
            )
            # A closed connection cancels the handler, which aborts the request.
            transport.abort()

    async def run(self, request: web.Request, generation: Generation) -> web.StreamResponse:
        """Send the headers and all events until the generation has ended; return the response.

        After `gateway.keepalive_s` without an event, one without effect is sent: a ping, a comment,
        or one with empty text, as the dialect has it.

        Args:
            request: the request that is answered.
            generation: the generation whose sink is this stream.

        Raises:
            ApiError: when the generation failed before anything was sent. A later failure becomes
                the stream's last event.
        """
        await _within(generation.started, self._keepalive_s)
        generation.raise_if_failed()
        response = await self._start(request, generation)
        while not generation.ended.is_set():
            silent_s = self._loop.time() - self._written_s
            if silent_s >= self._keepalive_s:
                self._keep_alive(generation)
                silent_s = 0.0
            await _within(generation.ended, self._keepalive_s - silent_s)
        if generation.error is not None:
            self._add(self._serializer.fail(generation.error))
            if generation.traced is not None:
                generation.traced.failure = generation.error.code or "error"
            _log.warning(
                "stream_failed",
                request_id=generation.response_id,
                key=authentication.key_name(request),
                session=generation.session,
                cause=generation.error.message,
                **generation.log_fields,
            )
        else:
            if self._serializer.reports_usage:
                await _within(generation.confirmed, CONFIRM_WAIT_S)
            self._add(self._serializer.end(generation))
        self.flush(self._loop.time())
        return response

    async def _start(self, request: web.Request, generation: Generation) -> web.StreamResponse:
        headers = {**_HEADERS, cache_header.HEADER: generation.cache_header_value()}
        response = web.StreamResponse(headers=headers)
        self._is_chunked = request.version >= (1, 1)
        if self._is_chunked:
            response.enable_chunked_encoding()
        else:
            # Without chunks and length only the end of the connection ends the response.
            response.force_close()
        await response.prepare(request)
        first = self._serializer.begin(generation)
        # Send only the headers: a larger write could wait for the client without a time limit.
        began_s = self._loop.time()
        await response.write(b"")
        self._traced = traced = generation.traced
        if traced is not None:
            traced.status, traced.first_byte_s = response.status, began_s
            if traced.recorder.is_on:
                traced.add_write(began_s, request.writer.output_size)
        # From now on only this object writes to the connection, until the handler returns.
        self._written_s = self._read_s = self._loop.time()
        self._transport = request.transport
        probe: Callable[[], None] = functools.partial(self._keep_alive, generation)
        request[PROBE] = probe
        self._key = authentication.key_name(request)
        self._pending[:0] = first
        # The limit is for generated text, so the echoed prompt does not count.
        self._buffer_bytes_max += sum(map(len, first))
        if not b"".join(self._pending):
            self._keep_alive(generation)
        self.flush(self._loop.time())
        return response

    def _keep_alive(self, generation: Generation) -> None:
        """Write an event without effect for each choice that runs; none after the end."""
        if generation.ended.is_set():
            return
        for choice in generation.choices:
            if not choice.finish_reason:
                self._add(self._serializer.keep_alive(choice.index))
        self.flush(self._loop.time())

    def _add(self, event: bytes) -> None:
        self._pending.append(event)
        self._flush_list.add(self)


class BodyCollector:
    """Sink of a generation whose response is one body: keeps each choice's parts until the end."""

    def __init__(self, serializer: Serializer, choice_count: int, *, has_logprobs: bool) -> None:
        """Begin without text.

        Args:
            serializer: makes the body's bytes.
            choice_count: number of choices in the response.
            has_logprobs: log probabilities were requested.
        """
        self._serializer = serializer
        self._choices = [
            CollectedChoice(
                index,
                [bytearray() for _ in range(serializer.logprob_lists)] if has_logprobs else None,
            )
            for index in range(choice_count)
        ]

    def add_text(self, choice: Choice, text: str, logprobs: list[LogprobEntry]) -> None:
        """Append a piece of text and its tokens' log probabilities to those of the choice."""
        collected = self._choices[choice.index]
        continues_text = bool(collected.events) and isinstance(collected.events[-1], Text)
        collected.events.append(Text(text))
        lists = collected.logprobs
        if lists is None:
            return
        if not continues_text:
            collected.logprob_counts.append(0)
        collected.logprob_counts[-1] += len(logprobs)
        for entry in logprobs:
            for elements, element in zip(lists, entry.json, strict=True):
                elements.extend(b"," + element if elements and element else element)

    def add_event(self, choice: Choice, event: OutputEvent) -> None:
        """Append an event to those of the choice."""
        self._choices[choice.index].events.append(event)

    def end_choice(self, choice: Choice) -> None:
        """Store why the choice ended; `run` makes the body when all choices have ended."""
        self._choices[choice.index].finish_reason = choice.finish_reason

    async def run(self, request: web.Request, generation: Generation) -> web.StreamResponse:
        """Wait until all choices have ended, then for the token counts; return the response.

        The second wait takes at most `CONFIRM_WAIT_S`; it is needed only after a stop string. A
        long body has been written already when this returns.

        Args:
            request: the request that is answered.
            generation: the generation whose sink is this collector.

        Raises:
            ApiError: when the generation failed.
        """
        await generation.ended.wait()
        generation.raise_if_failed()
        await _within(generation.confirmed, CONFIRM_WAIT_S)
        body = self._serializer.body(self._choices, generation)
        headers = {cache_header.HEADER: generation.cache_header_value()}
        length_bytes = sum(map(len, body))
        if length_bytes <= PIECE_BYTES:
            return web.Response(
                body=b"".join(body), content_type="application/json", headers=headers
            )
        response = web.StreamResponse(headers=headers)
        response.content_type = "application/json"
        response.content_length = length_bytes
        await _write(request, response, body, length_bytes)
        return response


async def _write(
    request: web.Request, response: web.StreamResponse, body: Pieces, length_bytes: int
) -> None:
    """Write a long body as fast as the client reads it; disconnect a client that is too slow."""
    traced = request.get(TRACED_REQUEST)
    if traced is not None:
        traced.first_byte_s = asyncio.get_running_loop().time()
    timeout_s = server.RESPONSE_TIMEOUT_S + length_bytes / READ_BYTES_PER_S_MIN
    try:
        async with asyncio.timeout(timeout_s):
            await response.prepare(request)
            for piece in _pieces(body):
                began_s = asyncio.get_running_loop().time()
                async with asyncio.timeout(connection_limits.STALL_TIMEOUT_S):
                    await response.write(piece)
                if traced is not None and traced.recorder.is_on:
                    traced.add_write(began_s, len(piece))
                # A client that reads fast never makes `write` wait, but others have their turn.
                await asyncio.sleep(0)
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()


def _pieces(body: Pieces) -> Iterator[bytes]:
    """Yield the bytes of a body in pieces of up to `PIECE_BYTES`."""
    piece = bytearray()
    for part in body:
        for start in range(0, len(part), PIECE_BYTES):
            piece += part[start : start + PIECE_BYTES]
            if len(piece) >= PIECE_BYTES:
                yield bytes(piece[:PIECE_BYTES])
                del piece[:PIECE_BYTES]
    yield bytes(piece)


async def _within(event: asyncio.Event, timeout_s: float) -> None:
    """Wait for an event up to a timeout."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
