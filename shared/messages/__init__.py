"""Every message between processes, grouped by link.

Orders are named with verb phrases and facts with past participles; a query and its answer share the
noun. The tag on the wire is the class name. `docs/reference/protocol.md` is the specification; a
test compares the two.
"""

from shared.messages.activity import ActivityReported as ActivityReported
from shared.messages.activity import EndedEpoch as EndedEpoch
from shared.messages.activity import NotedEvent as NotedEvent
from shared.messages.activity import OpenRequest as OpenRequest
from shared.messages.activity import QueryActivity as QueryActivity
from shared.messages.base import CanaryFinding as CanaryFinding
from shared.messages.base import Grammar as Grammar
from shared.messages.base import GrammarFailure as GrammarFailure
from shared.messages.base import Message as Message
from shared.messages.base import Sampling as Sampling
from shared.messages.base import TokenLogprobs as TokenLogprobs
from shared.messages.gateway_link import AbortRequest as AbortRequest
from shared.messages.gateway_link import CachedPrefix as CachedPrefix
from shared.messages.gateway_link import DismissedRank as DismissedRank
from shared.messages.gateway_link import DraftStatistics as DraftStatistics
from shared.messages.gateway_link import OrderDrain as OrderDrain
from shared.messages.gateway_link import OrderProfile as OrderProfile
from shared.messages.gateway_link import ProfilesReported as ProfilesReported
from shared.messages.gateway_link import QueryProfiles as QueryProfiles
from shared.messages.gateway_link import QueryStatus as QueryStatus
from shared.messages.gateway_link import RankStatus as RankStatus
from shared.messages.gateway_link import RequestAccepted as RequestAccepted
from shared.messages.gateway_link import RequestAdmitted as RequestAdmitted
from shared.messages.gateway_link import RequestFailed as RequestFailed
from shared.messages.gateway_link import RequestFinished as RequestFinished
from shared.messages.gateway_link import RequestRejected as RequestRejected
from shared.messages.gateway_link import Speculation as Speculation
from shared.messages.gateway_link import StatusReported as StatusReported
from shared.messages.gateway_link import SubmitRequest as SubmitRequest
from shared.messages.gateway_link import TokensGenerated as TokensGenerated
from shared.messages.rank_link import BlocksRestored as BlocksRestored
from shared.messages.rank_link import BlocksSpilled as BlocksSpilled
from shared.messages.rank_link import GrammarCompiled as GrammarCompiled
from shared.messages.rank_link import HeadExchanges as HeadExchanges
from shared.messages.rank_link import Heartbeat as Heartbeat
from shared.messages.rank_link import JoinWorld as JoinWorld
from shared.messages.rank_link import LeaveWorld as LeaveWorld
from shared.messages.rank_link import PlaceTaken as PlaceTaken
from shared.messages.rank_link import RankFailed as RankFailed
from shared.messages.rank_link import RankHello as RankHello
from shared.messages.rank_link import RankLoading as RankLoading
from shared.messages.rank_link import RankReady as RankReady
from shared.messages.rank_link import RestoreBlocks as RestoreBlocks
from shared.messages.rank_link import RestoreItem as RestoreItem
from shared.messages.rank_link import StepsMeasured as StepsMeasured
from shared.messages.step_plan import AdmittedSequence as AdmittedSequence
from shared.messages.step_plan import AdoptedRestore as AdoptedRestore
from shared.messages.step_plan import DraftChunk as DraftChunk
from shared.messages.step_plan import KeptBlock as KeptBlock
from shared.messages.step_plan import KeptCheckpoint as KeptCheckpoint
from shared.messages.step_plan import PrefillChunk as PrefillChunk
from shared.messages.step_plan import RolledBack as RolledBack
from shared.messages.step_plan import SlotMove as SlotMove
from shared.messages.step_plan import SpillOrder as SpillOrder
from shared.messages.step_plan import StepFinished as StepFinished
from shared.messages.step_plan import StepPlan as StepPlan
from shared.messages.store_link import BlockPlace as BlockPlace
from shared.messages.store_link import BlocksCleared as BlocksCleared
from shared.messages.store_link import BlocksCommitted as BlocksCommitted
from shared.messages.store_link import BlocksListed as BlocksListed
from shared.messages.store_link import BlocksLocated as BlocksLocated
from shared.messages.store_link import ClearBlocks as ClearBlocks
from shared.messages.store_link import CommitBlocks as CommitBlocks
from shared.messages.store_link import DeleteDocument as DeleteDocument
from shared.messages.store_link import DocumentDeleted as DocumentDeleted
from shared.messages.store_link import DocumentKept as DocumentKept
from shared.messages.store_link import DocumentRead as DocumentRead
from shared.messages.store_link import KeepDocument as KeepDocument
from shared.messages.store_link import ListBlocks as ListBlocks
from shared.messages.store_link import LocateBlocks as LocateBlocks
from shared.messages.store_link import NamespaceOpened as NamespaceOpened
from shared.messages.store_link import OpenNamespace as OpenNamespace
from shared.messages.store_link import QuarantineBlocks as QuarantineBlocks
from shared.messages.store_link import QueryStore as QueryStore
from shared.messages.store_link import ReadDocument as ReadDocument
from shared.messages.store_link import ReleaseBlocks as ReleaseBlocks
from shared.messages.store_link import SpillFailed as SpillFailed
from shared.messages.store_link import StoredFolder as StoredFolder
from shared.messages.store_link import StoreReported as StoreReported
from shared.messages.store_link import WrittenRecord as WrittenRecord
from shared.messages.telemetry.durations import DurationCounts as DurationCounts
from shared.messages.telemetry.expert_counts import ExpertLayer as ExpertLayer
from shared.messages.telemetry.expert_counts import ExpertRange as ExpertRange
from shared.messages.telemetry.expert_counts import ExpertsReported as ExpertsReported
from shared.messages.telemetry.expert_counts import LayerAssignments as LayerAssignments
from shared.messages.telemetry.expert_counts import QueryExperts as QueryExperts
from shared.messages.telemetry.step_profile import MeasuredStep as MeasuredStep
from shared.messages.telemetry.step_profile import PartTotal as PartTotal
from shared.messages.telemetry.step_profile import RecordedStep as RecordedStep
from shared.messages.telemetry.step_profile import StepProfile as StepProfile
from shared.messages.telemetry.trace import HttpRequestsReported as HttpRequestsReported
from shared.messages.telemetry.trace import OrderTrace as OrderTrace
from shared.messages.telemetry.trace import QueryHttpRequests as QueryHttpRequests
from shared.messages.telemetry.trace import QueryTrace as QueryTrace
from shared.messages.telemetry.trace import RecordedBlockTransfer as RecordedBlockTransfer
from shared.messages.telemetry.trace import RecordedGateway as RecordedGateway
from shared.messages.telemetry.trace import RecordedHttpRequest as RecordedHttpRequest
from shared.messages.telemetry.trace import RecordedRequest as RecordedRequest
from shared.messages.telemetry.trace import TraceReported as TraceReported

ToScheduler = (
    SubmitRequest
    | AbortRequest
    | QueryStatus
    | OrderDrain
    | OrderProfile
    | QueryProfiles
    | OrderTrace
    | QueryTrace
    | QueryActivity
    | QueryExperts
    | HttpRequestsReported
    | RankHello
    | RankLoading
    | RankReady
    | StepFinished
    | BlocksRestored
    | BlocksSpilled
    | GrammarCompiled
    | PlaceTaken
    | RankFailed
    | Heartbeat
    | StepsMeasured
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
    | ProfilesReported
    | QueryHttpRequests
    | TraceReported
    | ActivityReported
    | ExpertsReported
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
    | KeepDocument
    | ReadDocument
    | DeleteDocument
    | QueryStore
    | ListBlocks
    | ClearBlocks
)
"""Messages that a cache store accepts."""

FromStore = (
    NamespaceOpened
    | BlocksLocated
    | BlocksCommitted
    | DocumentKept
    | DocumentRead
    | DocumentDeleted
    | StoreReported
    | BlocksListed
    | BlocksCleared
)
"""Messages that a rank, a gateway or `lockstep cache` accepts from a cache store."""
