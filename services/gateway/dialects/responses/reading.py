"""Reading of requests: checks beyond types, and the conversation that a request means. Pure.

Every function here is thread-safe, because large bodies are read in another thread.
"""

import dataclasses
from typing import Any

from services.gateway.conversation.constraint import Constraint, read_format
from services.gateway.conversation.conversation import Conversation, ConversationMessage, ToolChoice
from services.gateway.conversation.reasoning import effort_arguments, is_unknown
from services.gateway.dialects.openai import field_rules, validation
from services.gateway.dialects.openai.constraint_fields import read_constraint
from services.gateway.dialects.responses.items import ItemReader
from services.gateway.dialects.responses.request_types import ITEMS_MAX, ResponsesRequest
from services.gateway.dialects.responses.serializer import ResponseOptions
from services.gateway.dialects.responses.tools import Toolbox, joined_name
from services.gateway.endpoints.request_options import RequestOptions
from services.gateway.http import request_body
from services.gateway.http.errors import invalid_field, unsupported
from services.gateway.http.ignored_fields import LenientDecoder, set_fields
from shared.configuration.settings import Config

LOGPROBS = "message.output_text.logprobs"
WITHOUT_EFFECT = (
    "user",
    "safety_identifier",
    "client_metadata",
    "max_tool_calls",
    "prompt_cache_retention",
)
"""Known fields that change nothing. They are reported as ignored."""
_VERBOSITIES = ("low", "medium", "high")
_HONOURED_INCLUDES = (LOGPROBS, "reasoning.encrypted_content")

decoder = LenientDecoder(ResponsesRequest, field_rules.REFUSED_FIELDS)
"""Decoder of request bodies."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReadResponsesRequest:
    """A request and everything that follows from it and from the items of an earlier response."""

    options: RequestOptions
    conversation: Conversation
    items: list[Any]
    """All input items, those of the earlier response first."""
    response_options: ResponseOptions
    ignored: list[str]
    """Parts of the request without effect."""


def check(request: ResponsesRequest) -> None:
    """Refuse fields that cannot be honoured, before anything else is done for the request.

    Raises:
        ApiError: 400 that names the field.
    """
    if request.background:
        raise unsupported("background", "responses are made while the client waits.")
    if request.conversation is not None:
        raise unsupported("conversation", "use previous_response_id, or send all items.")
    if request.prompt is not None:
        raise unsupported("prompt", "this server has no stored prompts: send the text itself.")
    if (request.n or 1) > 1:
        raise unsupported("n", "a response has one answer.")
    if request.max_tokens is not None:
        raise unsupported("max_tokens", "use max_output_tokens.")
    arguments = request.chat_template_kwargs or {}
    validation.check_template_arguments(arguments, "chat_template_kwargs")


def read(
    request: ResponsesRequest,
    earlier: list[Any],
    items: list[Any],
    config: Config,
    *,
    is_stored: bool,
) -> ReadResponsesRequest:
    """Return the conversation and the options of a checked request.

    Args:
        request: the request.
        earlier: items of the response that `previous_response_id` names, and before it.
        items: the request's own items, with stored items in place of references to them.
        config: the settings, with the limits of this server.
        is_stored: the response will be stored.

    Raises:
        ApiError: 400 that names the field.
    """
    if len(earlier) + len(items) > ITEMS_MAX:
        raise invalid_field(
            "input", f"at most {ITEMS_MAX} items are allowed, earlier ones included."
        )
    toolbox = Toolbox()
    toolbox.read(request.tools or [], "tools")
    choice = _tool_choice(request, toolbox)
    reader = ItemReader(toolbox)
    reader.read(earlier, lambda _: "previous_response_id")
    reader.read(items, lambda index: f"input[{index}]")
    messages = reader.messages
    if request.instructions:
        messages.insert(0, ConversationMessage("system", request.instructions))
    if not messages:
        raise invalid_field("input", "it has no message: send a text, or items with one.")
    conversation = Conversation(
        messages,
        toolbox.tools,
        choice,
        template_arguments=_template_arguments(request),
        deferred_tools=toolbox.deferred,
        constraint=_constraint(request),
    )
    summary = _summary(request)
    return ReadResponsesRequest(
        options=_options(request, config),
        conversation=conversation,
        items=[*earlier, *items],
        response_options=ResponseOptions(
            echo=request_body.to_json(_echo(request, is_stored=is_stored)),
            toolbox=toolbox,
            has_summaries=summary not in (None, "none"),
        ),
        ignored=[*toolbox.ignored, *reader.ignored, *_without_effect(request)],
    )


def own_items(request: ResponsesRequest) -> list[Any]:
    """Return the items of a request's input; a text is one message of the user."""
    if isinstance(request.input, str):
        text = {"type": "input_text", "text": request.input}
        return [{"type": "message", "role": "user", "content": [text]}]
    return request.input


def shortened(messages: list[ConversationMessage]) -> list[ConversationMessage] | None:
    """Return a conversation without the oldest quarter of its removable messages.

    System messages, the user's last message and the last message stay. A result leaves with its
    call.

    Returns:
        The messages that stay; None if nothing may be left out.
    """
    last_user = max((n for n, one in enumerate(messages) if one.role == "user"), default=-1)
    kept_always = {last_user, len(messages) - 1}
    droppable = [
        number
        for number, message in enumerate(messages)
        if message.role != "system" and number not in kept_always
    ]
    dropped = set(droppable[: -(-len(droppable) // 4)])
    if not dropped:
        return None
    kept = [message for number, message in enumerate(messages) if number not in dropped]
    calls = {call.call_id for message in kept for call in message.calls}
    return [message for message in kept if message.answers is None or message.answers in calls]


def _options(request: ResponsesRequest, config: Config) -> RequestOptions:
    top_logprobs = (request.top_logprobs or 0) if _wants_logprobs(request) else None
    options = validation.check_generation(
        request, config, request.max_output_tokens, "max_output_tokens", top_logprobs
    )
    return dataclasses.replace(options, clamps_max_tokens=True)


def _constraint(request: ResponsesRequest) -> Constraint | None:
    given = read_format(request.text.format if request.text is not None else None, "text.format")
    guided = read_constraint(request)
    if given is not None and guided is not None:
        problem = "it cannot be combined with text.format; give one of them."
        raise invalid_field(guided.param, problem)
    return given or guided


def _wants_logprobs(request: ResponsesRequest) -> bool:
    return LOGPROBS in (request.include or []) or bool(request.top_logprobs)


def _summary(request: ResponsesRequest) -> str | None:
    reasoning = request.reasoning
    return None if reasoning is None else reasoning.summary or reasoning.generate_summary


def _template_arguments(request: ResponsesRequest) -> dict[str, Any]:
    effort = request.reasoning.effort if request.reasoning is not None else None
    arguments = effort_arguments(effort)
    if request.text is not None and request.text.verbosity in _VERBOSITIES:
        arguments["verbosity"] = request.text.verbosity
    return {**arguments, **(request.chat_template_kwargs or {})}


def _tool_choice(request: ResponsesRequest, toolbox: Toolbox) -> ToolChoice:
    may_call_several = request.parallel_tool_calls is not False
    match request.tool_choice:
        case None:
            return ToolChoice("auto", "", may_call_several)
        case "auto" | "none" | "required" as mode:
            return ToolChoice(mode, "", may_call_several)
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(tools)}:
            _show_only(tools, toolbox)
            return ToolChoice(mode, "", may_call_several)
        case {"type": "function" | "custom", "name": str(name), **others}:
            joined = joined_name(name, others.get("namespace"))
            return ToolChoice("named", joined, may_call_several, "tool_choice.name")
        case _:
            raise unsupported(
                "tool_choice",
                "only auto, none, required, allowed_tools, and a function or custom tool.",
            )


def _show_only(allowed: list[Any], toolbox: Toolbox) -> None:
    """Show only the tools that a choice allows to the model."""
    names: set[str] = set()
    namespaces: set[str] = set()
    for tool in allowed:
        match tool:
            case {"type": "namespace", "name": str(name)}:
                namespaces.add(name)
            case {"name": str(name), **others}:
                names.add(joined_name(name, others.get("namespace")))
            case _:
                pass
    toolbox.keep_only(names, namespaces)


def _without_effect(request: ResponsesRequest) -> list[str]:
    names = set_fields(request, WITHOUT_EFFECT)
    if request.reasoning is not None and is_unknown(request.reasoning.effort):
        names.append("reasoning.effort")
    if request.text is not None and request.text.verbosity not in (None, *_VERBOSITIES):
        names.append("text.verbosity")
    includes = [one for one in request.include or [] if one not in _HONOURED_INCLUDES]
    return names + [f"include.{one[:64]}" for one in includes]


def _echo(request: ResponsesRequest, *, is_stored: bool) -> dict[str, Any]:
    """Return the fields that a response repeats from its request."""
    text = request.text
    effort = request.reasoning.effort if request.reasoning is not None else None
    return {
        "background": False,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": effort, "summary": _summary(request)},
        "service_tier": "default",
        "store": is_stored,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {
            "format": (text.format if text is not None else None) or {"type": "text"},
            **({"verbosity": text.verbosity} if text is not None and text.verbosity else {}),
        },
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": request.truncation or "disabled",
        "user": request.user,
    }
