"""Endpoint POST /v1/chat/completions. Owns turning messages into what chat templates expect."""

import dataclasses
import functools
from typing import Any

import msgspec
from aiohttp import web

from services.gateway.endpoints import completion_service
from services.gateway.endpoints.completion_service import SERVICE, CompletionService
from services.gateway.endpoints.fair_threads import Ticket
from services.gateway.http import request_body
from services.gateway.http.errors import invalid_field, unsupported
from services.gateway.openai import request_types
from services.gateway.openai.response_formats import ChatFormat
from services.gateway.openai.validation import RequestOptions, check_chat
from services.gateway.tokenizing.prompt import Prompt

_decoder = msgspec.json.Decoder(request_types.ChatCompletionRequest)


async def create(request: web.Request) -> web.StreamResponse:
    """Answer POST /v1/chat/completions: complete a conversation and send the completions.

    Raises:
        ApiError: when the request is refused, or fails before the response has begun.
    """
    service = request.app[SERVICE]
    chat = await service.parse(request, functools.partial(_parse, service))
    service.admission.reserve_choices(request, chat.options.count)
    cache = service.config.cache
    block_tokens = cache.block_tokens if cache.enabled else 0
    context = service.status.context_tokens_max

    def encode(ticket: Ticket) -> Prompt:
        contents = (str(message["content"]) for message in chat.messages)
        if service.tokenizer.surely_exceeds(contents, context):
            raise completion_service.too_long(f"more than {context} tokens", context, "messages")
        return service.tokenizer.encode_chat(
            chat.messages, chat.tools, chat.arguments, block_tokens, ticket.check
        )

    [prompt] = await service.encode(request, [encode], "messages")
    options = chat.options
    response_format = ChatFormat(service.response_metadata("chatcmpl", options), service.tokenizer)
    return await completion_service.respond(
        service,
        request,
        [prompt],
        options,
        response_format,
        "messages",
        parses_tool_calls=chat.tools is not None,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Chat:
    """A checked chat request in the form that chat templates expect."""

    options: RequestOptions
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    arguments: dict[str, Any]
    """Further arguments of the template."""


def _parse(service: CompletionService, data: bytes) -> _Chat:
    """Decode and check a body. Thread-safe.

    Raises:
        ApiError: when the request is refused.
    """
    body = request_body.decode(_decoder, data)
    service.check_model(body.model)
    options = check_chat(body, service.config)
    messages = template_messages(body.messages)
    service.check_lengths([sum(len(message["content"]) for message in messages)], "messages")
    arguments = msgspec.to_builtins(body.chat_template_kwargs or request_types.TemplateArguments())
    return _Chat(options, messages, _tools(service, body), arguments)


def _tools(
    service: CompletionService, body: request_types.ChatCompletionRequest
) -> list[dict[str, Any]] | None:
    """Return the offered tools as chat templates expect them, None without tools.

    Raises:
        ApiError: 400 when the chat template has no supported tool calls.
    """
    if not body.tools or body.tool_choice == "none":
        return None
    if not service.tokenizer.has_tool_calls:
        problem = "the model's chat template does not use the <tool_call> format."
        raise unsupported("tools", problem)
    tools: list[dict[str, Any]] = msgspec.to_builtins(body.tools)
    return tools


def template_messages(messages: list[request_types.ChatMessage]) -> list[dict[str, Any]]:
    """Return messages as the dicts that chat templates expect, in the same order.

    Each has `role` and `content`, and `name`, `tool_calls`, `tool_call_id` or `reasoning_content`
    if the message has them. Developer messages become system messages.

    Raises:
        ApiError: 400 for an empty assistant message, or a tool message without a matching call.
    """
    _check_arguments(messages)
    rendered: list[dict[str, Any]] = []
    calls: set[str] = set()
    for index, message in enumerate(messages):
        if isinstance(message, request_types.AssistantMessage):
            fields = _assistant(message, index)
            calls.update(call.id for call in message.tool_calls or [])
        else:
            role = {request_types.UserMessage: "user", request_types.ToolMessage: "tool"}.get(
                type(message), "system"
            )
            fields = {"role": role, "content": _text(message.content)}
        if isinstance(message, request_types.ToolMessage):
            if message.tool_call_id not in calls:
                problem = "no earlier assistant message has a call with this id."
                raise invalid_field(f"messages[{index}].tool_call_id", problem)
            fields["tool_call_id"] = message.tool_call_id
        elif message.name is not None:
            fields["name"] = message.name
        rendered.append(fields)
    return rendered


def _assistant(message: request_types.AssistantMessage, index: int) -> dict[str, Any]:
    content = message.refusal if message.content is None else _text(message.content)
    if content is None and not message.tool_calls:
        problem = "an assistant message needs content or tool_calls."
        raise invalid_field(f"messages[{index}].content", problem)
    fields: dict[str, Any] = {"role": "assistant", "content": content or ""}
    if message.reasoning_content is not None:
        fields["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(
                        call.function.arguments,
                        f"messages[{index}].tool_calls[{number}].function.arguments",
                    ),
                },
            }
            for number, call in enumerate(message.tool_calls)
        ]
    return fields


def _check_arguments(messages: list[request_types.ChatMessage]) -> None:
    """Refuse tool calls whose arguments have too many parts together.

    They are JSON in strings, whose parts were not counted with those of the body.
    """
    request_body.check_parts(
        call.function.arguments.encode(errors="replace")
        for message in messages
        if isinstance(message, request_types.AssistantMessage)
        for call in message.tool_calls or []
    )


def _arguments(text: str, param: str) -> Any:
    """Return a call's arguments as an object, or unchanged when they are not a JSON object.

    Raises:
        ApiError: 400 when they are nested too deeply; it names the field `param`.
    """
    try:
        value = msgspec.json.decode(text.encode())
    except (msgspec.DecodeError, UnicodeEncodeError):
        return text
    except RecursionError:
        raise request_body.too_deep(param) from None
    if not isinstance(value, dict):
        return text
    request_body.check_depth(value, param)
    return value


def _text(
    content: str
    | list[request_types.TextPart]
    | list[request_types.AssistantTextPart | request_types.RefusalPart],
) -> str:
    if isinstance(content, str):
        return content
    return "".join(
        part.refusal if isinstance(part, request_types.RefusalPart) else part.text
        for part in content
    )
