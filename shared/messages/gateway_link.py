"""Messages between a gateway and the scheduler. They contain token ids, no text and no HTTP."""

from typing import Annotated, Literal

from msgspec import Meta

from shared import limits
from shared.messages.base import (
    CanaryFinding,
    Count,
    Grammar,
    Message,
    MessagePart,
    Namespace,
    RequestName,
    Sampling,
    Seconds,
    Sharding,
    ShortText,
    TokenId,
    TokenLogprobs,
)
from shared.messages.telemetry.durations import DurationCounts
from shared.messages.telemetry.step_profile import MeasuredStep, PartTotal
from shared.messages.token_ids import TOKEN_BYTES

FinishReason = Literal["stop", "length", "abort", "error"]
FailureCause = Literal[
    "deadline", "queue_deadline", "stopping", "grammar", "grammar_deadline", "failed"
]
DraftMethod = Literal["ngram", "draft_model", "eagle"]


class Speculation(MessagePart, frozen=True, kw_only=True):
    """How drafts are proposed for a request. Affects the speed, never which tokens are sampled."""

    method: Literal["default", "off", "ngram", "draft_model", "eagle"] = "default"
    """`default`: the server's setting. A method that the server is not set up for counts as
    `off`."""
    tokens: Annotated[int, Meta(ge=0, le=limits.DRAFT_TOKENS_MAX)] = 0
    """Most drafts per step; 0: the server's setting."""


class SubmitRequest(Message, frozen=True, kw_only=True):
    """Order: generate tokens for this prompt. Idempotent by `request_id` within one gateway."""

    request_id: RequestName
    prompt: Annotated[bytes, Meta(min_length=TOKEN_BYTES)]
    """Token ids, each as a little-endian int32."""
    sampling: Sampling
    max_tokens: Annotated[int, Meta(ge=1, le=limits.COMPLETION_TOKENS_MAX)]
    """Longest completion in tokens, including `generated`."""
    stop_ids: Annotated[list[TokenId], Meta(max_length=limits.STOP_IDS_MAX)] = []
    """Token ids that end the completion. The generated stop id is sent as its last token."""
    generated: bytes = b""
    """Token ids, packed like `prompt`, that were received before a scheduler restart, when a
    gateway resumes a request."""
    tenant: ShortText = ""
    """Whose request it is. Tenants take turns, and each may use a share of the waiting queue."""
    weight: Annotated[float, Meta(ge=limits.WEIGHT_MIN, le=limits.WEIGHT_MAX)] = 1.0
    """Share of the tenant among those that have requests: 2 gets twice as much as 1."""
    priority: Annotated[int, Meta(ge=-1_000, le=1_000)] = 0
    """Within one tenant, higher values are admitted first, equal ones in order of arrival."""
    deadline_s: Seconds = 1_800.0
    """Longest duration from arrival at the scheduler. A longer request fails."""
    cache_salt: Annotated[str, Meta(max_length=limits.CACHE_SALT_CHARS_MAX)] = ""
    """Part of the first block's hash, so that tenants do not share prefixes."""
    system_tokens: Count = 0
    """Number of leading prompt tokens that other conversations share (system prompt, tools). Their
    blocks are evicted last."""
    cache_boundaries: Annotated[list[Count], Meta(max_length=limits.CACHE_BOUNDARIES_MAX)] = []
    """Prompt lengths in rising order at which later requests may diverge, such as the end of the
    last user turn. For models whose state cannot be cut, a checkpoint is kept at the last block
    boundary before each."""
    speculation: Speculation = Speculation()
    """The client's wishes for drafts."""
    prediction: Annotated[bytes, Meta(max_length=limits.PREDICTION_TOKENS_MAX * TOKEN_BYTES)] = b""
    """Token ids, packed like `prompt`, that the client expects in the completion. N-gram drafts are
    copied from them too."""
    grammar: Grammar | None = None
    """What the completion must match; None: any text."""
    more_requests_expected: bool = False
    """The gateway is tokenizing further requests, most of which arrive within milliseconds. An idle
    device can start all of them in one step."""

    def __post_init__(self) -> None:
        """Refuse bytes that are not a whole number of token ids."""
        if any(len(ids) % TOKEN_BYTES for ids in (self.prompt, self.generated, self.prediction)):
            raise ValueError(f"Token ids have {TOKEN_BYTES} bytes each")

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt) // TOKEN_BYTES

    @property
    def generated_tokens(self) -> int:
        """Number of token ids in `generated`."""
        return len(self.generated) // TOKEN_BYTES


class CachedPrefix(MessagePart, frozen=True, kw_only=True):
    """How much of a prompt's KV was found in the cache, and why not more."""

    memory_tokens: Count = 0
    """Tokens reused from resident blocks at admission."""
    stored_tokens: Count = 0
    """Tokens reused from blocks that were restored from SSD for this request."""
    diverged_at: Count | None = None
    """First position at which the prompt differs from the most similar known sequence."""
    miss: Literal["", "new", "diverged", "evicted", "unreadable", "slow", "off"] = ""
    """Why the rest was computed: no similar sequence is known (`new`), it differs, it was evicted,
    a stored block was lost or damaged, reading would have been slower, or the cache is off. "":
    only the prompt's end remained."""


class RequestAdmitted(Message, frozen=True, kw_only=True):
    """Fact: the request runs. Sent once per submission, before its first token."""

    request_id: RequestName
    cached: CachedPrefix


class AbortRequest(Message, frozen=True, kw_only=True):
    """Order: end this request. Unknown and ended ids are ignored, since an abort may be late."""

    request_id: RequestName
    reason: Literal["abort", "stop"] = "abort"
    """`stop`: the gateway found a stop string, so the request ended as the client asked."""


class QueryStatus(Message, frozen=True, kw_only=True):
    """Query of the scheduler's state. Gateways also get the answer unasked, every second."""


class OrderDrain(Message, frozen=True, kw_only=True):
    """Order by an operator: refuse new requests, or accept them again.

    Running requests are not affected.
    """

    is_on: bool
    """False cancels an earlier order."""


class OrderProfile(Message, frozen=True, kw_only=True):
    """Order by an operator: measure the next steps part by part, as they come."""

    steps: Annotated[int, Meta(ge=1, le=limits.PROFILES_PER_MESSAGE_MAX)]
    """Steps that compute something."""
    primitives: bool
    """Count operations too."""


class QueryProfiles(Message, frozen=True, kw_only=True):
    """Query of the steps that were measured part by part last."""

    epoch: Count = 0
    step_id: Count = 0
    """Only steps after this one of the epoch."""


class ProfilesReported(Message, frozen=True, kw_only=True):
    """Answer to QueryProfiles."""

    steps: Annotated[list[MeasuredStep], Meta(max_length=limits.PROFILES_PER_MESSAGE_MAX)]
    """Oldest first. The last ones may lack the profiles of some ranks."""


class RequestAccepted(Message, frozen=True, kw_only=True):
    """Fact: the request will end exactly once, by RequestFinished or RequestFailed."""

    request_id: RequestName
    queued_ahead: Count
    """Requests that will be admitted before it."""


class TokensGenerated(Message, frozen=True, kw_only=True):
    """Fact: all tokens of one step for one gateway, as columns with one entry per request."""

    request_ids: list[RequestName]
    positions: list[Count]
    """Index in the completion of each entry's first token. The gateway refuses gaps and repeats."""
    tokens: list[list[TokenId]]
    """One or more new tokens per entry; several if drafts were accepted."""
    logprobs: list[list[TokenLogprobs]] = []
    """[], or one list per entry, with as many items as tokens if it requested logprobs, else []."""
    epoch: Count = 0
    step_id: Count = 0
    """The step."""


class RequestFinished(Message, frozen=True, kw_only=True):
    """Fact: the request has ended. All its tokens were sent before."""

    request_id: RequestName
    finish_reason: FinishReason
    prompt_tokens: Count
    completion_tokens: Count
    """Tokens sent, including a stop token."""
    cached: CachedPrefix = CachedPrefix()
    """Result of the cache lookup at its first admission."""
    drafts_accepted: Count = 0
    """Tokens of the completion that were proposed as drafts."""
    drafts_rejected: Count = 0
    """Drafts that were verified but are not part of the completion."""


class RequestRejected(Message, frozen=True, kw_only=True):
    """Fact: the request was refused before any computation."""

    request_id: RequestName
    cause: Literal[
        "queue_full", "too_long", "draining", "not_ready", "invalid", "no_drafts", "deadline"
    ]
    detail: ShortText
    """A sentence with the numbers."""
    retry_after_s: Seconds | None = None
    """Set if the same request may succeed later."""


class RequestFailed(Message, frozen=True, kw_only=True):
    """Fact: an accepted request cannot be completed."""

    request_id: RequestName
    cause: FailureCause
    """`deadline`: it took too long. `queue_deadline`: it waited too long for a slot and may succeed
    later. `stopping`: the scheduler stops. `grammar`: its grammar cannot be matched any
    further. `grammar_deadline`: the ranks were too busy to compile its grammar in time and may do
    so later. `failed`: it cannot be served any more."""
    detail: ShortText


class RankStatus(MessagePart, frozen=True, kw_only=True):
    """State, process and device of one rank, as far as the scheduler knows them."""

    rank: Count
    state: Literal["missing", "joining", "loading", "ready", "lost"]
    host: ShortText = ""
    pid: Count = 0
    device: ShortText = ""
    blas: ShortText = ""
    """Matrix library of the CPU backend, "" on other devices."""
    mlx_version: ShortText = ""
    loaded: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    """Loaded share of the weights, 0 to 1."""
    memory_bytes: Count = 0
    """Memory that MLX's arrays use."""
    peak_bytes: Count = 0
    """The most memory that they have used since this process started."""
    cached_bytes: Count = 0
    """Freed memory that MLX keeps for new arrays."""
    busy_s: Seconds = 0.0
    """Time in which its device had steps, since the scheduler's start; so are the next two."""
    idle_s: Seconds = 0.0
    """Time in which its device waited for a step although requests were open."""
    late_s: Seconds = 0.0
    """Time by which it ended steps after the first rank had."""
    awaited_s: Seconds = 0.0
    """Time for which others waited for it in the collectives of measured steps."""
    parts: list[PartTotal] = []
    """Sums over all steps that were measured part by part."""
    assignments: Count = 0
    """Tokens routed to experts of this rank, once for each expert, since the scheduler's start."""
    foreign_assignments: Count = 0
    """The same of other ranks' experts, in layers whose experts are divided between ranks."""
    silence_s: Seconds = 0.0
    """Time since its last message."""
    clock_offset_s: float = 0.0
    """Its monotonic clock minus the scheduler's."""
    clock_error_s: Seconds = 0.0
    """Largest error of that; 0 before it has reported steps."""
    shard_bytes: Count = 0
    """Bytes of weights on this rank."""
    share: ShortText = ""
    """Which part of the model it holds, in words."""
    layers: ShortText = ""
    """How it computes the model's layers, in words."""
    canary: Annotated[list[CanaryFinding], Meta(max_length=64)] = []
    """Results of its canary."""


class DismissedRank(MessagePart, frozen=True, kw_only=True):
    """A rank process that was told to leave or does not respond, and may still run."""

    host: ShortText
    pid: Count


class DraftStatistics(MessagePart, frozen=True, kw_only=True):
    """Counts of one drafting method since the scheduler's start. A row is a sequence in a step."""

    method: DraftMethod
    """The drafting method."""
    rows: Count = 0
    """Rows in which drafts of this method were verified."""
    proposed_at: list[Count] = []
    """Verified drafts by position in their row, from 0."""
    accepted_at: list[Count] = []
    """Accepted drafts by position; as long as `proposed_at`."""

    @property
    def proposed(self) -> int:
        """Verified drafts over all positions."""
        return sum(self.proposed_at)

    @property
    def accepted(self) -> int:
        """Accepted drafts over all positions."""
        return sum(self.accepted_at)


class StatusReported(Message, frozen=True, kw_only=True):
    """Answer to QueryStatus: state of world and queue, and counters since the scheduler's start."""

    ready: bool
    """The world runs, and is idle or has finished a step within its deadline."""
    reason: ShortText
    """Why it is not ready; "" if it is."""
    draining: bool
    model: ShortText
    model_fingerprint: ShortText
    epoch: Count
    world_size: Count
    backend: ShortText
    ranks: list[RankStatus]
    dismissed: list[DismissedRank] = []
    """Rank processes of ended epochs whose end was not observed. Their host's supervisor kills
    them, because a stopped process cannot obey an order."""
    sharding: Sharding = "none"
    """How the model is split."""
    namespace: Namespace = ""
    """Namespace of the blocks of the current or the last epoch; "" before the first."""
    spare_world: ShortText = ""
    """State of the loaded spare processes, in words; "": the ranks have no such spares."""
    world_change: ShortText = ""
    """How the world differs from that of the last start, and the consequence for stored blocks; ""
    without a difference, or a day later."""
    failure: Literal["", "configuration", "epochs"] = ""
    """Why no further epoch is started: a setting must be changed, or too many epochs have
    failed."""
    running: Count
    """Sequences that occupy a slot."""
    waiting: Count
    kv_tokens_used: Count
    kv_tokens_max: Count
    context_tokens_max: Count
    """Longest accepted prompt plus completion; 0 before the world is ready."""
    steps: Count
    """Latest step id finished by all ranks in this epoch."""
    drafts: list[DraftStatistics] = []
    """One entry per method whose drafts were verified."""
    durations: list[DurationCounts] = []
    """Of steps and requests, since the scheduler's start."""
    counters: dict[str, float]
    """Monotonic sums since the scheduler's start, by Prometheus-style names."""
    gauges: dict[str, float]
    """Current values, for example the last second's tokens/s."""
