"""POST /v1/chat/completions."""

from typing import Any

import msgspec
from aiohttp import web

from services.gateway.endpoints import completion_service
from services.gateway.endpoints.completion_service import Service
from services.gateway.http import request_body
from services.gateway.http.errors import invalid
from services.gateway.openai.request_types import (
    AnswerPart,
    AssistantMessage,
    ChatCompletionRequest,
    ChatMessage,
    DeveloperMessage,
    RefusalPart,
    SystemMessage,
    TextPart,
    ToolMessage,
    UserMessage,
)
from services.gateway.openai.response_formats import ChatFormat
from services.gateway.openai.validation import check_chat

_decoder = msgspec.json.Decoder(ChatCompletionRequest)


async def create(service: Service, request: web.Request) -> web.StreamResponse:
    """Answer a conversation.

    Raises:
        ApiError: the request cannot be served.
    """
    asked = request_body.decode(_decoder, await service.read(request))
    service.check_model(asked.model)
    options = check_chat(asked, service.config)
    service.check_open(options.count)
    messages = rendered_messages(asked.messages)
    arguments: dict[str, Any] = {}
    given = asked.chat_template_kwargs
    if given is not None and given.enable_thinking is not None:
        arguments["enable_thinking"] = given.enable_thinking
    tools = _tools(service, asked)
    chars = sum(len(message.get("content") or "") for message in messages)
    cache = service.config.cache
    block_tokens = cache.block_tokens if cache.enabled else 0
    prompt = await service.encode(
        lambda: service.tokenizer.encode_chat(messages, tools, arguments, block_tokens),
        chars,
        "messages",
    )
    head = service.head("chatcmpl", options)
    shape = ChatFormat(head, service.tokenizer)
    return await completion_service.answer(
        service,
        request,
        [prompt],
        options=options,
        head=head,
        shape=shape,
        prompt_param="messages",
        reads_calls=tools is not None,
    )


def _tools(service: Service, asked: ChatCompletionRequest) -> list[dict[str, Any]] | None:
    """Return the tools to offer, as chat templates expect them; None when there are none."""
    if not asked.tools or asked.tool_choice == "none":
        return None
    if not service.tokenizer.has_tool_calls:
        raise invalid(
            "tools: the model's chat template has no tool calls in the <tool_call> format.",
            "tools",
            "unsupported_value",
        )
    tools: list[dict[str, Any]] = msgspec.to_builtins(asked.tools)
    for tool in tools:
        function = tool["function"]
        tool["function"] = {key: value for key, value in function.items() if value is not None}
    return tools


def rendered_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages as chat templates expect them.

    Raises:
        ApiError: 400; an empty assistant message, or a tool's answer to a call that was not made.
    """
    rendered: list[dict[str, Any]] = []
    calls: set[str] = set()
    for place, message in enumerate(messages):
        match message:
            case SystemMessage() | DeveloperMessage():
                fields: dict[str, Any] = {"role": "system", "content": _text(message.content)}
            case UserMessage():
                fields = {"role": "user", "content": _text(message.content)}
            case AssistantMessage():
                fields = _assistant(message, place)
                calls.update(call.id for call in message.tool_calls or [])
            case ToolMessage():
                if message.tool_call_id not in calls:
                    param = f"messages[{place}].tool_call_id"
                    raise invalid(
                        f"{param}: no assistant message before it makes this call.", param
                    )
                fields = {
                    "role": "tool",
                    "content": _text(message.content),
                    "tool_call_id": message.tool_call_id,
                }
        name = None if isinstance(message, ToolMessage) else message.name
        if name is not None:
            fields["name"] = name
        rendered.append(fields)
    return rendered


def _assistant(message: AssistantMessage, place: int) -> dict[str, Any]:
    content = message.refusal if message.content is None else _text(message.content)
    if content is None and not message.tool_calls:
        param = f"messages[{place}].content"
        raise invalid(f"{param}: an assistant message needs content or tool_calls.", param)
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
                    "arguments": _arguments(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return fields


def _arguments(text: str) -> Any:
    """Return a call's arguments as an object, as templates expect; text that is none stays text."""
    try:
        value = msgspec.json.decode(text.encode())
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return text
    return value if isinstance(value, dict) else text


def _text(content: str | list[TextPart] | list[AnswerPart | RefusalPart]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in content)
