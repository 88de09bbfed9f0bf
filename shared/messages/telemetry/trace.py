"""Messages of a trace of the last seconds, between operators, scheduler and gateways."""

from typing import Annotated, Literal

from msgspec import Meta

from shared import limits
from shared.messages.base import (
    Count,
    Message,
    MessagePart,
    Milliseconds,
    RequestName,
    Seconds,
    ShortText,
)
from shared.messages.telemetry.http_writes import WRITE_BYTES
from shared.messages.telemetry.step_profile import MeasuredStep, RecordedStep


class RecordedRequest(MessagePart, frozen=True, kw_only=True):
    """When a request was accepted, admitted and ended, by the scheduler's monotonic clock."""

    request_id: RequestName
    prompt_tokens: Count
    completion_tokens: Count
    """Tokens of the completion so far."""
    accepted_at_s: Seconds
    """The request was accepted."""
    started_at_s: Seconds | None = None
    """Its first admission; None: it waits."""
    first_epoch: Count = 0
    """Epoch of the step that admitted it first; 0: none has."""
    first_step_id: Count = 0
    """Id of that step."""
    first_token_at_s: Seconds | None = None
    """Its first token; None: it has none."""
    ended_at_s: Seconds | None = None
    """Its end; None: it is open."""
    end: ShortText = ""
    """Its finish reason, or the cause of its failure; "": it is open."""


class RecordedBlockTransfer(MessagePart, frozen=True, kw_only=True):
    """Blocks that one rank read from SSD or wrote to it, by the scheduler's monotonic clock."""

    kind: Literal["restore", "spill"]
    """`restore`: read."""
    rank: Count
    epoch: Count
    ordered_at_s: Seconds
    """The scheduler ordered it."""
    ended_at_s: Seconds
    """The rank's report arrived."""
    disk_ms: Milliseconds
    """Time in which the rank read or wrote."""
    bytes: Count
    """Bytes that were read or written."""
    blocks: Count
    """Blocks, with checkpoints, that were read or stored."""
    failed_blocks: Count = 0
    """Blocks that were ordered and were not."""
    request_id: Annotated[str, Meta(max_length=limits.REQUEST_ID_CHARS_MAX)] = ""
    """The request that waited for the restore; "": a spill."""


class RecordedHttpRequest(MessagePart, frozen=True, kw_only=True):
    """One HTTP request and its response, by the gateway's monotonic clock."""

    name: ShortText
    """Method and path."""
    response_id: Annotated[str, Meta(max_length=limits.REQUEST_ID_CHARS_MAX)] = ""
    """Id of the response: the ids of its requests to the scheduler begin with it, and a colon. "":
    it has asked for no completion yet."""
    status: Annotated[int, Meta(ge=0, le=999)] = 0
    """HTTP status; 0: the response has not begun."""
    trace_parent: Annotated[str, Meta(max_length=64)] = ""
    """The client's `traceparent`, or that of the exported span; "": no trace."""
    arrived_at_s: Seconds
    """Its headers were read."""
    read_at_s: Seconds | None = None
    """Its body was read."""
    submitted_at_s: Seconds | None = None
    """Its prompts were token ids, and were sent to the scheduler."""
    first_byte_at_s: Seconds | None = None
    """The beginning of its response was written."""
    ended_at_s: Seconds | None = None
    """The end of its response was handed to the system, or its client has gone; None: it is
    open."""
    writes: Annotated[bytes, Meta(max_length=limits.RECORDED_WRITES_MAX * WRITE_BYTES)] = b""
    """Writes of its response while a trace was recorded (`http_writes.pack`)."""

    def __post_init__(self) -> None:
        """Refuse bytes that are not a whole number of writes."""
        if len(self.writes) % WRITE_BYTES:
            raise ValueError(f"A write has {WRITE_BYTES} bytes")


HttpRequests = Annotated[
    list[RecordedHttpRequest], Meta(max_length=limits.RECORDED_HTTP_REQUESTS_MAX)
]


class RecordedGateway(MessagePart, frozen=True, kw_only=True):
    """The HTTP requests of one gateway."""

    name: ShortText
    """Its identity on the scheduler's link."""
    clock_offset_s: float
    """Its monotonic clock minus the scheduler's."""
    http_requests: HttpRequests
    """In the order of their arrival."""


class OrderTrace(Message, frozen=True, kw_only=True):
    """Order: have all gateways record their HTTP requests for the next seconds."""

    seconds: Annotated[float, Meta(ge=0.0, le=limits.TRACE_S_MAX)]
    """How many."""


class QueryHttpRequests(Message, frozen=True, kw_only=True):
    """Query of the HTTP requests that a gateway has recorded, and order to record more.

    The first query begins a recording, and its answer shows how the clocks differ.
    """

    asked_at_s: Seconds
    """Time of the query by the scheduler's clock."""
    seconds: Annotated[float, Meta(ge=0.0, le=limits.TRACE_S_MAX)]
    """How long to record from now on; 0: no longer than ordered before."""


class HttpRequestsReported(Message, frozen=True, kw_only=True):
    """Answer to QueryHttpRequests."""

    asked_at_s: Seconds
    """As in the query."""
    came_at_s: Seconds
    """The query arrived, by the gateway's monotonic clock."""
    answered_at_s: Seconds
    """The answer was about to be sent, by the same clock."""
    http_requests: HttpRequests
    """The requests that were open since the recording began; of too many the last ones."""


class QueryTrace(Message, frozen=True, kw_only=True):
    """Query of the steps, requests and block transfers of the last seconds.

    The scheduler collects what gateways have recorded, so its answer takes up to a second.
    """

    seconds: Seconds
    """How many."""


class TraceReported(Message, frozen=True, kw_only=True):
    """Answer to QueryTrace. Times are the scheduler's monotonic clock."""

    now_s: Seconds
    """Time of the answer."""
    since_s: Seconds
    """Time from which steps, requests and block transfers are listed."""
    hosts: list[ShortText]
    """By rank: its host."""
    clock_offsets_s: list[float]
    """By rank: its monotonic clock minus the scheduler's."""
    steps: Annotated[list[RecordedStep], Meta(max_length=limits.RECORDED_STEPS_MAX)]
    """Oldest first; of too many the last ones."""
    requests: Annotated[list[RecordedRequest], Meta(max_length=limits.RECORDED_REQUESTS_MAX)]
    """Oldest first; of too many the last ones."""
    measured: Annotated[list[MeasuredStep], Meta(max_length=limits.PROFILES_PER_MESSAGE_MAX)]
    """The steps among them that were measured part by part."""
    block_transfers: Annotated[
        list[RecordedBlockTransfer], Meta(max_length=limits.RECORDED_BLOCK_TRANSFERS_MAX)
    ] = []
    """Oldest first; of too many the last ones."""
    gateways: Annotated[list[RecordedGateway], Meta(max_length=limits.RECORDED_GATEWAYS_MAX)] = []
    """The gateways that have answered in time."""
