"""Streams to clients that read slowly, over a real socket."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from services.gateway.completion.streaming import EventStream, FlushList
from services.gateway.links.scheduler_status import StatusBoard
from services.gateway.metrics.gateway import GatewayMetrics
from shared.clock import ManualClock
from shared.configuration.settings import GatewayConfig

LIMIT_BYTES = 64 * 1024


@pytest.fixture
async def transport() -> AsyncIterator[asyncio.Transport]:
    """A connection whose other end reads nothing."""
    near, far = socket.socketpair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)
    loop = asyncio.get_running_loop()
    opened, _ = await loop.create_connection(asyncio.Protocol, sock=near)
    yield opened
    opened.abort()
    far.close()


def stream_on(transport: asyncio.Transport) -> EventStream:
    """Return a stream that writes to a connection."""
    stream = EventStream(
        None,  # type: ignore[arg-type]
        GatewayConfig(stream_buffer_bytes_max=LIMIT_BYTES),
        FlushList(),
        GatewayMetrics(StatusBoard(ManualClock(0.0))),
    )
    stream._transport = transport
    return stream


async def test_event_longer_than_the_limit_is_sent_to_a_client_that_has_read_so_far(
    transport: asyncio.Transport,
) -> None:
    """The last events of a response repeat its answer, which may be longer than the limit."""
    stream = stream_on(transport)
    stream._add(b"x" * 8 * LIMIT_BYTES)
    stream.flush(0.0)
    assert not transport.is_closing()


async def test_client_that_left_more_than_the_limit_is_disconnected_at_the_next_event(
    transport: asyncio.Transport,
) -> None:
    """Bytes that a client does not read are bounded by the limit and one write."""
    stream = stream_on(transport)
    for _ in range(2):
        stream._add(b"x" * 8 * LIMIT_BYTES)
        stream.flush(0.0)
    assert transport.is_closing()
