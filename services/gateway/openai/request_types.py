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
    """A text part of the content of a system, developer, user or tool message."""

    # Not a tag: msgspec accepts a missing tag where a union has only one type.
    type: Literal["text"]
    """`text` is the only supported type; images, audio and files are refused."""
    text: str
    """The text."""


class AssistantTextPart(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """A text part of the content of an assistant message."""

    text: str
    """The text."""


class RefusalPart(Struct, tag_field="type", tag="refusal", forbid_unknown_fields=True):
    """A refusal part of an assistant message; rendered like text."""

    refusal: str
    """The text of the refusal."""


Parts = Annotated[list[TextPart], Meta(min_length=1, max_length=CONTENT_PARTS_MAX)]
AssistantParts = Annotated[
    list[AssistantTextPart | RefusalPart], Meta(min_length=1, max_length=CONTENT_PARTS_MAX)
]


class CalledFunction(Struct, forbid_unknown_fields=True):
    """Name and arguments of the function that an earlier tool call named."""

    name: ShortName
    """Name of the function, at most 256 characters."""
    arguments: str
    """Arguments of the call: a JSON object as a string."""


class ToolCall(Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool call of an earlier assistant message."""

    id: ShortName
    """Id of the call, at most 256 characters; a tool message names it."""
    type: Literal["function"] = "function"
    """`function` is the only type."""
    function: CalledFunction
    """Name and arguments of the called function."""


class ToolFunction(Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Name, description and parameters of a tool."""

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    """Name of the function: 1 to 64 letters, digits, dots, underscores or hyphens."""
    description: str | None = None
    """What the function does, shown to the model. Default: no description."""
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments, shown to the model. Default: no parameters."""
    strict: Literal[False] | None = None
    """Only false and null are supported: arguments are not constrained to the schema."""


class Tool(Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool that the model may call."""

    type: Literal["function"]
    """`function` is the only type."""
    function: ToolFunction
    """Name, description and parameters of the function."""


class AuthoredMessage(Struct, forbid_unknown_fields=True):
    """Fields of the messages of system, developer and user."""

    content: str | Parts
    """The text, or 1 to 1,024 text parts, which are joined."""
    name: ShortName | None = None
    """Name of the author, passed to the chat template; at most 256 characters. Default: no name."""


class SystemMessage(AuthoredMessage, tag_field="role", tag="system"):
    """Instructions of the application to the model."""


class DeveloperMessage(AuthoredMessage, tag_field="role", tag="developer"):
    """OpenAI's newer name of a system message; rendered as one."""


class UserMessage(AuthoredMessage, tag_field="role", tag="user"):
    """A message of the user."""


class AssistantMessage(
    Struct, tag_field="role", tag="assistant", forbid_unknown_fields=True, kw_only=True
):
    """A message of the model. OpenAI's client sends such objects back with their null fields."""

    content: str | AssistantParts | None = None
    """The text, or 1 to 1,024 parts, which are joined. It may be null if `tool_calls` or `refusal`
    is given."""
    name: ShortName | None = None
    """Name of the assistant, passed to the chat template; at most 256 characters. Default: no name.
    """
    refusal: str | None = None
    """Text of a refusal; used only if `content` is null."""
    reasoning_content: str | None = None
    """Reasoning of the model, passed to the chat template. Default: no reasoning."""
    tool_calls: Annotated[list[ToolCall], Meta(max_length=TOOLS_MAX)] | None = None
    """Tool calls that the model made, at most 128. Default: no calls."""
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    """Accepted if empty; OpenAI's client sends it back."""
    audio: None = None
    """Accepted if null; OpenAI's client sends it back."""
    function_call: None = None
    """Accepted if null; OpenAI's client sends it back."""


class ToolMessage(Struct, tag_field="role", tag="tool", forbid_unknown_fields=True):
    """The result of a tool call, sent back to the model."""

    tool_call_id: ShortName
    """Id of the tool call in an earlier assistant message."""
    content: str | Parts
    """Result of the call: a text, or 1 to 1,024 text parts, which are joined."""


ChatMessage = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Options of a streamed response."""

    include_usage: bool | None = None
    """True: the last chunk has the token counts and `lockstep`. Default: false."""
    include_obfuscation: None = None
    """Not supported; only null is accepted."""


class RequestedFormat(Struct, forbid_unknown_fields=True):
    """The requested response format; only plain text is supported."""

    type: str
    """`text` is the only supported type; others are refused with status 400."""


class TemplateArguments(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Chat template arguments that a client may set."""

    enable_thinking: bool | None = None
    """Whether the model may write its reasoning first. Default: the chat template's own."""


class SpeculationOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    """Options of speculative decoding, which changes the speed and never the tokens."""

    method: Literal["default", "off", "ngram", "draft_model", "eagle"] | None = None
    """`default` is the server's method. Others are refused unless the server is configured for
    them; `off` and `ngram` always work. Default: `default`."""
    tokens: Annotated[int, Meta(ge=0, le=limits.DRAFT_TOKENS_MAX)] | None = None
    """Largest number of draft tokens per step, 0 to 16; 0 is the server's default. Default: 0."""


class GenerationFields(Struct, forbid_unknown_fields=True, kw_only=True):
    """Request fields that both completion endpoints have."""

    model: str
    """Name of the served model, as in `/v1/models`; another name is refused with status 404."""
    stream: bool | None = None
    """True: the response is a stream of server-sent events. Default: false."""
    stream_options: StreamOptions | None = None
    """Options of the stream; allowed only if `stream` is true."""
    n: Annotated[int, Meta(ge=1)] | None = None
    """Number of completions per prompt, 1 to `gateway.choices_max`. Default: 1."""
    max_tokens: Annotated[int, Meta(ge=1, le=limits.COMPLETION_TOKENS_MAX)] | None = None
    """Largest number of completion tokens, 1 to 1,000,000; prompt and completion must fit the
    context. Default: `gateway.default_max_tokens`, or less if the context is shorter."""
    stop: StopString | list[StopString] | None = None
    """One string, or up to `gateway.stop_strings_max` strings, of 1 to 1,024 characters each. The
    completion ends before the first that appears. Default: no stop strings."""
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    """Seed of random sampling, a signed 64-bit integer; the same seed repeats the random choices.
    Choices after the first use seeds derived from it. Default: a random seed."""
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    """Divisor of the logits, 0 to 100; 0 always takes the most likely token. Default: 1."""
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    """Sample only from the most likely tokens whose probabilities add up to this value, above 0 and
    up to 1. Default: 1, which is off."""
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """Sample only from this many most likely tokens; 0 and -1 mean off, as in vLLM. Default: 0."""
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    """Discard tokens less likely than this fraction of the most likely token's probability, 0 to 1.
    Default: 0, which is off."""
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] | None = None
    """Divides positive and multiplies negative logits of tokens in the prompt or completion, above
    0 and up to 100. Default: 1, which is off."""
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    """Subtracted from the logits of tokens that are in the completion, -2 to 2. Default: 0."""
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    """Subtracted from a token's logit per occurrence in the completion, -2 to 2. Default: 0."""
    logit_bias: (
        Annotated[
            dict[TokenId, Annotated[float, Meta(ge=-100.0, le=100.0)]],
            Meta(max_length=limits.LOGIT_BIAS_MAX),
        ]
        | None
    ) = None
    """Values added to logits, -100 to 100, by token id; at most 1,024 entries. Default: no bias."""
    cache_salt: Annotated[str, Meta(max_length=limits.CACHE_SALT_CHARS_MAX)] | None = None
    """Only requests with the same salt share cached prefixes, as in vLLM; at most 256 characters.
    With API keys the salt applies within one key name. Default: no salt."""
    speculation: Literal["off"] | SpeculationOptions | None = None
    """Options of speculative decoding, a field of Lockstep; "off" is short for the method `off`.
    Default: the server's setting."""
    user: Annotated[str, Meta(max_length=1_024)] | None = None
    """Accepted and ignored; at most 1,024 characters."""
    metadata: Annotated[dict[str, str], Meta(max_length=METADATA_MAX)] | None = None
    """Accepted and ignored; at most 16 entries."""
    store: bool | None = None
    """Only false and null are accepted; the server stores nothing."""
    service_tier: Literal["auto", "default"] | None = None
    """`auto` and `default` are accepted and ignored."""


class ChatCompletionRequest(GenerationFields, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MESSAGES_MAX)]
    """The conversation, 1 to 4,096 messages in order."""
    max_completion_tokens: Annotated[int, Meta(ge=1, le=limits.COMPLETION_TOKENS_MAX)] | None = None
    """OpenAI's newer name of `max_tokens`; if both are given they must be equal."""
    logprobs: bool | None = None
    """True: return log probabilities of the completion's tokens; not supported with `tools`.
    Default: false."""
    top_logprobs: Annotated[int, Meta(ge=0, le=limits.TOP_LOGPROBS_MAX)] | None = None
    """Number of most likely alternatives per token, 0 to 20; it requires `logprobs`. Default: 0."""
    tools: Annotated[list[Tool], Meta(max_length=TOOLS_MAX)] | None = None
    """Tools that the model may call, at most 128, with different names. Default: no tools."""
    tool_choice: str | dict[str, Any] | None = None
    """`auto`: the model decides whether it calls tools; `none`: tools are not shown to the model.
    Default: `auto`."""
    parallel_tool_calls: bool | None = None
    """Only true is supported, and only with `tools`: one answer may call several tools.
    Default: true."""
    response_format: RequestedFormat | None = None
    """Format of the answer; only `{"type": "text"}` is supported. Default: text."""
    modalities: list[Literal["text"]] | None = None
    """Kinds of output; only `text` is supported. Default: text."""
    chat_template_kwargs: TemplateArguments | None = None
    """Arguments for the model's chat template. Default: no arguments."""


class CompletionRequest(GenerationFields, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: str | list[Any]
    """A text, up to 64 texts, token ids, or up to 64 lists of token ids. `n` times the number of
    prompts may be at most 128."""
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    """Return log probabilities with this number of alternatives per token, 0 to 5. Default: no
    log probabilities."""
    echo: bool | None = None
    """True: begin each text with its prompt; not supported with `logprobs`. Default: false."""
    best_of: Annotated[int, Meta(ge=1)] | None = None
    """Only the value of `n` is accepted. Default: `n`."""
    suffix: None = None
    """Not supported; only null is accepted."""
