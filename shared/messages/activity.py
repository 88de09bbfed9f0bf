"""What the cluster does now, for a page that people look at. Asked for only while they do."""

from typing import Annotated, Literal

from msgspec import Meta

from shared import limits
from shared.messages.base import Count, Message, MessagePart, Seconds, ShortText
from shared.messages.gateway_link import CachedPrefix
from shared.messages.telemetry.step_profile import RecordedStep
from shared.messages.telemetry.trace import RecordedRequest


class QueryActivity(Message, frozen=True, kw_only=True):
    """Query of the open requests, the last events, and the steps since the last answer."""

    epoch: Count = 0
    step_id: Count = 0
    """Only steps after this one of the epoch."""


class OpenRequest(MessagePart, frozen=True, kw_only=True):
    """How far an open request has come."""

    record: RecordedRequest
    """Its id, lengths and times."""
    state: Literal["waiting", "prefill", "decode"]
    """`waiting`: for a slot. `prefill`: its prompt is computed. `decode`: it generates."""
    computed_tokens: Count = 0
    """Tokens of it whose keys and values are cached or planned; of the prompt first."""
    cached: CachedPrefix | None = None
    """Result of its cache lookup; None: not admitted yet."""
    draft_method: ShortText = ""
    """Method that proposes its drafts; "": none is chosen."""
    drafts_accepted: Count = 0
    """Tokens of its completion that were drafts."""
    drafts_rejected: Count = 0
    """Verified drafts that are not part of the completion."""


class NotedEvent(MessagePart, frozen=True, kw_only=True):
    """Something that the scheduler has logged."""

    at_s: Seconds
    """By the scheduler's monotonic clock."""
    level: Literal["info", "warning", "error"]
    """As in the log."""
    text: ShortText
    """What happened, in words."""


class EndedEpoch(MessagePart, frozen=True, kw_only=True):
    """The end of an epoch, and the next time the world was ready."""

    epoch: Count
    """The epoch that ended."""
    cause: ShortText
    """Why it ended, one sentence."""
    ended_at_s: Seconds
    """When, by the scheduler's monotonic clock."""
    ready_at_s: Seconds | None = None
    """When the world was ready again; None: it is not."""


class ActivityReported(Message, frozen=True, kw_only=True):
    """Answer to QueryActivity. Times are the scheduler's monotonic clock."""

    now_s: Seconds
    """Time of the answer."""
    steps: Annotated[list[RecordedStep], Meta(max_length=limits.ACTIVITY_STEPS_MAX)]
    """Steps that all ranks have reported, oldest first; of too many the last ones."""
    requests: Annotated[list[OpenRequest], Meta(max_length=limits.ACTIVITY_REQUESTS_MAX)]
    """Running requests, then waiting ones in the order of their admission."""
    requests_omitted: Count = 0
    """Open requests beyond these."""
    ended_epochs: Annotated[list[EndedEpoch], Meta(max_length=limits.ACTIVITY_EVENTS_MAX)] = []
    """The last ones, oldest first."""
    events: Annotated[list[NotedEvent], Meta(max_length=limits.ACTIVITY_EVENTS_MAX)] = []
    """The last ones, oldest first."""
    loss: ShortText = ""
    """The largest loss in the steps that were measured part by part last, in a sentence; "": none
    is known."""
