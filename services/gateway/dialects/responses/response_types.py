"""Response types of the Responses API for the OpenAPI document.

`serializer` and `stored_items` write the responses; tests check real responses against these
types.
"""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from services.gateway.dialects.openai.response_types import LockstepExtension


class ResponseError(Struct, forbid_unknown_fields=True):
    """Why a response failed."""

    code: str
    """`context_length_exceeded`, `rate_limit_exceeded`, `server_error` or `invalid_prompt`."""
    message: str
    """A sentence with cause and remedy."""


class IncompleteDetails(Struct, forbid_unknown_fields=True):
    """Why a response is not complete."""

    reason: Literal["max_output_tokens"]
    """The answer reached `max_output_tokens` or the end of the context."""


class CachedInputTokens(Struct, forbid_unknown_fields=True):
    """Input tokens by origin."""

    cached_tokens: int
    """Tokens found in the prefix cache, in memory or on SSD."""
    cache_write_tokens: int
    """Tokens that were computed."""


class GeneratedTokens(Struct, forbid_unknown_fields=True):
    """Output tokens by kind."""

    reasoning_tokens: int
    """Tokens whose text is reasoning."""


class ResponseUsage(Struct, forbid_unknown_fields=True):
    """Token counts of a response."""

    input_tokens: int
    """Tokens of the prompt."""
    input_tokens_details: CachedInputTokens
    """Tokens of the prompt by origin."""
    output_tokens: int
    """Generated tokens, reasoning included."""
    output_tokens_details: GeneratedTokens
    """Generated tokens by kind."""
    total_tokens: int
    """Sum of both."""


class ModelResponse(Struct, forbid_unknown_fields=True, kw_only=True):
    """A response of the Responses API, complete or at the beginning of its stream."""

    id: str
    """Id of the response."""
    object: Literal["response"]
    """Always `response`."""
    created_at: int
    """Time of the request in seconds since 1970."""
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    """State of the response."""
    completed_at: int | None
    """Time of its end in seconds since 1970."""
    error: ResponseError | None
    """Why it failed."""
    incomplete_details: IncompleteDetails | None
    """Why it is not complete."""
    model: str
    """Name of the model as the request has it."""
    output: list[dict[str, Any]]
    """Items: `message`, `reasoning`, `function_call`, `custom_tool_call`, `tool_search_call`."""
    usage: ResponseUsage | None
    """Token counts; null before the end."""
    lockstep: LockstepExtension | UnsetType = UNSET
    """Facts that OpenAI's API has no field for."""
    background: bool
    """Always false."""
    store: bool
    """The response is kept for `previous_response_id` and GET."""
    # The other fields repeat the request.
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    service_tier: str
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    user: Any


class InputTokenCount(Struct, forbid_unknown_fields=True):
    """Answer of /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"]
    """Always `response.input_tokens`."""
    input_tokens: int
    """Tokens of the prompt."""


class DeletedResponse(Struct, forbid_unknown_fields=True):
    """Answer to the deletion of a stored response."""

    id: str
    """Id of the response."""
    object: Literal["response"]
    """Always `response`."""
    deleted: bool
    """Always true."""


class InputItemPage(Struct, forbid_unknown_fields=True):
    """One page of the input items of a stored response."""

    object: Literal["list"]
    """Always `list`."""
    data: list[dict[str, Any]]
    """The items, those of earlier responses included."""
    first_id: str | None
    """Id of the page's first item."""
    last_id: str | None
    """Id of the page's last item."""
    has_more: bool
    """More items follow."""
