"""HTTP requests with their responses. Owns their times, and their writes during a recording."""

import dataclasses
from collections import deque
from typing import Any

from aiohttp import web

from services.gateway.tracing.trace_context import TraceContext
from shared import limits
from shared.clock import Clock
from shared.messages import HttpRequestsReported, QueryHttpRequests, RecordedHttpRequest
from shared.messages.telemetry import http_writes

KEPT_S = 10.0
"""Time after a recording until its end is forgotten."""


@dataclasses.dataclass(slots=True, eq=False)
class TracedRequest:
    """One HTTP request and its response. Times are monotonic seconds, None before they come."""

    recorder: "RequestRecorder"
    name: str
    """Method and path."""
    arrived_s: float
    """Its headers were read."""
    read_s: float | None = None
    """Its body was read."""
    submitted_s: float | None = None
    """Its prompts were sent to the scheduler."""
    admitted_s: float | None = None
    """The scheduler has admitted one of its completions."""
    first_token_s: float | None = None
    first_byte_s: float | None = None
    """The beginning of its response was written."""
    ended_s: float | None = None
    status: int = 0
    """HTTP status; 0 before the response begins, and where the client left before that."""
    response_id: str = ""
    """Id of the response; "" without completions."""
    context: TraceContext | None = None
    """The trace that it belongs to: the client's, or that of the exported span."""
    span: Any = None
    """Its exported span; None: it is not exported."""
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Attributes of that span."""
    failure: str = ""
    """Code of the error that ended it; "": none did."""
    writes: bytearray = dataclasses.field(default_factory=bytearray)
    """Its packed writes during the present recording."""
    new_tokens: int = 0
    """Tokens that came during a recording, and were not written yet."""
    step: tuple[int, int] = 0, 0
    """Epoch and id of the step that generated the last of them."""

    @property
    def log_fields(self) -> dict[str, str]:
        """Fields of all log lines about this request: `trace_id`, if it belongs to a trace."""
        return {"trace_id": self.context.trace_id} if self.context is not None else {}

    def add_write(self, began_s: float, size_bytes: int) -> None:
        """Note a write to the connection that has just returned; call it during a recording only.

        Args:
            began_s: when it was called.
            size_bytes: its length.
        """
        recorder = self.recorder
        now_s = recorder.clock.now()
        recorder.is_on = now_s <= recorder.until_s
        if not recorder.is_on or not recorder.writes_left:
            return
        recorder.writes_left -= 1
        tokens, self.new_tokens = self.new_tokens, 0
        epoch, step_id = self.step if tokens else (0, 0)
        self.writes += http_writes.pack(
            began_s, now_s - began_s, size_bytes, tokens, epoch, step_id
        )

    def record(self) -> RecordedHttpRequest:
        """Return it as part of a message."""
        return RecordedHttpRequest(
            name=self.name,
            response_id=self.response_id,
            status=self.status,
            trace_parent=self.context.header if self.context is not None else "",
            arrived_at_s=self.arrived_s,
            read_at_s=self.read_s,
            submitted_at_s=self.submitted_s,
            first_byte_at_s=self.first_byte_s,
            ended_at_s=self.ended_s,
            writes=bytes(self.writes),
        )


TRACED_REQUEST = web.RequestKey("traced_request", TracedRequest)
_NAME_CHARS_MAX = 200


class RequestRecorder:
    """All open requests; during a recording, the ended ones and all writes too, within bounds."""

    def __init__(self, clock: Clock) -> None:
        """Begin without requests, recording nothing."""
        self.clock = clock
        self.is_on = False
        """Writes and tokens are to be noted."""
        self.until_s = 0.0
        """End of the recording."""
        self.writes_left = 0
        """Writes that it may still have."""
        self._open: dict[TracedRequest, None] = {}
        self._ended: deque[TracedRequest] = deque(maxlen=limits.RECORDED_HTTP_REQUESTS_MAX)

    def begin(self, name: str, context: TraceContext | None) -> TracedRequest:
        """Return a new request, which arrives now.

        Args:
            name: method and path.
            context: the client's trace.
        """
        now_s = self.clock.now()
        traced = TracedRequest(self, name[:_NAME_CHARS_MAX], now_s, context=context)
        self._open[traced] = None
        if self._ended and now_s > self.until_s + KEPT_S:
            self._ended.clear()
        return traced

    def end(self, traced: TracedRequest) -> None:
        """End a request now."""
        traced.ended_s = self.clock.now()
        self._open.pop(traced, None)
        if self.is_on and traced.ended_s <= self.until_s:
            self._ended.append(traced)

    def answer(self, query: QueryHttpRequests, came_s: float) -> HttpRequestsReported:
        """Return all recorded requests, and record for the seconds that a query orders.

        Args:
            query: the scheduler's query.
            came_s: when it arrived.
        """
        if query.seconds:
            self._begin_recording(came_s)
            self.until_s = max(self.until_s, came_s + query.seconds)
        found = sorted([*self._ended, *self._open], key=lambda one: one.arrived_s)
        recorded = [one.record() for one in found[-limits.RECORDED_HTTP_REQUESTS_MAX :]]
        return HttpRequestsReported(
            asked_at_s=query.asked_at_s,
            came_at_s=came_s,
            answered_at_s=self.clock.now(),
            http_requests=[] if query.seconds else recorded,
        )

    def _begin_recording(self, now_s: float) -> None:
        if self.is_on and now_s <= self.until_s:
            return
        self.is_on = True
        self.writes_left = limits.RECORDED_WRITES_MAX
        self._ended.clear()
        for traced in self._open:
            traced.writes.clear()
            traced.new_tokens = 0
