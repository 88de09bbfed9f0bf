"""Every message that crosses a process, grouped by link.

An order is a verb phrase, a fact a past participle, a question and its answer share the noun. The
tag on the wire is the class name. `docs/protocol.md` is the authority; a test holds the two
together.
"""

from shared.messages.base import Message, Sampling, TokenLogprobs
from shared.messages.gateway_link import (
    AbortRequest,
    QueryStatus,
    RankStatus,
    RequestAccepted,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    StatusReported,
    SubmitRequest,
    TokensGenerated,
)
from shared.messages.rank_link import (
    AdmittedSequence,
    Heartbeat,
    JoinWorld,
    LeaveWorld,
    PrefillChunk,
    RankFailed,
    RankHello,
    RankLoading,
    RankReady,
    SlotMove,
    StepFinished,
    StepPlan,
)

ToScheduler = (
    SubmitRequest
    | AbortRequest
    | QueryStatus
    | RankHello
    | RankLoading
    | RankReady
    | StepFinished
    | RankFailed
    | Heartbeat
)
"""What the scheduler can be told."""

ToGateway = (
    RequestAccepted
    | TokensGenerated
    | RequestFinished
    | RequestRejected
    | RequestFailed
    | StatusReported
)
"""What a gateway can be told."""

ToRank = JoinWorld | StepPlan | LeaveWorld
"""What a rank can be told."""

__all__ = [
    "AbortRequest",
    "AdmittedSequence",
    "Heartbeat",
    "JoinWorld",
    "LeaveWorld",
    "Message",
    "PrefillChunk",
    "QueryStatus",
    "RankFailed",
    "RankHello",
    "RankLoading",
    "RankReady",
    "RankStatus",
    "RequestAccepted",
    "RequestFailed",
    "RequestFinished",
    "RequestRejected",
    "Sampling",
    "SlotMove",
    "StatusReported",
    "StepFinished",
    "StepPlan",
    "SubmitRequest",
    "ToGateway",
    "ToRank",
    "ToScheduler",
    "TokenLogprobs",
    "TokensGenerated",
]
