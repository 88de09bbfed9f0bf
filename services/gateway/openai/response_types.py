"""Response types for the OpenAPI document. `response_formats` and `app` write the responses.

Tests check real responses against these types.
"""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from shared.messages import StatusReported

FinishReason = Literal["stop", "length", "tool_calls"]


class ErrorDetail(Struct, forbid_unknown_fields=True):
    """Cause of an error."""

    message: str
    """A sentence with cause and remedy."""
    type: Literal["invalid_request_error", "permission_error", "rate_limit_error", "server_error"]
    param: str | None
    """The request field with the error, if there is one."""
    code: str | None


class Error(Struct, forbid_unknown_fields=True):
    """Body of every status from 400, and last event of a failed stream."""

    error: ErrorDetail


class PromptTokensDetails(Struct, forbid_unknown_fields=True):
    """Prompt tokens by origin."""

    cached_tokens: int


class CompletionTokensDetails(Struct, forbid_unknown_fields=True):
    """Completion tokens by origin."""

    accepted_prediction_tokens: int
    """Tokens that were drafts first."""
    rejected_prediction_tokens: int
    """Drafts that were rejected. Unlike OpenAI's they are not part of `completion_tokens`."""


class TokenUsage(Struct, forbid_unknown_fields=True):
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class CacheUsage(Struct, forbid_unknown_fields=True):
    """Prompt tokens found in the prefix cache."""

    memory_tokens: int
    ssd_tokens: int
    computed_tokens: int
    diverged_at: int | None
    miss: str | None


class LockstepExtension(Struct, forbid_unknown_fields=True):
    """Facts that OpenAI's API has no field for."""

    cache: CacheUsage | None


class CalledToolFunction(Struct, forbid_unknown_fields=True):
    """Name and arguments of a tool call."""

    name: str
    arguments: str


class ResponseToolCall(Struct, forbid_unknown_fields=True):
    """A tool call of the model."""

    id: str
    type: Literal["function"]
    function: CalledToolFunction
    index: int | UnsetType = UNSET
    """Set in streams only."""


class ChatToken(Struct, forbid_unknown_fields=True):
    """A token with its log probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenEntry(ChatToken, forbid_unknown_fields=True):
    """A generated token with its alternatives."""

    top_logprobs: list[ChatToken]


class ChatLogprobs(Struct, forbid_unknown_fields=True):
    """Log probabilities of a chat choice."""

    content: list[ChatTokenEntry]
    refusal: None


class TextLogprobs(Struct, forbid_unknown_fields=True):
    """Log probabilities of a text completion."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]] | None


class ResponseMessage(Struct, forbid_unknown_fields=True):
    """A message of the model."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ResponseToolCall] | UnsetType = UNSET


class ChatChoice(Struct, forbid_unknown_fields=True):
    """One completion of a conversation."""

    index: int
    message: ResponseMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class TextChoice(Struct, forbid_unknown_fields=True):
    """One completion of a text."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason


class ResponseBase(Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of every completion response."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str
    system_fingerprint: str | None


class ChatCompletion(ResponseBase, forbid_unknown_fields=True, kw_only=True):
    """Completions of a conversation."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: TokenUsage
    lockstep: LockstepExtension


class TextCompletion(ResponseBase, forbid_unknown_fields=True, kw_only=True):
    """Completions of prompts."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: TokenUsage
    lockstep: LockstepExtension


class Delta(Struct, forbid_unknown_fields=True):
    """Part of a message in a chunk."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    refusal: UnsetType | None = UNSET
    tool_calls: list[ResponseToolCall] | UnsetType = UNSET


class ChatChunkChoice(Struct, forbid_unknown_fields=True):
    """Part of a choice in a chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletionChunk(ResponseBase, forbid_unknown_fields=True, kw_only=True):
    """An event of a streamed chat completion; the stream ends with `data: [DONE]`."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: TokenUsage | UnsetType | None = UNSET
    lockstep: LockstepExtension | UnsetType = UNSET


class TextChunkChoice(Struct, forbid_unknown_fields=True):
    """Part of a text completion in a chunk."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None


class TextCompletionChunk(ResponseBase, forbid_unknown_fields=True, kw_only=True):
    """An event of a streamed text completion; the stream ends with `data: [DONE]`."""

    object: Literal["text_completion"]
    choices: list[TextChunkChoice]
    usage: TokenUsage | UnsetType | None = UNSET
    lockstep: LockstepExtension | UnsetType = UNSET


class ModelInfo(Struct, forbid_unknown_fields=True):
    """The served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["lockstep"]
    max_model_len: int | None
    """Longest prompt plus completion in tokens."""


class ModelList(Struct, forbid_unknown_fields=True):
    """The list of served models, which has one entry."""

    object: Literal["list"]
    data: list[ModelInfo]


class Health(Struct, forbid_unknown_fields=True):
    """Liveness of the process."""

    status: Literal["ok"]


class Readiness(Struct, forbid_unknown_fields=True):
    """Whether new requests are served, and why not."""

    ready: bool
    reason: str


class GatewayStatus(Readiness, forbid_unknown_fields=True):
    """Readiness and the scheduler's last report."""

    age_s: float | None
    scheduler: StatusReported | None
