"""What this server answers, as types: for the OpenAPI document. `formats` and `app` write it.

Tests hold real answers against these types, so that the document stays true.
"""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from shared.messages import StatusReported

FinishReason = Literal["stop", "length", "tool_calls"]


class ErrorDetail(Struct, forbid_unknown_fields=True):
    """What is wrong."""

    message: str
    """A sentence for people."""
    type: Literal["invalid_request_error", "permission_error", "rate_limit_error", "server_error"]
    param: str | None
    """The field that is to blame, if one is."""
    code: str | None


class Error(Struct, forbid_unknown_fields=True):
    """Every answer of 400 or more, and the last event of a stream that fails."""

    error: ErrorDetail


class PromptTokensDetails(Struct, forbid_unknown_fields=True):
    """How the prompt's tokens were come by."""

    cached_tokens: int


class CompletionTokensDetails(Struct, forbid_unknown_fields=True):
    """How the completion's tokens were come by."""

    accepted_prediction_tokens: int
    """Those that were drafts first."""
    rejected_prediction_tokens: int
    """Drafts that were verified in vain. Unlike OpenAI's they are not in `completion_tokens`."""


class TokenUsage(Struct, forbid_unknown_fields=True):
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class CacheUsage(Struct, forbid_unknown_fields=True):
    """What the prefix cache had of the prompt."""

    memory_tokens: int
    ssd_tokens: int
    computed_tokens: int
    diverged_at: int | None
    miss: str | None


class LockstepExtension(Struct, forbid_unknown_fields=True):
    """What OpenAI's API has no field for."""

    cache: CacheUsage | None


class CalledToolFunction(Struct, forbid_unknown_fields=True):
    """What the model calls."""

    name: str
    arguments: str


class ResponseToolCall(Struct, forbid_unknown_fields=True):
    """A tool call by the model."""

    id: str
    type: Literal["function"]
    function: CalledToolFunction
    index: int | UnsetType = UNSET
    """Only in streams."""


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
    """What the model says."""

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
    """What every answer begins with."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str
    system_fingerprint: str | None


class ChatCompletion(ResponseBase, forbid_unknown_fields=True, kw_only=True):
    """A conversation's completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: TokenUsage
    lockstep: LockstepExtension


class TextCompletion(ResponseBase, forbid_unknown_fields=True, kw_only=True):
    """Texts' completions."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: TokenUsage
    lockstep: LockstepExtension


class Delta(Struct, forbid_unknown_fields=True):
    """What a chunk adds to a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    refusal: UnsetType | None = UNSET
    tool_calls: list[ResponseToolCall] | UnsetType = UNSET


class ChatChunkChoice(Struct, forbid_unknown_fields=True):
    """What a chunk adds to a choice."""

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
    """What a chunk adds to a text."""

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
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["lockstep"]
    max_model_len: int | None
    """Longest prompt plus completion in tokens."""


class ModelList(Struct, forbid_unknown_fields=True):
    """The models that are served: one."""

    object: Literal["list"]
    data: list[ModelInfo]


class Health(Struct, forbid_unknown_fields=True):
    """The process answers."""

    status: Literal["ok"]


class Readiness(Struct, forbid_unknown_fields=True):
    """Whether a request would be served now, and why not."""

    ready: bool
    reason: str


class GatewayStatus(Readiness, forbid_unknown_fields=True):
    """Everything that the scheduler last reported."""

    age_s: float | None
    scheduler: StatusReported | None
