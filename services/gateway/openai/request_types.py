"""Request types of OpenAI's two completion endpoints, with the fields that this server supports.

Other fields are refused by name. As in OpenAI's API, null means that a field is not set.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from shared import limits

MESSAGES_MAX = 4_096
"""Most messages of one conversation."""
CONTENT_PARTS_MAX = 1_024
"""Most parts of one message."""
TOOLS_MAX = 128
"""Most tools of one request, as in OpenAI's API."""
PROMPTS_MAX = 64
"""Most prompts of one completions request."""
STOP_CHARS_MAX = 1_024
"""Longest stop string in characters."""
METADATA_MAX = 16
"""Most entries of `metadata`, as in OpenAI's API."""

ShortName = Annotated[str, Meta(max_length=256)]
StopString = Annotated[str, Meta(min_length=1, max_length=STOP_CHARS_MAX)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class TextPart(Struct, forbid_unknown_fields=True):
    """A text part of a message's content."""

    # Not a tag: msgspec accepts a missing tag where a union has only one type.
    type: Literal["text"]
    text: str


class AssistantTextPart(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """A text part of an assistant message."""

    text: str


class RefusalPart(Struct, tag_field="type", tag="refusal", forbid_unknown_fields=True):
    """A refusal part of an assistant message; rendered like text."""

    refusal: str


Parts = Annotated[list[TextPart], Meta(min_length=1, max_length=CONTENT_PARTS_MAX)]
AssistantParts = Annotated[
    list[AssistantTextPart | RefusalPart], Meta(min_length=1, max_length=CONTENT_PARTS_MAX)
]


class CalledFunction(Struct, forbid_unknown_fields=True):
    """The function of a tool call."""

    name: ShortName
    arguments: str
    """A JSON object as a string."""


class ToolCall(Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool call of an earlier assistant message."""

    id: ShortName
    type: Literal["function"] = "function"
    function: CalledFunction


class ToolFunction(Struct, forbid_unknown_fields=True, kw_only=True):
    """Name, description and parameters of a tool."""

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema, shown to the model."""
    strict: Literal[False] | None = None
    """True is not supported: arguments are not constrained to the schema."""


class Tool(Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool that the model may call."""

    type: Literal["function"]
    function: ToolFunction


class SystemMessage(Struct, tag_field="role", tag="system", forbid_unknown_fields=True):
    """Instructions of the application."""

    content: str | Parts
    name: ShortName | None = None


class DeveloperMessage(Struct, tag_field="role", tag="developer", forbid_unknown_fields=True):
    """OpenAI's newer name of a system message; rendered as one."""

    content: str | Parts
    name: ShortName | None = None


class UserMessage(Struct, tag_field="role", tag="user", forbid_unknown_fields=True):
    """A message of the user."""

    content: str | Parts
    name: ShortName | None = None


class AssistantMessage(
    Struct, tag_field="role", tag="assistant", forbid_unknown_fields=True, kw_only=True
):
    """A message of the model. OpenAI's client sends such objects back with their null fields."""

    content: str | AssistantParts | None = None
    name: ShortName | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=TOOLS_MAX)] | None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    audio: None = None
    function_call: None = None


class ToolMessage(Struct, tag_field="role", tag="tool", forbid_unknown_fields=True):
    """The result of a tool call."""

    tool_call_id: ShortName
    content: str | Parts


ChatMessage = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Options of streamed responses."""

    include_usage: bool | None = None
    include_obfuscation: None = None


class RequestedFormat(Struct, forbid_unknown_fields=True):
    """The requested response format; only plain text is supported."""

    type: str


class TemplateArguments(Struct, forbid_unknown_fields=True):
    """Chat template arguments that a client may set."""

    enable_thinking: bool | None = None


class SpeculationOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    """Options of speculative decoding, which changes the speed and never the tokens."""

    method: Literal["default", "off", "ngram", "draft_model", "eagle"] | None = None
    """`default` is the server's method. `validation` refuses methods that are not set up."""
    tokens: Annotated[int, Meta(ge=0, le=limits.DRAFT_TOKENS_MAX)] | None = None
    """Most drafts per step; 0 is the server's default."""


class GenerationFields(Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of both endpoints."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=limits.COMPLETION_TOKENS_MAX)] | None = None
    stop: StopString | list[StopString] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """0 and -1 mean off, as in vLLM."""
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    logit_bias: (
        Annotated[
            dict[TokenId, Annotated[float, Meta(ge=-100.0, le=100.0)]],
            Meta(max_length=limits.LOGIT_BIAS_MAX),
        ]
        | None
    ) = None
    cache_salt: Annotated[str, Meta(max_length=limits.CACHE_SALT_CHARS_MAX)] | None = None
    """Only requests with the same salt share cached prefixes, as in vLLM."""
    speculation: Literal["off"] | SpeculationOptions | None = None
    """Lockstep's own field. "off" is short for the method `off`."""
    user: Annotated[str, Meta(max_length=1_024)] | None = None
    """No effect, like `metadata`, `store` false and `service_tier` auto or default."""
    metadata: Annotated[dict[str, str], Meta(max_length=METADATA_MAX)] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default"] | None = None


class ChatCompletionRequest(GenerationFields, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MESSAGES_MAX)]
    max_completion_tokens: Annotated[int, Meta(ge=1, le=limits.COMPLETION_TOKENS_MAX)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=limits.TOP_LOGPROBS_MAX)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=TOOLS_MAX)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: RequestedFormat | None = None
    modalities: list[Literal["text"]] | None = None
    chat_template_kwargs: TemplateArguments | None = None


class CompletionRequest(GenerationFields, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: str | list[Any]
    """A text, a list of texts, token ids, or lists of token ids; `completions` checks it."""
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1)] | None = None
    suffix: None = None
