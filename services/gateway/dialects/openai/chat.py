"""Endpoint POST /v1/chat/completions. Owns reading its conversation."""

import dataclasses
import functools

from aiohttp import web

from services.gateway.conversation.conversation import (
    Call,
    Conversation,
    ConversationMessage,
    Role,
    Tool,
    ToolChoice,
)
from services.gateway.conversation.reasoning import effort_arguments, is_unknown
from services.gateway.conversation.turns import joined_turns
from services.gateway.dialects.openai import field_rules, request_types
from services.gateway.dialects.openai.constraint_fields import chat_format, read_constraint
from services.gateway.dialects.openai.serializers import ChatSerializer
from services.gateway.dialects.openai.validation import check_chat
from services.gateway.endpoints import answering
from services.gateway.endpoints.completion_service import SERVICE, CompletionService
from services.gateway.endpoints.request_options import RequestOptions
from services.gateway.http import request_body
from services.gateway.http.errors import invalid_field, unsupported
from services.gateway.http.ignored_fields import LenientDecoder, set_fields

_TEXT_PARTS = ("text", "input_text", "output_text")
_MEDIA_PARTS = (
    "image_url", "image", "input_image", "input_audio", "audio_url", "video_url", "file",
    "input_file",
)  # fmt: skip

_decoder = LenientDecoder(request_types.ChatCompletionRequest, field_rules.REFUSED_FIELDS)


async def create(request: web.Request) -> web.StreamResponse:
    """Answer POST /v1/chat/completions: complete a conversation and send the completions.

    Raises:
        ApiError: when the request is refused, or fails before the response has begun.
    """
    service = request.app[SERVICE]
    parsed = await service.parse(request, functools.partial(_parse, service))
    service.report_ignored(request, parsed.ignored)
    serializer = ChatSerializer(
        service.response_metadata("chatcmpl-", parsed.options.model),
        service.tokenizer,
        includes_usage=parsed.options.includes_usage,
    )
    return await answering.converse(
        service, request, parsed.conversation, parsed.options, serializer, "messages"
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Parsed:
    """A checked chat request."""

    options: RequestOptions
    conversation: Conversation
    ignored: list[str]
    """Fields without effect."""


def _parse(service: CompletionService, data: bytes) -> _Parsed:
    """Decode and check a body. Thread-safe.

    Raises:
        ApiError: when the request is refused.
    """
    body, ignored = _decoder.decode(data)
    service.check_model(body.model)
    options = check_chat(body, service.config)
    ignored += set_fields(body, field_rules.CHAT_WITHOUT_EFFECT)
    if body.prediction is not None:
        if _uses_drafts(service, options):
            content = body.prediction.content
            text = content if isinstance(content, str) else "".join(one.text for one in content)
            options = dataclasses.replace(options, prediction=text)
        else:
            ignored.append("prediction")
    conversation = read_conversation(body, ignored)
    service.check_conversation(conversation, "messages")
    return _Parsed(options, conversation, list(dict.fromkeys(ignored)))


def _uses_drafts(service: CompletionService, options: RequestOptions) -> bool:
    """Return whether drafts are proposed for a request, so that a prediction has an effect."""
    method = options.speculation.method
    return (service.config.speculation.method if method == "default" else method) != "off"


def read_conversation(
    body: request_types.ChatCompletionRequest, ignored: list[str]
) -> Conversation:
    """Return the conversation of a chat request.

    Args:
        body: the request.
        ignored: gets the paths of fields and parts without effect.

    Raises:
        ApiError: as `read_messages` and `read_constraint`; 400 for a tool choice that is not known,
            or a tool's schema that is nested too deeply.
    """
    if is_unknown(body.reasoning_effort):
        ignored.append("reasoning_effort")
    return Conversation(
        messages=read_messages(body.messages, ignored),
        tools=[
            _tool(tool.function, f"tools[{index}].function.parameters")
            for index, tool in enumerate(body.tools or [])
        ],
        tool_choice=_tool_choice(body),
        template_arguments={
            **effort_arguments(body.reasoning_effort),
            **(body.chat_template_kwargs or {}),
        },
        constraint=read_constraint(body, chat_format(body.response_format)),
    )


def _tool_choice(body: request_types.ChatCompletionRequest) -> ToolChoice:
    may_call_several = body.parallel_tool_calls is not False
    choice = body.tool_choice
    if isinstance(choice, request_types.NamedToolChoice):
        return ToolChoice("named", choice.function.name, may_call_several)
    match choice:
        case None | "auto":
            return ToolChoice("auto", "", may_call_several)
        case "none" | "required":
            return ToolChoice(choice, "", may_call_several)
    problem = "only none, auto, required and the name of a function are supported."
    raise unsupported("tool_choice", problem)


def _tool(function: request_types.ToolFunction, param: str) -> Tool:
    request_body.check_depth(function.parameters, param)
    return Tool(
        function.name,
        function.description,
        function.parameters,
        is_strict=bool(function.strict),
        param=param,
    )


def read_messages(
    messages: list[request_types.ChatMessage], ignored: list[str]
) -> list[ConversationMessage]:
    """Return the messages of a conversation in the same order.

    Developer messages become system messages. What the assistant said after a call becomes part of
    the call's message.

    Args:
        messages: the messages of the request.
        ignored: gets the paths of parts without effect.

    Raises:
        ApiError: 400 for a part that cannot be read, or a tool message without a matching call.
    """
    _check_arguments(messages)
    found: list[ConversationMessage] = []
    calls: set[str] = set()
    for index, message in enumerate(messages):
        may_have_media = isinstance(
            message, request_types.AssistantMessage | request_types.ToolMessage
        )
        param = f"messages[{index}].content"
        text = _text(message.content, param, ignored, may_have_media=may_have_media)
        if isinstance(message, request_types.AssistantMessage):
            found.append(_assistant(message, text, index))
            calls.update(call.id for call in message.tool_calls or [])
        elif isinstance(message, request_types.ToolMessage):
            if message.tool_call_id not in calls:
                problem = "no earlier assistant message has a call with this id."
                raise invalid_field(f"messages[{index}].tool_call_id", problem)
            found.append(ConversationMessage("tool", text, answers=message.tool_call_id))
        else:
            role: Role = "user" if isinstance(message, request_types.UserMessage) else "system"
            found.append(ConversationMessage(role, text, message.name))
    return joined_turns(found)


def _assistant(
    message: request_types.AssistantMessage, text: str, index: int
) -> ConversationMessage:
    if message.content is None:
        text = message.refusal or ""
    calls = []
    for number, call in enumerate(message.tool_calls or []):
        param = f"messages[{index}].tool_calls[{number}].function.arguments"
        arguments = request_body.decode_arguments(call.function.arguments, param)
        calls.append(Call(call.id, call.function.name, arguments))
    reasoning = message.reasoning_content
    if reasoning is None:
        reasoning = message.reasoning
    return ConversationMessage("assistant", text, message.name, reasoning, calls)


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


def _text(
    content: str | list[request_types.ContentPart] | None,
    param: str,
    ignored: list[str],
    *,
    may_have_media: bool,
) -> str:
    """Return the text of a content.

    An image in a tool's result becomes a note for the model, because the client cannot take it back
    from its history; the user's own is refused.

    Args:
        content: the content.
        param: its path in the request, for errors.
        ignored: gets the paths of parts without effect.
        may_have_media: images and the like become notes.

    Raises:
        ApiError: 400 for a part without its text, or an image where none may be.
    """
    if content is None or isinstance(content, str):
        return content or ""
    pieces: list[str] = []
    for number, part in enumerate(content):
        if part.type in (*_TEXT_PARTS, "refusal"):
            name = "refusal" if part.type == "refusal" else "text"
            text = getattr(part, name)
            if text is None:
                raise invalid_field(f"{param}[{number}].{name}", "it must be a text.")
            pieces.append(text)
            continue
        if part.type in _MEDIA_PARTS:
            if not may_have_media:
                problem = f"{part.type}: only text is supported."
                raise unsupported(f"{param}[{number}].type", problem)
            pieces.append(f"[{part.type} left out: this model reads only text]")
        ignored.append(f"messages.content.{part.type}")
    return "".join(pieces)
