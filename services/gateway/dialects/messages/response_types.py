"""Response types of Anthropic's Messages API for the OpenAPI document.

`serializer` and `model_list` write the responses; tests check real responses against these
types.
"""

from typing import Any, Literal

from msgspec import Struct


class MessageText(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """A piece of the answer."""

    text: str
    """The text."""


class MessageThinking(Struct, tag_field="type", tag="thinking", forbid_unknown_fields=True):
    """What the model thought before the next block."""

    thinking: str
    """The reasoning."""
    signature: str
    """Digest of the reasoning. It is accepted back and not checked."""


class MessageToolUse(Struct, tag_field="type", tag="tool_use", forbid_unknown_fields=True):
    """A tool call."""

    id: str
    """Id of the call, for the `tool_result` block that answers it."""
    name: str
    """Name of the tool."""
    input: dict[str, Any]
    """Arguments of the call. In a stream they follow as `input_json_delta` events."""


class MessageUsage(Struct, forbid_unknown_fields=True):
    """Token counts of a message. The three counts of the prompt add up to its length."""

    input_tokens: int
    """Prompt tokens that are in none of the other counts."""
    cache_creation_input_tokens: int
    """Prompt tokens that are new in the cache; 0 unless the request has `cache_control`."""
    cache_read_input_tokens: int
    """Prompt tokens found in the cache, in memory or on SSD."""
    output_tokens: int
    """Tokens of the completion, reasoning included."""


class MessagesResponse(Struct, forbid_unknown_fields=True):
    """Body of a message that is not streamed, and the start of a streamed one."""

    id: str
    """Id of the message."""
    type: Literal["message"]
    """Always `message`."""
    role: Literal["assistant"]
    """Always `assistant`."""
    model: str
    """Name of the model, as in the request."""
    content: list[MessageText | MessageThinking | MessageToolUse]
    """The blocks of the message, in the order in which the model wrote them."""
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    """Why the message ended; null at the start of a stream."""
    stop_sequence: str | None
    """The stop sequence that ended it; null for other reasons."""
    usage: MessageUsage
    """Token counts."""


class TokenCount(Struct, forbid_unknown_fields=True):
    """Answer of /v1/messages/count_tokens."""

    input_tokens: int
    """Length of the prompt in tokens."""


class MessagesErrorDetail(Struct, forbid_unknown_fields=True):
    """Kind and text of an error."""

    type: Literal[
        "invalid_request_error", "authentication_error", "permission_error", "not_found_error",
        "request_too_large", "rate_limit_error", "timeout_error", "api_error", "overloaded_error",
    ]  # fmt: skip
    """Kind of the error; it follows from the status."""
    message: str
    """A sentence with cause and remedy, or `prompt is too long: N tokens > M maximum`."""


class MessagesError(Struct, forbid_unknown_fields=True):
    """Body of every status from 400 of the Messages API, and data of the event `error`."""

    type: Literal["error"]
    """Always `error`."""
    error: MessagesErrorDetail
    """The error."""
    request_id: str
    """Id of the response, also in the header `request-id`."""
