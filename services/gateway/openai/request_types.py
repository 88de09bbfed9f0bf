"""The JSON bodies of OpenAI's two completion endpoints, as far as this server does what they ask.

A field that is not here is refused by name. A null means "not given", as in OpenAI's API.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from shared import limits

MESSAGES_MAX = 4_096
"""Messages of one conversation."""
CONTENT_PARTS_MAX = 1_024
"""Parts of one message."""
TOOLS_MAX = 128
"""Tools of one request, as in OpenAI's API."""
PROMPTS_MAX = 64
"""Prompts of one completions request."""
STOP_CHARS_MAX = 1_024
"""Characters of one stop string."""
METADATA_MAX = 16
"""Entries of `metadata`, as in OpenAI's API."""

ShortName = Annotated[str, Meta(max_length=256)]
StopString = Annotated[str, Meta(min_length=1, max_length=STOP_CHARS_MAX)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class TextPart(Struct, forbid_unknown_fields=True):
    """One part of a message's content."""

    # No tag: msgspec would take a part without one where only one kind of part is expected.
    type: Literal["text"]
    text: str


class AssistantTextPart(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """One part of what an assistant said."""

    text: str


class RefusalPart(Struct, tag_field="type", tag="refusal", forbid_unknown_fields=True):
    """What an assistant said when it declined; rendered like text."""

    refusal: str


Parts = Annotated[list[TextPart], Meta(min_length=1, max_length=CONTENT_PARTS_MAX)]
AssistantParts = Annotated[
    list[AssistantTextPart | RefusalPart], Meta(min_length=1, max_length=CONTENT_PARTS_MAX)
]


class CalledFunction(Struct, forbid_unknown_fields=True):
    """The function of a tool call."""

    name: ShortName
    arguments: str
    """A JSON object as text."""


class ToolCall(Struct, forbid_unknown_fields=True, kw_only=True):
    """A call that the assistant made earlier in the conversation."""

    id: ShortName
    type: Literal["function"] = "function"
    function: CalledFunction


class ToolFunction(Struct, forbid_unknown_fields=True, kw_only=True):
    """What a tool is called and takes."""

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema, shown to the model."""
    strict: Literal[False] | None = None
    """Nothing here forces a model's arguments into the schema."""


class Tool(Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool that the model may call."""

    type: Literal["function"]
    function: ToolFunction


class SystemMessage(Struct, tag_field="role", tag="system", forbid_unknown_fields=True):
    """What the operator of the application says."""

    content: str | Parts
    name: ShortName | None = None


class DeveloperMessage(Struct, tag_field="role", tag="developer", forbid_unknown_fields=True):
    """OpenAI's newer word for a system message; templates know it as that."""

    content: str | Parts
    name: ShortName | None = None


class UserMessage(Struct, tag_field="role", tag="user", forbid_unknown_fields=True):
    """What the user says."""

    content: str | Parts
    name: ShortName | None = None


class AssistantMessage(
    Struct, tag_field="role", tag="assistant", forbid_unknown_fields=True, kw_only=True
):
    """What the model said. OpenAI's client sends its own objects back, null fields and all."""

    content: str | AssistantParts | None = None
    name: ShortName | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=TOOLS_MAX)] | None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    audio: None = None
    function_call: None = None


class ToolMessage(Struct, tag_field="role", tag="tool", forbid_unknown_fields=True):
    """What a tool returned."""

    tool_call_id: ShortName
    content: str | Parts


ChatMessage = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Only with `stream`."""

    include_usage: bool | None = None
    include_obfuscation: None = None


class RequestedFormat(Struct, forbid_unknown_fields=True):
    """Only plain text so far."""

    type: str


class TemplateArguments(Struct, forbid_unknown_fields=True):
    """The arguments of chat templates that a client may set."""

    enable_thinking: bool | None = None


class SpeculationOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    """How drafts are proposed; they change how fast tokens come, never which."""

    method: Literal["default", "off", "ngram", "draft_model", "eagle"] | None = None
    """`default`: as the server is set up. `options` refuses what it cannot do."""
    tokens: Annotated[int, Meta(ge=0, le=limits.DRAFT_TOKENS_MAX)] | None = None
    """Most drafts per step; 0: as the server is set up."""


class GenerationFields(Struct, forbid_unknown_fields=True, kw_only=True):
    """What both endpoints share."""

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
    """0 and -1 (as in vLLM) mean off."""
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
    """As in vLLM: only requests with the same salt share cached prefixes."""
    speculation: Literal["off"] | SpeculationOptions | None = None
    """Lockstep's own field. "off" is short for the method `off`."""
    user: Annotated[str, Meta(max_length=1_024)] | None = None
    """Without effect, as are `metadata`, `store` false and `service_tier` auto or default."""
    metadata: Annotated[dict[str, str], Meta(max_length=METADATA_MAX)] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default"] | None = None


class ChatCompletionRequest(GenerationFields, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/chat/completions."""

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
    """POST /v1/completions."""

    prompt: str | list[Any]
    """A text, texts, token ids, or lists of token ids; `completions` checks which."""
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1)] | None = None
    suffix: None = None
