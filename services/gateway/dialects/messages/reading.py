"""Conversations in requests of the Messages API. Owns what each of its parts means to the model."""

import dataclasses
from typing import Any

import msgspec

from services.gateway.conversation.constraint import read_format
from services.gateway.conversation.conversation import (
    Call,
    Conversation,
    ConversationMessage,
    Tool,
    ToolChoice,
)
from services.gateway.conversation.reasoning import (
    effort_arguments,
    is_unknown,
    thinking_arguments,
)
from services.gateway.conversation.turns import joined_thoughts, joined_turns
from services.gateway.dialects.messages import request_types
from services.gateway.dialects.messages.content import (
    SEPARATOR,
    BlockReader,
    without_billing_header,
)
from services.gateway.http import ignored_fields, request_body
from services.gateway.http.errors import invalid_field

_TOOL_FIELDS = frozenset({*request_types.ClientTool.__struct_fields__, "type", "cache_control"})
_THINKING_TYPES = ("enabled", "disabled", "adaptive")
_ERROR_START = "Error: "


@dataclasses.dataclass(frozen=True, slots=True)
class ReadMessagesRequest:
    """What a request says to the model."""

    conversation: Conversation
    has_cache_control: bool
    """Some part of it has `cache_control`."""
    ignored: list[str]
    """Fields, blocks and tools without effect."""


def read(body: request_types.CountTokensRequest, unknown: list[str]) -> ReadMessagesRequest:
    """Return what a request says to the model.

    Args:
        body: the request.
        unknown: fields that were left out of it.

    Raises:
        ApiError: 400 when it is not valid or not supported; it names the field.
    """
    ignored = dict.fromkeys([*unknown, *_thinking_without_effect(body)])
    shown, deferred, has_cache_control = _read_tools(body.tools or [], ignored)
    reader = BlockReader({tool.name: tool for tool in [*shown, *deferred]})
    messages = _read_messages(body, reader)
    conversation = Conversation(
        messages=messages,
        tools=shown,
        deferred_tools=deferred,
        tool_choice=_tool_choice(body.tool_choice),
        template_arguments=_template_arguments(body),
        constraint=read_format(
            body.output_config.format if body.output_config else None, "output_config.format"
        ),
    )
    ignored |= dict.fromkeys(ignored_fields.set_fields(body, request_types.WITHOUT_EFFECT))
    return ReadMessagesRequest(
        conversation,
        has_cache_control or reader.has_cache_control or body.cache_control is not None,
        [*ignored, *reader.ignored],
    )


class _UserId(msgspec.Struct):
    """The JSON object that Claude Code sends as the text of `metadata.user_id`."""

    session_id: str = ""


def session_name(metadata: Any) -> str | None:
    """Return what `metadata.user_id` says about the client's session; None if it is no text."""
    user_id = metadata.get("user_id") if isinstance(metadata, dict) else None
    if not isinstance(user_id, str):
        return None
    try:
        return msgspec.json.decode(user_id, type=_UserId).session_id or user_id
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return user_id


def _thinking_without_effect(body: request_types.CountTokensRequest) -> list[str]:
    """Return the fields about reasoning whose values change nothing."""
    thinking, output = body.thinking, body.output_config
    found = []
    if thinking is not None and thinking.budget_tokens is not None:
        found.append("thinking.budget_tokens")
    if thinking is not None and thinking.type not in _THINKING_TYPES:
        found.append("thinking.type")
    if output is not None and is_unknown(output.effort):
        found.append("output_config.effort")
    return found


def _template_arguments(body: request_types.CountTokensRequest) -> dict[str, Any]:
    arguments = effort_arguments(body.output_config.effort if body.output_config else None)
    if body.thinking is not None and body.thinking.type in ("enabled", "disabled"):
        arguments |= thinking_arguments(is_on=body.thinking.type == "enabled")
    return arguments


def _tool_choice(choice: request_types.RequestedToolChoice | None) -> ToolChoice:
    if choice is None:
        return ToolChoice()
    may_call_several = not choice.disable_parallel_tool_use
    match choice.type:
        case "none" | "auto":
            return ToolChoice(choice.type, "", may_call_several)
        case "any":
            return ToolChoice("required", "", may_call_several)
        case "tool":
            return ToolChoice("named", choice.name or "", may_call_several, "tool_choice.name")


def _read_tools(
    tools: list[dict[str, Any]], ignored: dict[str, None]
) -> tuple[list[Tool], list[Tool], bool]:
    """Return the tools that are shown, those that are deferred, and whether one is cached."""
    shown: list[Tool] = []
    deferred: list[Tool] = []
    for index, fields in enumerate(tools):
        param = f"tools[{index}]"
        kind = fields.get("type")
        if isinstance(kind, str) and kind != "custom":
            # It runs at Anthropic, or has a schema that only Anthropic's models know.
            ignored[f"tools.{kind}"] = None
            continue
        tool = request_body.convert(fields, request_types.ClientTool, param)
        schema_param = f"{param}.input_schema"
        request_body.check_depth(tool.input_schema, schema_param)
        ignored |= {f"tools.{name}": None for name in fields.keys() - _TOOL_FIELDS}
        read_tool = Tool(
            tool.name,
            tool.description,
            tool.input_schema,
            is_strict=bool(tool.strict),
            param=schema_param,
        )
        (deferred if tool.defer_loading else shown).append(read_tool)
    return shown, deferred, any(fields.get("cache_control") is not None for fields in tools)


def _read_messages(
    body: request_types.CountTokensRequest, reader: BlockReader
) -> list[ConversationMessage]:
    found: list[ConversationMessage] = []
    system = reader.text(without_billing_header(body.system or ""), "system")
    if system:
        found.append(ConversationMessage("system", system))
    calls: set[str] = set()
    for index, message in enumerate(body.messages):
        param = f"messages[{index}].content"
        content = message.content
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if message.role == "system":
            text = reader.text(without_billing_header(content), param)
            found += [ConversationMessage("system", text)] if text else []
        elif message.role == "user":
            found += _user_messages(content, reader, param, calls)
        else:
            found += _assistant_messages(content, reader, param, calls)
    if not found:
        raise invalid_field("messages", "no message has a content.")
    return joined_turns(found)


def _user_messages(
    content: list[dict[str, Any]], reader: BlockReader, content_param: str, calls: set[str]
) -> list[ConversationMessage]:
    """Return a user's message as results of tools and, behind them, a text."""
    results: list[ConversationMessage] = []
    texts: list[str] = []
    for at, block in enumerate(content):
        param = f"{content_param}[{at}]"
        if reader.kind(block, param) != "tool_result":
            texts.append(reader.block_text(block, param))
            continue
        result = reader.convert(block, request_types.ToolResultBlock, param)
        if result.tool_use_id not in calls:
            problem = "no earlier assistant message has a tool_use block with this id."
            raise invalid_field(f"{param}.tool_use_id", problem)
        text = reader.text(result.content or "", f"{param}.content")
        if result.is_error and not text.startswith(_ERROR_START):
            text = _ERROR_START + text
        results.append(ConversationMessage("tool", text, answers=result.tool_use_id))
    text = SEPARATOR.join(filter(None, texts))
    return [*results, ConversationMessage("user", text)] if text else results


def _assistant_messages(
    content: list[dict[str, Any]], reader: BlockReader, content_param: str, calls: set[str]
) -> list[ConversationMessage]:
    texts: list[str] = []
    reasoning: list[str] = []
    made: list[Call] = []
    for at, block in enumerate(content):
        param = f"{content_param}[{at}]"
        match reader.kind(block, param):
            case "thinking":
                thought = reader.convert(block, request_types.ThinkingBlock, param).thinking
                reasoning.append(thought)
            case "tool_use":
                used = reader.convert(block, request_types.ToolUseBlock, param)
                request_body.check_depth(used.input, f"{param}.input")
                made.append(Call(used.id, used.name, used.input))
            case _:
                texts.append(reader.block_text(block, param))
    calls.update(call.call_id for call in made)
    # What stood between two blocks of the model's text is part of one of them.
    text = "".join(texts)
    thoughts = joined_thoughts(reasoning)
    if not (text or thoughts or made):
        return []
    return [ConversationMessage("assistant", text, reasoning=thoughts, calls=made)]
