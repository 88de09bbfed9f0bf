"""Request type of POST /v1/responses: the fields that this server reads.

Items and tools are read one by one in `items` and `tools`, because kinds that this server does not
know must not make a request fail. As in OpenAI's API, null means that a field is not set.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from services.gateway.dialects.openai.request_types import (
    TEMPLATE_ARGUMENTS_MAX,
    GenerationFields,
    MaxTokens,
    ShortName,
)
from shared import limits

METADATA_MAX = 16
"""Most entries of `metadata`, as in OpenAI's API."""
ITEMS_MAX = 16_384
"""Most input items of one request, with those of an earlier response: a long agent session."""
OFFERED_TOOLS_MAX = 1_024
"""Most tools of one request, those inside namespaces included."""

Effort = Annotated[str, Meta(min_length=1, max_length=32)]


class ReasoningOptions(Struct, forbid_unknown_fields=True):
    """How the model thinks before it answers."""

    effort: Effort | None = None
    """How much to think: `minimal`, `low`, `medium`, `high`, `xhigh` and `max` are passed to the
    chat template as low, medium or high; `none` asks the template for no reasoning. Other values
    are ignored. Default: the template's own."""
    summary: ShortName | None = None
    """With any text but `none`, such as `auto`, the reasoning is sent as the summary of its item,
    in full. Default: it is sent as `reasoning_text`."""
    generate_summary: ShortName | None = None
    """Older name of `summary`."""


class TextOptions(Struct, forbid_unknown_fields=True):
    """Form of the answer's text."""

    format: dict[str, Any] | None = None
    """`{"type": "text"}`, `{"type": "json_object"}`, or `json_schema` with a `schema`, which the
    text then matches. Default: text."""
    verbosity: ShortName | None = None
    """Length of the answer: `low`, `medium` and `high` are passed to the chat template as
    `verbosity`. Other values are ignored. Default: the template's own."""


class ResponsesRequest(GenerationFields, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/responses."""

    input: str | Annotated[list[Any], Meta(max_length=ITEMS_MAX)] = field(default_factory=list)
    """A text of the user, or up to 16,384 items in order: messages, reasoning, calls and their
    outputs, references to stored items. Items of other kinds are left out and reported."""
    instructions: str | None = None
    """A system message before all items. It is not kept with a stored response. Default: none."""
    previous_response_id: ShortName | None = None
    """Id of a stored response whose items come before the input. Default: none."""
    tools: list[Any] | None = None
    """Tools that the model may call: functions, custom tools, namespaces of both, and `tool_search`
    that the client executes. Tools of other kinds are left out and reported. Default: no tools."""
    tool_choice: str | dict[str, Any] | None = None
    """`auto`, `none`, `required`, one function or custom tool, or `allowed_tools`, which shows the
    model only these. Default: `auto`."""
    parallel_tool_calls: bool | None = None
    """False: the answer ends after its first call. Default: true."""
    max_output_tokens: MaxTokens | None = None
    """Largest number of generated tokens, reasoning included; the context bounds it further.
    Default, also with -1: `gateway.default_max_tokens`, or else all the room that the prompt leaves
    in the context."""
    reasoning: ReasoningOptions | None = None
    """How the model thinks before it answers. Default: the chat template's own."""
    text: TextOptions | None = None
    """Form of the answer's text. Default: plain text."""
    include: list[str] | None = None
    """Further output: `message.output_text.logprobs` adds log probabilities of the answer's tokens.
    `reasoning.encrypted_content` is accepted; reasoning is sent as text and never encrypted."""
    top_logprobs: Annotated[int, Meta(ge=0, le=limits.TOP_LOGPROBS_MAX)] | None = None
    """Number of most likely alternatives per token, 0 to 20. Default: 0."""
    truncation: Literal["auto", "disabled"] | None = None
    """`auto`: the oldest items are left out if the prompt is too long for the context. Default:
    `disabled`, such a request is refused."""
    store: bool | None = None
    """Keep the response for `previous_response_id` and GET. Default: true where this server keeps
    responses (`cache.responses_bytes_max`)."""
    metadata: Annotated[dict[str, str], Meta(max_length=METADATA_MAX)] | None = None
    """Up to 16 texts by name, which the response repeats."""
    background: bool | None = None
    """Only false is supported."""
    conversation: Any = None
    """Not supported; only null is accepted. Use `previous_response_id`."""
    prompt: Any = None
    """Not supported; only null is accepted. Send the text itself."""
    prompt_cache_key: Annotated[str, Meta(max_length=1_024)] | None = None
    """The response repeats it. Prompts with the same beginning share the cache anyway."""
    chat_template_kwargs: (
        Annotated[dict[str, Any], Meta(max_length=TEMPLATE_ARGUMENTS_MAX)] | None
    ) = None
    """Further arguments of the model's chat template, by name; at most 32. Default: no arguments.
    """
    client_metadata: Any = None
    """Accepted and ignored; Codex describes itself in it."""
    max_tool_calls: Any = None
    """Accepted and ignored: it limits tools that a server runs, and this server runs none."""
    prompt_cache_retention: Any = None
    """Accepted and ignored."""
