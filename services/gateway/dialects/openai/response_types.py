"""Response types for the OpenAPI document. `serializers` and `app` write the responses.

Tests check real responses against these types.
"""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from shared.messages import StatusReported

FinishReason = Literal["stop", "length", "tool_calls"]


class ErrorDetail(Struct, forbid_unknown_fields=True):
    """Message, kind and cause of an error."""

    message: str
    """A sentence with cause and remedy."""
    type: Literal["invalid_request_error", "permission_error", "rate_limit_error", "server_error"]
    """Kind of the error, as in OpenAI's API; it follows from the status."""
    param: str | None
    """Path of the field that caused the error, for example `messages[0].content`; null if no field
    did."""
    code: str | None
    """Identifier of the cause for programs, for example `queue_full`; null for other errors."""


class Error(Struct, forbid_unknown_fields=True):
    """Body of every status from 400, and last event of a failed stream."""

    error: ErrorDetail
    """The error."""


class PromptTokensDetails(Struct, forbid_unknown_fields=True):
    """How many of the prompt tokens came from the prefix cache."""

    cached_tokens: int
    """Prompt tokens found in the prefix cache, in memory or on SSD."""


class CompletionTokensDetails(Struct, forbid_unknown_fields=True):
    """Counts of reasoning tokens, and of draft tokens that verification accepted and rejected."""

    reasoning_tokens: int
    """Completion tokens whose text is reasoning."""
    accepted_prediction_tokens: int
    """Completion tokens that were accepted drafts."""
    rejected_prediction_tokens: int
    """Drafts that were rejected. Unlike OpenAI's they are not part of `completion_tokens`."""


class TokenUsage(Struct, forbid_unknown_fields=True):
    """Token counts of one request."""

    prompt_tokens: int
    """Tokens of all prompts; each prompt counts once."""
    completion_tokens: int
    """Tokens of all choices."""
    total_tokens: int
    """Sum of prompt and completion tokens."""
    prompt_tokens_details: PromptTokensDetails
    """Prompt tokens by origin."""
    completion_tokens_details: CompletionTokensDetails
    """Completion tokens by origin."""


class CacheUsage(Struct, forbid_unknown_fields=True):
    """Use of the prefix cache by one prompt: its tokens by origin, and why some were computed."""

    memory_tokens: int
    """Prompt tokens found in memory."""
    ssd_tokens: int
    """Prompt tokens restored from SSD."""
    computed_tokens: int
    """Prompt tokens that were computed."""
    diverged_at: int | None
    """First position at which the prompt differs from the most similar cached one; null if it does
    not differ."""
    miss: str | None
    """Why tokens were computed: `new`, `diverged`, `evicted`, `unreadable`, `slow` or `off`; null
    if only the prompt's end was."""
    text_before: str | None
    """The prompt's own text before `diverged_at`; null without a divergence."""
    text_after: str | None
    """The prompt's own text from `diverged_at` on; null without a divergence."""


class LockstepExtension(Struct, forbid_unknown_fields=True):
    """Facts about a response that OpenAI's API has no field for."""

    cache: CacheUsage | None
    """Use of the prefix cache by the first choice; null if it is not known."""


class CalledToolFunction(Struct, forbid_unknown_fields=True):
    """Name and arguments of a tool call."""

    name: str
    """Name of the function."""
    arguments: str
    """Arguments of the call: a JSON object as a string."""


class ResponseToolCall(Struct, forbid_unknown_fields=True):
    """A tool call that the model made in this response."""

    id: str
    """Id of the call, for the tool message that answers it."""
    type: Literal["function"]
    """`function` is the only type."""
    function: CalledToolFunction
    """Name and arguments of the called function."""


class FunctionDelta(Struct, forbid_unknown_fields=True):
    """The part of a called function that one event of a stream adds."""

    arguments: str
    """The next piece of the arguments; all pieces together are a JSON object."""
    name: str | UnsetType = UNSET
    """Name of the function; in the first event of a call only."""


class ToolCallDelta(Struct, forbid_unknown_fields=True):
    """The part of a tool call that one event of a stream adds."""

    index: int
    """Number of the call, counted from 0."""
    function: FunctionDelta
    """The new part of the called function."""
    id: str | UnsetType = UNSET
    """Id of the call, for the tool message that answers it; in its first event only."""
    type: Literal["function"] | UnsetType = UNSET
    """`function` is the only type; in the first event of a call only."""


class ChatToken(Struct, forbid_unknown_fields=True):
    """A token and its log probability."""

    token: str
    """Text of the token."""
    logprob: float
    """Natural logarithm of its probability."""
    bytes: list[int]
    """Bytes of the token; a token may hold part of a character."""


class ChatTokenEntry(ChatToken, forbid_unknown_fields=True):
    """A generated token, its log probability, and the most likely tokens at its position."""

    top_logprobs: list[ChatToken]
    """The most likely tokens at this position, as many as requested."""


class ChatLogprobs(Struct, forbid_unknown_fields=True):
    """Log probabilities of the tokens of a chat choice, or of one piece of it in a stream."""

    content: list[ChatTokenEntry]
    """One entry per generated token."""
    refusal: None
    """Always null."""


class TextLogprobs(Struct, forbid_unknown_fields=True):
    """Log probabilities of the tokens of a text completion, in lists with one entry per token."""

    text_offset: list[int]
    """Start of each token in the text, in characters."""
    token_logprobs: list[float]
    """Natural logarithm of each token's probability."""
    tokens: list[str]
    """Text of each token."""
    top_logprobs: list[dict[str, float]] | None
    """For each token the most likely alternatives with their log probabilities; null if none were
    requested."""


class ResponseMessage(Struct, forbid_unknown_fields=True):
    """The message that the model generated for one choice."""

    role: Literal["assistant"]
    """Always `assistant`."""
    content: str | None
    """The text; null if there are only tool calls."""
    refusal: None
    """Always null."""
    reasoning_content: str | UnsetType = UNSET
    """What the model thought first; left out if it did not."""
    reasoning: str | UnsetType = UNSET
    """The same as `reasoning_content`, under its other name."""
    tool_calls: list[ResponseToolCall] | UnsetType = UNSET
    """Tool calls of the model; left out if the model calls no tool."""


class ChatChoice(Struct, forbid_unknown_fields=True):
    """One complete answer to a conversation, in a response that is not streamed."""

    index: int
    """Number of the choice, counted from 0."""
    message: ResponseMessage
    """The message of the model."""
    logprobs: ChatLogprobs | None
    """Log probabilities; null if not requested."""
    finish_reason: FinishReason
    """Why the choice ended: a stop token or string, the length limit, or tool calls."""


class TextChoice(Struct, forbid_unknown_fields=True):
    """One complete continuation of a prompt, in a response that is not streamed."""

    index: int
    """Number of the choice, counted from 0 over all prompts."""
    text: str
    """The completion, after the prompt if `echo` is set."""
    logprobs: TextLogprobs | None
    """Log probabilities; null if not requested."""
    finish_reason: FinishReason
    """Why the choice ended: a stop token or string, or the length limit."""


class ResponseBase(Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of every completion response and of every chunk of a stream."""

    id: str
    """Id of the response, the same in all chunks of a stream."""
    created: int
    """Time of the request in seconds since 1970."""
    model: str
    """Name of the served model."""
    system_fingerprint: str | None
    """First 12 characters of the model fingerprint; null if it is not known yet."""


class ChatCompletion(ResponseBase, forbid_unknown_fields=True, kw_only=True):
    """Body of a chat response that is not streamed."""

    object: Literal["chat.completion"]
    """Always `chat.completion`."""
    choices: list[ChatChoice]
    """One entry per choice, in the order of their numbers."""
    usage: TokenUsage
    """Token counts of the request."""
    lockstep: LockstepExtension
    """Facts that OpenAI's API has no field for."""


class TextCompletion(ResponseBase, forbid_unknown_fields=True, kw_only=True):
    """Body of a text completion response that is not streamed."""

    object: Literal["text_completion"]
    """Always `text_completion`."""
    choices: list[TextChoice]
    """One entry per choice, in the order of their numbers."""
    usage: TokenUsage
    """Token counts of the request."""
    lockstep: LockstepExtension
    """Facts that OpenAI's API has no field for."""


class Delta(Struct, forbid_unknown_fields=True):
    """The part of an assistant message that one event of a stream adds."""

    role: Literal["assistant"] | UnsetType = UNSET
    """Always `assistant`; in the first chunk of a choice only."""
    content: str | UnsetType | None = UNSET
    """The next piece of text; empty in a keep-alive chunk."""
    refusal: UnsetType | None = UNSET
    """Always null; in the first chunk of a choice only."""
    reasoning_content: str | UnsetType = UNSET
    """The next piece of what the model thinks before it answers."""
    reasoning: str | UnsetType = UNSET
    """The same as `reasoning_content`, under its other name."""
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    """The start of a tool call, or a piece of its arguments."""


class ChatChunkChoice(Struct, forbid_unknown_fields=True):
    """The part of one chat choice that one event of a stream adds."""

    index: int
    """Number of the choice, counted from 0."""
    delta: Delta
    """The new part of the message."""
    logprobs: ChatLogprobs | None
    """Log probabilities of this piece; null if not requested."""
    finish_reason: FinishReason | None
    """Why the choice ended: a stop token or string, the length limit, or tool calls; null before
    the last chunk."""


class ChatCompletionChunk(ResponseBase, forbid_unknown_fields=True, kw_only=True):
    """An event of a streamed chat completion; the stream ends with `data: [DONE]`."""

    object: Literal["chat.completion.chunk"]
    """Always `chat.completion.chunk`."""
    choices: list[ChatChunkChoice]
    """One choice; empty in the chunk with the token counts."""
    usage: TokenUsage | UnsetType | None = UNSET
    """Token counts, in the last chunk if `include_usage` is set; null in the chunks before it."""
    lockstep: LockstepExtension | UnsetType = UNSET
    """Facts that OpenAI's API has no field for, in the chunk with the token counts."""


class TextChunkChoice(Struct, forbid_unknown_fields=True):
    """The part of one text completion that one event of a stream adds."""

    index: int
    """Number of the choice, counted from 0 over all prompts."""
    text: str
    """The next piece of text; empty in a keep-alive chunk."""
    logprobs: TextLogprobs | None
    """Log probabilities of this piece; null if not requested."""
    finish_reason: FinishReason | None
    """Why the choice ended: a stop token or string, or the length limit; null before the last
    chunk."""


class TextCompletionChunk(ResponseBase, forbid_unknown_fields=True, kw_only=True):
    """An event of a streamed text completion; the stream ends with `data: [DONE]`."""

    object: Literal["text_completion"]
    """Always `text_completion`."""
    choices: list[TextChunkChoice]
    """One choice; empty in the chunk with the token counts."""
    usage: TokenUsage | UnsetType | None = UNSET
    """Token counts, in the last chunk if `include_usage` is set; null in the chunks before it."""
    lockstep: LockstepExtension | UnsetType = UNSET
    """Facts that OpenAI's API has no field for, in the chunk with the token counts."""


class Health(Struct, forbid_unknown_fields=True):
    """Answer of /health and /livez: the process runs."""

    status: Literal["ok"]
    """Always `ok`."""


class Readiness(Struct, forbid_unknown_fields=True):
    """Answer of /readyz: whether the gateway serves new requests, and why not."""

    ready: bool
    """Whether new requests are served."""
    reason: str
    """Why new requests are not served; empty if they are."""
    tool_format: str
    """Format in which the model writes tool calls; `off`: it cannot call tools."""
    reasoning_format: str
    """Format in which the model writes its reasoning; `off`: reasoning is part of the answer."""


class GatewayStatus(Readiness, forbid_unknown_fields=True):
    """Answer of /v1/lockstep/status: readiness and the scheduler's last report."""

    age_s: float | None
    """Seconds since the last report; null before the first."""
    scheduler: StatusReported | None
    """The scheduler's last report; null before the first."""
