"""Every message that crosses a process, grouped by link.

An order is a verb phrase, a fact a past participle, a question and its answer share the noun. The
tag on the wire is the class name. `docs/reference/protocol.md` is the authority; a test compares
the two.
"""

from shared.messages.base import CanaryFinding, Message, Sampling, TokenLogprobs
from shared.messages.gateway_link import (
    AbortRequest,
    CachedPrefix,
    DismissedRank,
    DraftStatistics,
    OrderDrain,
    QueryStatus,
    RankStatus,
    RequestAccepted,
    RequestAdmitted,
    RequestFailed,
    RequestFinished,
    RequestRejected,
    Speculation,
    StatusReported,
    SubmitRequest,
    TokensGenerated,
)
from shared.messages.rank_link import (
    AdmittedSequence,
    AdoptedRestore,
    BlocksRestored,
    BlocksSpilled,
    DraftChunk,
    Heartbeat,
    JoinWorld,
    KeptBlock,
    KeptCheckpoint,
    LeaveWorld,
    PrefillChunk,
    RankFailed,
    RankHello,
    RankLoading,
    RankReady,
    RestoreBlocks,
    RestoreItem,
    RolledBack,
    SlotMove,
    SpillOrder,
    StepFinished,
    StepPlan,
)
from shared.messages.store_link import (
    BlockPlace,
    BlocksCleared,
    BlocksCommitted,
    BlocksListed,
    BlocksLocated,
    ClearBlocks,
    CommitBlocks,
    ListBlocks,
    LocateBlocks,
    NamespaceOpened,
    OpenNamespace,
    QuarantineBlocks,
    QueryStore,
    ReleaseBlocks,
    SpillFailed,
    StoredFolder,
    StoreReported,
    WrittenRecord,
)

ToScheduler = (
    SubmitRequest
    | AbortRequest
    | QueryStatus
    | OrderDrain
    | RankHello
    | RankLoading
    | RankReady
    | StepFinished
    | BlocksRestored
    | BlocksSpilled
    | RankFailed
    | Heartbeat
)
"""What the scheduler can be told."""

ToGateway = (
    RequestAccepted
    | RequestAdmitted
    | TokensGenerated
    | RequestFinished
    | RequestRejected
    | RequestFailed
    | StatusReported
)
"""What a gateway can be told."""

ToRank = JoinWorld | StepPlan | RestoreBlocks | LeaveWorld
"""What a rank can be told by the scheduler."""

ToStore = (
    OpenNamespace
    | LocateBlocks
    | ReleaseBlocks
    | CommitBlocks
    | QuarantineBlocks
    | SpillFailed
    | QueryStore
    | ListBlocks
    | ClearBlocks
)
"""What a cache store can be told."""

FromStore = (
    NamespaceOpened | BlocksLocated | BlocksCommitted | StoreReported | BlocksListed | BlocksCleared
)
"""What a rank, or `lockstep cache`, can be told by a cache store."""

__all__ = [
    "AbortRequest",
    "AdmittedSequence",
    "AdoptedRestore",
    "BlockPlace",
    "BlocksCleared",
    "BlocksCommitted",
    "BlocksListed",
    "BlocksLocated",
    "BlocksRestored",
    "BlocksSpilled",
    "CachedPrefix",
    "CanaryFinding",
    "ClearBlocks",
    "CommitBlocks",
    "DismissedRank",
    "DraftChunk",
    "DraftStatistics",
    "FromStore",
    "Heartbeat",
    "JoinWorld",
    "KeptBlock",
    "KeptCheckpoint",
    "LeaveWorld",
    "ListBlocks",
    "LocateBlocks",
    "Message",
    "NamespaceOpened",
    "OpenNamespace",
    "OrderDrain",
    "PrefillChunk",
    "QuarantineBlocks",
    "QueryStatus",
    "QueryStore",
    "RankFailed",
    "RankHello",
    "RankLoading",
    "RankReady",
    "RankStatus",
    "ReleaseBlocks",
    "RequestAccepted",
    "RequestAdmitted",
    "RequestFailed",
    "RequestFinished",
    "RequestRejected",
    "RestoreBlocks",
    "RestoreItem",
    "RolledBack",
    "Sampling",
    "SlotMove",
    "Speculation",
    "SpillFailed",
    "SpillOrder",
    "StatusReported",
    "StepFinished",
    "StepPlan",
    "StoreReported",
    "StoredFolder",
    "SubmitRequest",
    "ToGateway",
    "ToRank",
    "ToScheduler",
    "ToStore",
    "TokenLogprobs",
    "TokensGenerated",
    "WrittenRecord",
]
