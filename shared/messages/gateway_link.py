"""The link between a gateway and the scheduler. Token ids only: no text, no HTTP."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared import limits
from shared.messages.base import (
    CanaryFinding,
    Count,
    Message,
    RequestName,
    Sampling,
    Seconds,
    ShortText,
    TokenId,
    TokenLogprobs,
)

FinishReason = Literal["stop", "length", "abort", "error"]
FailureCause = Literal["deadline", "queue_deadline", "stopping", "failed"]
DraftMethod = Literal["ngram", "draft_model", "eagle"]


class Speculation(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """How drafts are proposed for a request. They change how fast tokens come, never which."""

    method: Literal["default", "off", "ngram", "draft_model", "eagle"] = "default"
    """`default`: as this server is set up. A method that it is not set up for is `off`."""
    tokens: Annotated[int, Meta(ge=0, le=limits.DRAFT_TOKENS_MAX)] = 0
    """Most drafts per step; 0: as this server is set up."""


class SubmitRequest(
    Message, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, tag=True
):
    """Order: generate tokens for this prompt. Idempotent by `request_id` within one gateway."""

    request_id: RequestName
    prompt: Annotated[list[TokenId], Meta(min_length=1)]
    sampling: Sampling
    max_tokens: Annotated[int, Meta(ge=1, le=limits.COMPLETION_TOKENS_MAX)]
    """Longest completion in tokens, `generated` counted in."""
    stop_ids: Annotated[list[TokenId], Meta(max_length=limits.STOP_IDS_MAX)] = []
    """A completion ends when one of them is generated; that token is sent, and is its last."""
    generated: list[TokenId] = []
    """Ids already received when a gateway resumes a request after the scheduler was restarted."""
    priority: Annotated[int, Meta(ge=-1_000, le=1_000)] = 0
    """Higher is admitted first; equal priorities first come, first served."""
    deadline_s: Seconds = 1_800.0
    """From arrival at the scheduler. A request that has not ended by then fails."""
    cache_salt: Annotated[str, Meta(max_length=limits.CACHE_SALT_CHARS_MAX)] = ""
    """Enters the first block's hash, so that tenants do not see each other's prefixes."""
    system_tokens: Count = 0
    """So many of the first prompt tokens are instructions that other conversations begin with too
    (system prompt, tools): their blocks are evicted last."""
    cache_boundaries: Annotated[list[Count], Meta(max_length=limits.CACHE_BOUNDARIES_MAX)] = []
    """Prompt lengths, rising, at which a later request may diverge from this one (the end of the
    last user turn): where state cannot be cut, a checkpoint is kept at the last block border before
    each."""
    speculation: Speculation = Speculation()
    """What the client wants of drafts."""
    more_requests_expected: bool = False
    """Others are here and are made token ids; most of them are sent within milliseconds. A device
    that rests can take all of them at once."""


class CachedPrefix(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """How much of a prompt's KV was found, and why not more."""

    memory_tokens: Count = 0
    """Reused from blocks that were resident when the request was admitted."""
    stored_tokens: Count = 0
    """Reused from blocks that were restored from SSD for this request."""
    diverged_at: Count | None = None
    """First position at which the prompt differs from the known sequence it shares most with."""
    miss: Literal["", "new", "diverged", "evicted", "unreadable", "slow", "off"] = ""
    """Why the rest was computed: nothing like it is known, it differs, it was evicted, a stored
    block was lost or damaged, reading would have taken longer, or there is no cache. "": nothing
    but the end of the prompt was left to compute."""


class RequestAdmitted(
    Message, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, tag=True
):
    """Fact: the request runs; sent before its first token, once per submission."""

    request_id: RequestName
    cached: CachedPrefix


class AbortRequest(
    Message, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, tag=True
):
    """Order: end this request. Unknown or ended ids are ignored: an abort may cross the end."""

    request_id: RequestName
    reason: Literal["abort", "stop"] = "abort"
    """`stop`: the gateway found a stop string, so the request ended as the client asked."""


class QueryStatus(
    Message, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, tag=True
):
    """Question: how are you? Gateways get the answer, StatusReported, unasked every second too."""


class OrderDrain(
    Message, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, tag=True
):
    """Order of an operator: take no new requests, or take them again. Running ones go on."""

    is_on: bool
    """False takes an earlier order back."""


class RequestAccepted(
    Message, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, tag=True
):
    """Fact: the request will end exactly once, by RequestFinished or RequestFailed."""

    request_id: RequestName
    queued_ahead: Count
    """Requests that will be admitted before it."""


class TokensGenerated(
    Message, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, tag=True
):
    """Fact: all tokens of one step for one gateway, one entry per request, in equal columns."""

    request_ids: list[RequestName]
    positions: list[Count]
    """Index in the completion of each entry's first token. The gateway refuses gaps and repeats."""
    tokens: list[list[TokenId]]
    """One or more new tokens per entry (several when drafts were accepted)."""
    logprobs: list[list[TokenLogprobs]] = []
    """Empty, or one list per entry: as long as its tokens if it asked for logprobs, else empty."""


class RequestFinished(
    Message, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, tag=True
):
    """Fact: the request has ended; all its tokens were sent before."""

    request_id: RequestName
    finish_reason: FinishReason
    prompt_tokens: Count
    completion_tokens: Count
    """Tokens sent, a stop token counted in."""
    cached: CachedPrefix = CachedPrefix()
    """What its first admission found in the cache."""
    drafts_accepted: Count = 0
    """Tokens of the completion that were drafts first."""
    drafts_rejected: Count = 0
    """Drafts that were verified and are not part of the completion."""


class RequestRejected(
    Message, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, tag=True
):
    """Fact: the request was refused before it started; nothing was computed for it."""

    request_id: RequestName
    cause: Literal[
        "queue_full", "too_long", "draining", "not_ready", "invalid", "no_drafts", "deadline"
    ]
    detail: ShortText
    """A sentence with the numbers."""
    retry_after_s: Seconds | None = None
    """Set when the same request may succeed later."""


class RequestFailed(
    Message, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, tag=True
):
    """Fact: an accepted request cannot be completed."""

    request_id: RequestName
    cause: FailureCause
    """Its deadline passed, it waited too long for a slot (the same request may succeed later), the
    scheduler stops, or it cannot be served any more."""
    detail: ShortText


class RankStatus(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """What the scheduler knows of one rank."""

    rank: Count
    state: Literal["missing", "joining", "loading", "ready", "lost"]
    host: ShortText = ""
    pid: Count = 0
    device: ShortText = ""
    blas: ShortText = ""
    """Which matrix library the CPU backend runs, "" where it does not matter."""
    mlx_version: ShortText = ""
    loaded: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    """Share of the weights that are loaded, 0 to 1."""
    memory_bytes: Count = 0
    """Active memory that MLX reports."""
    shard_bytes: Count = 0
    """Bytes of weights on this rank."""
    canary: Annotated[list[CanaryFinding], Meta(max_length=64)] = []
    """What it has computed with the others before it was ready."""


class DismissedRank(Message, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """A rank process that was told to leave, or no longer answers, and may still be there."""

    host: ShortText
    pid: Count


class DraftStatistics(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """Counts of one drafting method since the scheduler started; a row is a sequence in a step."""

    method: DraftMethod
    rows: Count = 0
    """Rows in which drafts of this method were verified."""
    proposed_at: list[Count] = []
    """Drafts verified, by position in their row, from 0."""
    accepted_at: list[Count] = []
    """Drafts accepted, by position; as long as `proposed_at`."""

    @property
    def proposed(self) -> int:
        """Drafts verified at all positions."""
        return sum(self.proposed_at)

    @property
    def accepted(self) -> int:
        """Drafts accepted at all positions."""
        return sum(self.accepted_at)


class StatusReported(
    Message, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False, tag=True
):
    """Answer to QueryStatus: the state of the world and of the queue, and counters since start."""

    ready: bool
    """The world runs, and is idle or has finished a step within its deadline."""
    reason: ShortText
    """Why it is not ready; "" when it is."""
    draining: bool
    model: ShortText
    model_fingerprint: ShortText
    epoch: Count
    world_size: Count
    backend: ShortText
    ranks: list[RankStatus]
    dismissed: list[DismissedRank] = []
    """Rank processes of epochs that have ended, whose end nobody has seen. A supervisor of their
    host kills them: a process that is stopped cannot obey."""
    sharding: Literal["none", "tensor", "expert", "pipeline"] = "none"
    """How the model is split."""
    failure: Literal["", "configuration", "epochs"] = ""
    """Why no further epoch is tried: a setting must be changed, or too many epochs have failed."""
    running: Count
    """Sequences that hold a slot."""
    waiting: Count
    kv_tokens_used: Count
    kv_tokens_max: Count
    context_tokens_max: Count
    """Longest prompt plus completion that is accepted; 0 before the world is ready."""
    steps: Count
    """Step id last finished by all ranks in this epoch."""
    drafts: list[DraftStatistics] = []
    """One entry per method whose drafts were verified."""
    counters: dict[str, float]
    """Monotonic sums since the scheduler started, Prometheus style names."""
    gauges: dict[str, float]
    """Values of the moment, for example the last second's tokens/s."""
