"""Every message between processes, grouped by link.

Orders are named with verb phrases and facts with past participles; a query and its answer share the
noun. The tag on the wire is the class name. `docs/reference/protocol.md` is the specification; a
test compares the two.
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
"""Messages that the scheduler accepts."""

ToGateway = (
    RequestAccepted
    | RequestAdmitted
    | TokensGenerated
    | RequestFinished
    | RequestRejected
    | RequestFailed
    | StatusReported
)
"""Messages that a gateway accepts."""

ToRank = JoinWorld | StepPlan | RestoreBlocks | LeaveWorld
"""Messages that a rank accepts from the scheduler."""

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
"""Messages that a cache store accepts."""

FromStore = (
    NamespaceOpened | BlocksLocated | BlocksCommitted | StoreReported | BlocksListed | BlocksCleared
)
"""Messages that a rank or `lockstep cache` accepts from a cache store."""

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
