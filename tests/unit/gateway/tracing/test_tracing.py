"""A gateway's part in traces: its answers to any messages of the scheduler."""

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.tracing.tracing import Tracing
from shared import limits
from shared.clock import ManualClock
from shared.errors import FrameRefused, PeerUnknown, UnavailableError
from shared.messages import (
    HttpRequestsReported,
    QueryHttpRequests,
    RecordedHttpRequest,
    ToScheduler,
    TraceReported,
)
from shared.messages.telemetry.http_writes import WRITE_BYTES
from shared.transport import codec
from tests.support.effort import cases
from tests.unit.shared.messages.message_strategies import instances

_DECODER: codec.Decoder[msgspec.Struct] = codec.Decoder(ToScheduler)


class _Link:
    """Keeps all messages; without a session it raises."""

    def __init__(self, *, is_connected: bool = True) -> None:
        self.sent: list[msgspec.Struct] = []
        self._is_connected = is_connected

    def send(self, message: msgspec.Struct) -> None:
        """Keep a message."""
        if not self._is_connected:
            raise PeerUnknown("There is no session.")
        self.sent.append(_DECODER.decode(codec.encode(message)))

    def close(self) -> None:
        """Do nothing."""


@settings(max_examples=cases(50, 300))
@given(
    st.lists(st.one_of(instances(QueryHttpRequests), instances(TraceReported)), max_size=6),
    st.booleans(),
)
def test_any_message_of_scheduler_gets_valid_answer_or_none(
    messages: list[QueryHttpRequests | TraceReported], is_connected: bool
) -> None:
    """An unasked trace is passed over; a lost session is no error."""
    link, clock = _Link(is_connected=is_connected), ManualClock(50.0)
    tracing = Tracing(link, clock)
    for message in messages:
        traced = tracing.recorder.begin("POST /v1/completions", None)
        tracing.handle(message, clock.now())
        if tracing.recorder.is_on:
            traced.add_write(clock.now(), 2**30)
        tracing.end(traced)
        clock.advance(1.0)
    queries = [one for one in messages if isinstance(one, QueryHttpRequests)]
    assert len(link.sent) == (len(queries) if is_connected else 0)
    for query, answer in zip(queries, link.sent, strict=False):
        assert isinstance(answer, HttpRequestsReported)
        assert answer.asked_at_s == query.asked_at_s


async def test_trace_without_session_ends_with_error_and_makes_room() -> None:
    """The next client may try again."""
    tracing = Tracing(_Link(is_connected=False), ManualClock())
    for _ in range(2):
        assert tracing.busy_s == 0.0
        with pytest.raises(UnavailableError, match="cannot be reached"):
            await tracing.collect(1.0)


@pytest.mark.parametrize(
    "damage",
    [
        {"writes": b"1" * (WRITE_BYTES + 1)},
        {"writes": bytes((limits.RECORDED_WRITES_MAX + 1) * WRITE_BYTES)},
        {"arrived_at_s": -1.0},
        {"status": 1_000},
        {"response_id": "x" * 200},
    ],
)
def test_damaged_http_request_is_refused_at_arrival(damage: dict[str, object]) -> None:
    """The whole message is refused, as the protocol has it."""
    traced = {"name": "POST /", "arrived_at_s": 1.0, **damage}
    message = {
        "type": "HttpRequestsReported",
        "asked_at_s": 1.0,
        "came_at_s": 1.0,
        "answered_at_s": 1.0,
        "http_requests": [traced],
    }
    with pytest.raises(FrameRefused):
        _DECODER.decode(msgpack.packb(message))
    assert RecordedHttpRequest(name="POST /", arrived_at_s=1.0).writes == b""
