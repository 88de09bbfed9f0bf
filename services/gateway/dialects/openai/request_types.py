"""Request types of OpenAI's two completion endpoints, with the fields that this server knows.

Other fields are ignored and reported, except those in `field_rules`. As in OpenAI's API, null
means that a field is not set.
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
TEMPLATE_ARGUMENTS_MAX = 32
"""Most chat template arguments of one request."""

ShortName = Annotated[str, Meta(max_length=256)]
StopString = Annotated[str, Meta(max_length=STOP_CHARS_MAX)]
MaxTokens = Annotated[int, Meta(ge=-1, le=limits.COMPLETION_TOKENS_MAX)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class TextPart(Struct, forbid_unknown_fields=True):
    """A part of a predicted text."""

    # Not a tag: msgspec accepts a missing tag where a union has only one type.
    type: Literal["text"]
    """`text` is the only type."""
    text: str
    """The text."""


class ContentPart(Struct, forbid_unknown_fields=True, kw_only=True):
    """A part of a message's content."""

    type: ShortName
    """`text`; in messages of the assistant also `refusal`, which is rendered like text. An image, a
    sound or a file becomes a note for the model in messages of tools and the assistant, and is
    refused in others. Parts of other types are left out and reported as ignored."""
    text: str | None = None
    """The text of a text part."""
    refusal: str | None = None
    """The text of a refusal."""


Parts = Annotated[list[ContentPart], Meta(max_length=CONTENT_PARTS_MAX)]


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
    strict: bool | None = None
    """True: the arguments match the schema. Default: false."""


class Tool(Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool that the model may call."""

    type: Literal["function"]
    """`function` is the only type."""
    function: ToolFunction
    """Name, description and parameters of the function."""


class NamedFunction(Struct, forbid_unknown_fields=True):
    """Name of the function that must be called."""

    name: ShortName
    """Name of one of the tools."""


class NamedToolChoice(Struct, forbid_unknown_fields=True):
    """Choice of one tool, which the model must call."""

    type: Literal["function"]
    """`function` is the only type."""
    function: NamedFunction
    """Name of the function."""


class AuthoredMessage(Struct, forbid_unknown_fields=True):
    """Fields of the messages of system, developer and user."""

    content: str | Parts
    """The text, or up to 1,024 parts, whose texts are joined."""
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

    content: str | Parts | None = None
    """The text, or up to 1,024 parts, whose texts are joined. Default: no text."""
    name: ShortName | None = None
    """Name of the assistant, passed to the chat template; at most 256 characters. Default: no name.
    """
    refusal: str | None = None
    """Text of a refusal; used only if `content` is null."""
    reasoning_content: str | None = None
    """Reasoning of the model, passed to the chat template. Default: no reasoning."""
    reasoning: str | None = None
    """Another name of `reasoning_content`, which wins if both are given."""
    tool_calls: Annotated[list[ToolCall], Meta(max_length=TOOLS_MAX)] | None = None
    """Tool calls that the model made, at most 128. Default: no calls."""
    annotations: list[Any] | None = None
    """Accepted and ignored; OpenAI's client sends it back."""
    audio: None = None
    """Accepted if null; OpenAI's client sends it back."""
    function_call: None = None
    """Accepted if null; OpenAI's client sends it back."""


class ToolMessage(Struct, tag_field="role", tag="tool", forbid_unknown_fields=True):
    """The result of a tool call, sent back to the model."""

    tool_call_id: ShortName
    """Id of the tool call in an earlier assistant message."""
    content: str | Parts | None = None
    """Result of the call: a text, or up to 1,024 parts, whose texts are joined. Default: no text.
    """


ChatMessage = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class Prediction(Struct, forbid_unknown_fields=True):
    """Text that the client expects in the answer, such as a file that the model changes."""

    type: Literal["content"]
    """`content` is the only type."""
    content: str | list[TextPart]
    """The text, or its parts. What exceeds 65,536 tokens is not used."""


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Options of a streamed response."""

    include_usage: bool | None = None
    """True: the last chunk has the token counts and `lockstep`. Default: false."""
    include_obfuscation: bool | None = None
    """Accepted and ignored; nothing is added to the events."""


class JsonSchemaFormat(Struct, forbid_unknown_fields=True):
    """The JSON schema of an answer."""

    name: ShortName | None = None
    """Accepted and ignored."""
    description: str | None = None
    """Accepted and ignored."""
    schema: dict[str, Any] | None = None
    """The schema, an object. Default: any JSON object matches."""
    strict: bool | None = None
    """The answer matches the schema in any case."""


class RequestedFormat(Struct, forbid_unknown_fields=True):
    """The requested response format."""

    type: Literal["text", "json_object", "json_schema"]
    """`text`: any text; `json_object`: a JSON object; `json_schema`: JSON that matches
    `json_schema.schema`."""
    json_schema: JsonSchemaFormat | None = None
    """The schema with its name; required with the type `json_schema`."""
    schema: dict[str, Any] | None = None
    """A schema for the type `json_object`, as llama.cpp has it. Default: any JSON object matches.
    """


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """A constraint of the text, in the form of newer versions of vLLM; one field may be set."""

    json: dict[str, Any] | str | None = None
    """A JSON schema, as an object or as text."""
    regex: str | None = None
    """A regular expression, without look-around."""
    choice: list[str] | None = None
    """Texts, one of which is the answer."""
    grammar: str | None = None
    """A grammar in Lark, whose first rule is `start`."""
    json_object: bool | None = None
    """True: the text is a JSON object."""


class SpeculationOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    """Options of speculative decoding, which changes the speed and never the tokens."""

    method: Literal["default", "off", "ngram", "draft_model", "eagle"] | None = None
    """`default` is the server's method. Others are refused unless the server is configured for
    them; `off` and `ngram` always work. Default: `default`."""
    tokens: Annotated[int, Meta(ge=0, le=limits.DRAFT_TOKENS_MAX)] | None = None
    """Largest number of draft tokens per step, 0 to 16; 0 is the server's default. Default: 0."""


class GenerationFields(Struct, forbid_unknown_fields=True, kw_only=True):
    """Request fields that chat, completions and responses have."""

    model: str
    """Name of the served model, as in `/v1/models`; another name is refused with status 404."""
    stream: bool | None = None
    """True: the response is a stream of server-sent events. Default: false."""
    stream_options: StreamOptions | None = None
    """Options of the stream; allowed only if `stream` is true."""
    n: Annotated[int, Meta(ge=1)] | None = None
    """Number of completions per prompt, 1 to `gateway.choices_max`. Default: 1."""
    max_tokens: MaxTokens | None = None
    """Largest number of completion tokens, 1 to 1,000,000; prompt and completion must fit the
    context. Default, also with -1: `gateway.default_max_tokens`, or else the room that the prompt
    leaves in the context, of which a text completion takes at most 4,096."""
    stop: StopString | list[StopString] | None = None
    """One string, or up to `gateway.stop_strings_max` strings, of up to 1,024 characters each. The
    completion ends before the first that appears; empty ones have no effect. Default: no stop
    strings."""
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    """Seed of random sampling, a signed 64-bit integer; the same seed repeats the random choices.
    Choices after the first use seeds derived from it. Default: a random seed."""
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    """Divisor of the logits, 0 to 100; 0 always takes the most likely token. Default: 1."""
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    """Sample only from the most likely tokens whose probabilities add up to this value, 0 to 1; 0
    always takes the most likely token. Default: 1, which is off."""
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
    guided_json: dict[str, Any] | str | None = None
    """The text is JSON that matches this schema, an object or its text. Default: any text."""
    guided_regex: str | None = None
    """The text matches this regular expression, which has no look-around. Default: any text."""
    guided_choice: list[str] | None = None
    """The text is one of these, at most 1,024. Default: any text."""
    guided_grammar: str | None = None
    """The text matches this grammar in Lark, whose first rule is `start`. Default: any text."""
    structured_outputs: StructuredOutputs | None = None
    """One of these constraints in the form of newer versions of vLLM. Default: any text."""
    service_tier: str | None = None
    """`priority` requests are admitted before the others of the same client, `flex` ones after
    them. Other values have no effect. Default: `auto`."""
    user: Any = None
    """Accepted and ignored: it changes no answer. The log has it as the name of the session, if
    `prompt_cache_key` is not set."""
    safety_identifier: Any = None
    """Accepted and ignored."""
    prompt_cache_key: Any = None
    """Accepted and ignored: prompts with the same beginning share the cache anyway. The log has it
    as the name of the session."""
    metadata: Any = None
    """Accepted and ignored."""
    store: Any = None
    """Accepted and ignored; the server stores nothing."""


class ChatCompletionRequest(GenerationFields, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MESSAGES_MAX)]
    """The conversation, 1 to 4,096 messages in order."""
    max_completion_tokens: MaxTokens | None = None
    """OpenAI's newer name of `max_tokens`; if both are given they must be equal."""
    logprobs: bool | None = None
    """True: return log probabilities of the answer's tokens; reasoning and tool calls have none.
    Default: false."""
    top_logprobs: Annotated[int, Meta(ge=0, le=limits.TOP_LOGPROBS_MAX)] | None = None
    """Number of most likely alternatives per token, 0 to 20; it requires `logprobs`. Default: 0."""
    tools: Annotated[list[Tool], Meta(max_length=TOOLS_MAX)] | None = None
    """Tools that the model may call, at most 128, with different names. Default: no tools."""
    tool_choice: str | NamedToolChoice | None = None
    """`auto`: the model decides whether it calls tools; `none`: tools are not shown to the model;
    `required`: it must call a tool; an object: it must call that tool. Default: `auto`."""
    parallel_tool_calls: bool | None = None
    """False: the answer ends after its first tool call. Default: true."""
    reasoning_effort: ShortName | None = None
    """How long the model reasons: `minimal`, `low`, `medium`, `high`, `xhigh` and `max` are passed
    to the chat template as `reasoning_effort` low, medium or high; `none` sets `enable_thinking` to
    false. Other values are ignored. Default: the chat template's own."""
    prediction: Prediction | None = None
    """Text that the answer may repeat. The server proposes its tokens as drafts, which makes edits
    faster and changes no token. Ignored where speculation is off."""
    verbosity: Any = None
    """Accepted and ignored."""
    prompt_cache_retention: Any = None
    """Accepted and ignored."""
    response_format: RequestedFormat | None = None
    """Format of the answer: text, a JSON object, or JSON that matches a schema. Default: text."""
    modalities: list[Literal["text"]] | None = None
    """Kinds of output; only `text` is supported. Default: text."""
    chat_template_kwargs: (
        Annotated[dict[str, Any], Meta(max_length=TEMPLATE_ARGUMENTS_MAX)] | None
    ) = None
    """Arguments for the model's chat template, such as `enable_thinking`, by name; at most 32.
    Default: no arguments."""


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
    """Number of completions per prompt of which the `n` with the highest mean log probability per
    token are returned, the best first; not with `stream`. `usage` counts all. Default: `n`."""
    suffix: str | None = None
    """Text after the completion, which then fills the middle between `prompt` and it. The model's
    tokenizer must have markers for that. Default: no suffix."""
