"""Request types of Anthropic's Messages API, with the fields that this server knows.

Other fields are ignored and reported. Blocks of content and tools are read one by one, because
clients send kinds that did not exist when this was written.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from services.gateway.http.ignored_fields import RefusedField
from shared import limits

MESSAGES_MAX = 4_096
"""Most messages of one conversation."""
BLOCKS_MAX = 1_024
"""Most blocks of one message."""
TOOLS_MAX = 1_024
"""Most tools of one request. Agents declare hundreds that are found by search."""
STOP_CHARS_MAX = 1_024
"""Longest stop sequence in characters."""

ShortName = Annotated[str, Meta(max_length=256)]
Blocks = Annotated[list[dict[str, Any]], Meta(max_length=BLOCKS_MAX)]
StopSequence = Annotated[str, Meta(max_length=STOP_CHARS_MAX)]

WITHOUT_EFFECT = (
    "metadata", "service_tier", "context_management", "container", "inference_geo", "speed",
)  # fmt: skip
"""Known fields that change nothing. They are reported as ignored."""
REFUSED_FIELDS = {
    "output_format": RefusedField("use output_config.format."),
    "mcp_servers": RefusedField("this server calls no MCP servers: let the client call them."),
}
"""Fields whose neglect would give a wrong answer, with the remedy."""


class InputMessage(Struct, forbid_unknown_fields=True):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    """`system` messages may stand anywhere; they stay at their place."""
    content: str | Blocks
    """The text, or up to 1,024 blocks. Images and documents that are no text become a note for the
    model; blocks of unknown kinds are left out. Both are reported as ignored."""


class ThinkingConfig(Struct, forbid_unknown_fields=True, kw_only=True):
    """Whether the model reasons before it answers."""

    type: ShortName
    """`enabled` and `disabled` are passed to the chat template as `enable_thinking`; `adaptive` is
    the template's own default, and so are other values, which are reported as ignored."""
    budget_tokens: int | None = None
    """Accepted and ignored."""
    display: str | None = None
    """Accepted and ignored; reasoning is always shown."""


class OutputConfig(Struct, forbid_unknown_fields=True, kw_only=True):
    """Effort and format of the answer."""

    effort: ShortName | None = None
    """How long the model reasons: `low`, `medium`, `high`, `xhigh` and `max` are passed to the chat
    template as `reasoning_effort` low, medium or high. Other values are ignored. Default: the
    template's own."""
    format: dict[str, Any] | None = None
    """Format of the answer: an object with the type `json_schema` and a `schema`. Default: text."""


class RequestedToolChoice(Struct, forbid_unknown_fields=True, kw_only=True):
    """Whether and which tools the model calls."""

    type: Literal["auto", "none", "any", "tool"]
    """`auto`: the model decides; `none`: tools are not shown; `any` and `tool`: it must call a
    tool."""
    name: ShortName | None = None
    """The tool that must be called, with `tool`."""
    disable_parallel_tool_use: bool | None = None
    """True: the answer ends after its first tool call. Default: false."""


class CountTokensRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/messages/count_tokens, and the same fields of POST /v1/messages."""

    model: str
    """Name of the served model or an alias; another name is refused with status 404."""
    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=MESSAGES_MAX)]
    """The conversation, 1 to 4,096 messages in order. The last one is not the assistant's, except
    where tokens are only counted."""
    system: str | Blocks | None = None
    """Instructions, as a text or text blocks. Default: none."""
    tools: Annotated[list[dict[str, Any]], Meta(max_length=TOOLS_MAX)] | None = None
    """Tools that the model may call, at most 1,024. Those with `defer_loading` are shown to the
    model where a `tool_reference` names them. Tools that run at Anthropic are left out and reported
    as ignored. Default: no tools."""
    tool_choice: RequestedToolChoice | None = None
    """Whether and which tools the model calls. Default: `auto`."""
    thinking: ThinkingConfig | None = None
    """Whether the model reasons first. Default: the chat template's own."""
    output_config: OutputConfig | None = None
    """Effort and format of the answer. Default: none."""
    cache_control: Any = None
    """Accepted: every prompt is cached. With it here or on any part of the request, `usage` counts
    the tokens that are new in the cache apart."""
    metadata: Any = None
    """Accepted and ignored: it changes no answer. The log has its `user_id`, or the `session_id` in
    that, as the name of the session, if no header names one."""
    service_tier: Any = None
    """Accepted and ignored."""
    context_management: Any = None
    """Accepted and ignored: nothing is removed from the conversation."""
    container: Any = None
    """Accepted and ignored."""
    inference_geo: Any = None
    """Accepted and ignored."""
    speed: Any = None
    """Accepted and ignored."""


class MessagesRequest(CountTokensRequest, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/messages."""

    max_tokens: Annotated[int, Meta(ge=1, le=limits.COMPLETION_TOKENS_MAX)]
    """Largest number of completion tokens, 1 to 1,000,000. Fewer if the context has less room."""
    stream: bool | None = None
    """True: the response is a stream of server-sent events. Default: false."""
    stop_sequences: list[StopSequence] | None = None
    """Up to `gateway.stop_strings_max` strings of up to 1,024 characters each. The completion ends
    before the first that appears; empty ones have no effect. Default: none."""
    temperature: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    """Divisor of the logits, 0 to 1; 0 always takes the most likely token. Default: 1."""
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    """Sample only from the most likely tokens whose probabilities add up to this value, 0 to 1; 0
    always takes the most likely token. Default: 1, which is off."""
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    """Sample only from this many most likely tokens; 0 is off. Default: 0."""


class TextBlock(Struct):
    """A block of text."""

    text: str


class ThinkingBlock(Struct):
    """Reasoning of an earlier answer."""

    thinking: str


class ToolUseBlock(Struct):
    """A tool call of an earlier answer."""

    id: ShortName
    name: ShortName
    input: dict[str, Any]


class ToolResultBlock(Struct):
    """The result of a tool call."""

    tool_use_id: ShortName
    content: str | Blocks | None = None
    is_error: bool | None = None


class ToolReferenceBlock(Struct):
    """The place where a deferred tool is shown to the model."""

    tool_name: ShortName


class DocumentSource(Struct):
    """Where a document's content is."""

    type: str
    data: str = ""
    content: str | Blocks = ""


class DocumentBlock(Struct):
    """A document, whose text is shown if it is text."""

    source: DocumentSource
    title: str | None = None
    context: str | None = None


class SearchResultBlock(Struct):
    """A result of a search that the client made."""

    source: str
    title: str
    content: Blocks


class ClientTool(Struct, kw_only=True):
    """A tool that the client runs."""

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,128}$")]
    input_schema: dict[str, Any]
    description: str | None = None
    defer_loading: bool | None = None
    strict: bool | None = None
