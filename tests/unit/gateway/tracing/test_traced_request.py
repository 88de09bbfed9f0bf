"""Recording of HTTP requests in a gateway: only when ordered, and within bounds."""

import pytest

from services.gateway.tracing.traced_request import RequestRecorder, TracedRequest
from shared import limits
from shared.clock import ManualClock
from shared.messages import HttpRequestsReported, QueryHttpRequests
from shared.messages.telemetry.http_writes import HttpWrite, unpack


class _Recording:
    """A recorder with a clock of its own."""

    def __init__(self) -> None:
        self.clock = ManualClock(100.0)
        self.recorder = RequestRecorder(self.clock)

    def order(self, seconds: float) -> HttpRequestsReported:
        """Let the scheduler order a recording, or query it with 0."""
        query = QueryHttpRequests(asked_at_s=1.0, seconds=seconds)
        return self.recorder.answer(query, self.clock.now())

    def write(self, traced: TracedRequest, tokens: int, step_id: int, size_bytes: int = 10) -> None:
        """Generate tokens and write them, as a stream does."""
        if self.recorder.is_on:
            traced.step = 1, step_id
            traced.new_tokens += tokens
        began_s = self.clock.now()
        self.clock.advance(0.001)
        if self.recorder.is_on:
            traced.add_write(began_s, size_bytes)


def test_nothing_is_recorded_without_order() -> None:
    """Neither writes nor ended requests use memory."""
    one = _Recording()
    traced = one.recorder.begin("GET /", None)
    one.write(traced, 1, 1)
    one.recorder.end(traced)
    assert not traced.writes
    assert one.order(0.0).http_requests == []


def test_recording_has_open_and_ended_requests_with_their_writes() -> None:
    """A request that was open before has its arrival, and its writes from the order on."""
    one = _Recording()
    before = one.recorder.begin("POST /before", None)
    one.write(before, 1, 1)
    first = one.order(5.0)
    assert (first.http_requests, first.came_at_s, first.answered_at_s) == ([], 100.001, 100.001)
    one.write(before, 2, 7, 30)
    during = one.recorder.begin("POST /during", None)
    one.recorder.end(during)
    one.clock.advance(6.0)
    after = one.recorder.begin("POST /after", None)
    one.write(after, 1, 9)
    one.recorder.end(after)
    recorded = one.order(0.0).http_requests
    assert [each.name for each in recorded] == ["POST /before", "POST /during"]
    assert recorded[0].arrived_at_s == 100.0
    assert recorded[0].ended_at_s is None
    assert recorded[1].ended_at_s == recorded[1].arrived_at_s
    (write,) = unpack(recorded[0].writes)
    assert (write.at_s, write.seconds) == pytest.approx((100.001, 0.001), abs=2e-6)
    assert write == HttpWrite(write.at_s, write.seconds, 30, 2, 1, 7)


def test_second_order_continues_recording_and_later_one_begins_anew() -> None:
    """Two operators may record at once."""
    one = _Recording()
    traced = one.recorder.begin("POST /", None)
    one.order(5.0)
    one.write(traced, 1, 1)
    one.order(5.0)
    one.write(traced, 1, 2)
    assert len(list(unpack(one.order(0.0).http_requests[0].writes))) == 2
    one.clock.advance(20.0)
    one.order(5.0)
    one.write(traced, 1, 3)
    (recorded,) = one.order(0.0).http_requests
    assert [write.step_id for write in unpack(recorded.writes)] == [3]


def test_recording_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of too many writes the first are kept, of too many requests the last."""
    monkeypatch.setattr(limits, "RECORDED_WRITES_MAX", 3)
    one = _Recording()
    one.order(60.0)
    traced = one.recorder.begin("POST /", None)
    for step_id in range(1, 6):
        one.write(traced, 1, step_id)
    one.recorder.end(traced)
    (recorded,) = one.order(0.0).http_requests
    assert [write.step_id for write in unpack(recorded.writes)] == [1, 2, 3]
    for number in range(limits.RECORDED_HTTP_REQUESTS_MAX + 5):
        one.recorder.end(one.recorder.begin(f"GET /{number}", None))
    names = [each.name for each in one.order(0.0).http_requests]
    assert names[-1] == f"GET /{limits.RECORDED_HTTP_REQUESTS_MAX + 4}"
    assert len(names) == limits.RECORDED_HTTP_REQUESTS_MAX
