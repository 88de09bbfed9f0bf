"""Chat format: the model's Jinja template, and the same format as a Python function.

The training renders millions of conversations, so it uses the faster `segments`; a test compares
it with the template.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
CALL_START, CALL_END = "<tool_call>", "</tool_call>"
RESPONSE_START, RESPONSE_END = "<tool_response>", "</tool_response>"

Message = dict[str, Any]
Tool = dict[str, Any]

TOOLS_HEAD = "# Tools\nYou may call one or more of these tools:\n<tools>"
TOOLS_TAIL = (
    "</tools>\nTo call a tool, answer with "
    f'{CALL_START}{{"name": tool name, "arguments": JSON object}}{CALL_END}'
)

CHAT_TEMPLATE = """{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}
{%- endif %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if system is defined %}
        {{- system + '\\n\\n' }}
    {%- endif %}
    {{- TOOLS_HEAD }}
    {%- for tool in tools %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\\n' + TOOLS_TAIL + '<|im_end|>\\n' }}
{%- elif system is defined %}
    {{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}
        {{- '<|im_start|>system\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- if not loop.first or message.content %}
                {{- '\\n' }}
            {%- endif %}
            {%- set tool_call = call.function if call.function else call %}
            {{- '<tool_call>\\n{"name": ' + (tool_call.name | tojson) + ', "arguments": ' }}
            {%- if tool_call.arguments is string %}
                {{- tool_call.arguments }}
            {%- else %}
                {{- tool_call.arguments | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""".replace("TOOLS_HEAD", repr(TOOLS_HEAD)).replace("TOOLS_TAIL", repr(TOOLS_TAIL))


@dataclass(frozen=True)
class Segment:
    """A piece of a conversation's text in the chat format."""

    text: str
    is_learned: bool
    """Whether it is an answer, which the training teaches; False: only context."""


@dataclass
class Chat:
    """A conversation and the tools that it offers, in the form of the OpenAI API."""

    messages: list[Message]
    tools: list[Tool] = field(default_factory=list)
    task: str = ""
    """Skill of its last answer, such as "copy"."""


def turn(question: str, answer: str) -> list[Message]:
    """Return a message of the user and the assistant's answer."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def as_json(value: Any) -> str:
    """Return a value as JSON in the form that the chat template's filter `tojson` writes."""
    return json.dumps(value, ensure_ascii=False)


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """Return one tool call as the model should write it: JSON between the tags of a call."""
    body = as_json({"name": name, "arguments": arguments})
    return f"{CALL_START}\n{body}\n{CALL_END}"


def _system_text(chat: Chat) -> str | None:
    """Return the content of the system block, or None if the conversation has none."""
    first = chat.messages[0]
    system = first["content"] if first["role"] == "system" else None
    if not chat.tools:
        return system
    lines = [TOOLS_HEAD, *(as_json(tool) for tool in chat.tools), TOOLS_TAIL]
    block = "\n".join(lines)
    return block if system is None else f"{system}\n\n{block}"


def _answer_text(message: Message) -> str:
    """Return the assistant's text, its tool calls, or both."""
    parts = [message["content"]] if message.get("content") else []
    for call in message.get("tool_calls") or []:
        function = call.get("function", call)
        parts.append(call_text(function["name"], function["arguments"]))
    return "\n".join(parts)


def segments(chat: Chat) -> list[Segment]:
    """Render a conversation in the chat format, cut at the bounds of its answers.

    Returns:
        Context and answers in turn, from the first to the last message.
    """
    pieces: list[Segment] = []
    read = ""
    system = _system_text(chat)
    if system is not None:
        read = f"{TURN_START}system\n{system}{TURN_END}\n"
    roles = [message["role"] for message in chat.messages] + [""]
    for at, message in enumerate(chat.messages):
        role, content = message["role"], message.get("content") or ""
        if role == "assistant":
            pieces.append(Segment(read + f"{TURN_START}assistant\n", False))
            pieces.append(Segment(_answer_text(message) + TURN_END, True))
            read = "\n"
        elif role == "tool":
            read += f"{TURN_START}user" if at == 0 or roles[at - 1] != "tool" else ""
            read += f"\n{RESPONSE_START}\n{content}\n{RESPONSE_END}"
            read += f"{TURN_END}\n" if roles[at + 1] != "tool" else ""
        elif role == "user" or at > 0:
            read += f"{TURN_START}{role}\n{content}{TURN_END}\n"
    return [*pieces, Segment(read, False)]


def expected_answer(chat: Chat) -> str:
    """Return the last message as the model should write it, tool calls included."""
    return _answer_text(chat.messages[-1])
