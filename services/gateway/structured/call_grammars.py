"""Grammars of tool calls in the form that each family of models writes. Owns no reasoning.

A strict tool's arguments follow its schema, and the text of a custom tool its form where the format
writes texts without escapes; others are well-formed. The parsers in
`services.gateway.output.calls` read all of it back.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from services.gateway.conversation.conversation import Tool
from services.gateway.output.calls.call_format import CallFormat
from services.gateway.output.calls.gemma_calls import GemmaCalls
from services.gateway.output.calls.header_calls import SHORT_ID_CHARS, HeaderCalls
from services.gateway.output.calls.json_calls import JsonCalls
from services.gateway.output.calls.python_calls import PythonCalls
from services.gateway.output.calls.tagged_calls import TaggedCalls
from services.gateway.output.harmony import Harmony
from services.gateway.structured.grammar_writer import GrammarWriter, quote
from services.gateway.structured.literal_calls import gemma_call, python_call
from services.gateway.structured.schema_choices import Unwritable
from services.gateway.structured.tagged_arguments import tagged_arguments

_SHORT_ID = f"/[a-zA-Z0-9]{{{SHORT_ID_CHARS}}}/"
_ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclasses.dataclass(frozen=True, slots=True)
class CallRules:
    """Expressions of the calls in one answer."""

    opening: str
    """Text of the marker at which calls begin; "" where an answer that begins with `first` is a
    call."""
    rest: str
    """What follows the marker, up to the end of a call or of a section of calls."""
    first: str = "{"
    """Without a marker: the character with which an answer begins that is a call."""


def has_raw_texts(call_format: CallFormat | Harmony) -> bool:
    """Return whether calls have texts without escapes, so that a grammar of a text holds there."""
    return isinstance(call_format, TaggedCalls | GemmaCalls)


def write_calls(
    writer: GrammarWriter,
    call_format: CallFormat | Harmony,
    tools: Sequence[Tool],
    *,
    several: bool,
) -> CallRules | None:
    """Add the rules of calls of some tools.

    Args:
        writer: gets the rules.
        call_format: the model's format.
        tools: the tools that may be called.
        several: a section may have several calls, where the format has sections.

    Returns:
        The calls; None for a format that has no grammar.

    Raises:
        Unwritable: when the schema of a strict tool cannot be enforced in the format.
    """
    match call_format:
        case Harmony():
            return _harmony(writer, tools)
        case JsonCalls():
            return _json_calls(writer, call_format, tools, several=several)
        case HeaderCalls():
            return _header_calls(writer, call_format, tools, several=several)
        case TaggedCalls():
            return _tagged_calls(writer, call_format, tools, several=several)
        case GemmaCalls() | PythonCalls():
            try:
                return _literal_calls(writer, call_format, tools, several=several)
            except RecursionError:
                raise Unwritable("references that nest too deeply") from None
    return None


def _alike(tools: Sequence[Tool]) -> list[list[Tool]]:
    """Return tools in groups that have the same arguments: those with any are one group.

    An agent has a hundred of them, and one rule for each takes 200 ms to compile.
    """
    alone = [[tool] for tool in tools if tool.is_strict or tool.text_form is not None]
    free = [tool for tool in tools if not tool.is_strict and tool.text_form is None]
    return [*alone, free] if free else alone


def _literal_calls(
    writer: GrammarWriter,
    form: GemmaCalls | PythonCalls,
    tools: Sequence[Tool],
    *,
    several: bool,
) -> CallRules:
    if isinstance(form, GemmaCalls):
        call = _one_of(writer, [gemma_call(writer, form, group) for group in _alike(tools)])
        return CallRules(form.opening, f"{call} {writer.literal(form.closing)}")
    call = _one_of(writer, [python_call(writer, tool) for tool in tools])
    if form.has_lines:
        line = quote("\n")
        lines = _repeated(writer, call, line, several=several)
        return CallRules(form.opening, f"{line} {lines} {line} {writer.literal(form.closing)}")
    calls = f'"[" {_repeated(writer, call, quote(", "), several=several)} "]"'
    closing = writer.literal(form.closing) if form.closing else ""
    return CallRules(form.opening, f"{calls} {closing}", first="[")


def _arguments(writer: GrammarWriter, tool: Tool) -> str:
    """Return the expression of a tool's arguments as JSON."""
    schema = tool.parameters if tool.is_strict or tool.text_form is not None else None
    return writer.add_json(schema if schema is not None else _ANY_OBJECT)


def _one_of(writer: GrammarWriter, calls: Sequence[str]) -> str:
    return writer.rule(" | ".join(calls))


def _repeated(writer: GrammarWriter, item: str, separator: str, *, several: bool) -> str:
    """Return an expression of one item, or of several with a separator between them."""
    return writer.rule(f"{item} ({separator} {item})*") if several else item


def _json_calls(
    writer: GrammarWriter, form: JsonCalls, tools: Sequence[Tool], *, several: bool
) -> CallRules:
    space = writer.space
    number = ""
    if form.number_key:
        number = f'{_key(form.number_key)} {space} /"[0-9]{{1,3}}"/ "," {space}'
    calls = []
    for tool in tools:
        head = f'"{{" {space} {number} {_key(form.name_key)} {space} {quote(_json(tool.name))} ","'
        key = _key(form.arguments_key)
        body = f'{space} {key} {space} {_arguments(writer, tool)} {space} "}}"'
        calls.append(writer.rule(f"{head} {body}"))
    call = _one_of(writer, calls)
    if form.has_list:
        items = _repeated(writer, call, f'{space} "," {space}', several=several)
        call = writer.rule(f'"[" {space} {items} {space} "]"')
    if form.reads_bare:
        return CallRules("", call)
    closing = f"{space} {writer.literal(form.closing)}" if form.closing else ""
    return CallRules(form.opening, f"{space} {call} {closing}")


def _header_calls(
    writer: GrammarWriter, form: HeaderCalls, tools: Sequence[Tool], *, several: bool
) -> CallRules:
    calls = []
    for tool in tools:
        arguments = _arguments(writer, tool)
        separator = writer.literal(form.separator)
        if form.has_id_as_name:
            head = f"{quote(f'functions.{tool.name}:')} /[0-9]{{1,4}}/ {separator}"
            calls.append(writer.rule(f"{head} {arguments}"))
        elif form.id_opening:
            call_id = f"({writer.literal(form.id_opening)} {_SHORT_ID})?"
            calls.append(writer.rule(f"{quote(tool.name)} {call_id} {separator} {arguments}"))
        else:
            # DeepSeek V3 writes the first form, V3.1 the second.
            fenced = f"{quote(tool.name + chr(10) + '```json' + chr(10))} {arguments}"
            calls.append(writer.rule(f'"function" {separator} {fenced} {quote(chr(10) + "```")}'))
            calls.append(writer.rule(f"{quote(tool.name)} {separator} {arguments}"))
    closing = writer.literal(form.call_closing) if form.call_closing else ""
    call = writer.rule(f"({' | '.join(calls)}) {closing}")
    if not form.section_opening:
        return CallRules(form.call_opening, call)
    whole = writer.rule(f"{writer.literal(form.call_opening)} {call}")
    items = _repeated(writer, whole, writer.space, several=several)
    space = writer.space
    rest = f"{space} {items} {space} {writer.literal(form.section_closing)}"
    return CallRules(form.section_opening, rest)


def _tagged_calls(
    writer: GrammarWriter, form: TaggedCalls, tools: Sequence[Tool], *, several: bool
) -> CallRules:
    space = writer.space
    closing = form.call_closing or form.section.closing
    calls = []
    for group in _alike(tools):
        heads = (form.name.opening + tool.name + form.name.closing for tool in group)
        head = " | ".join(map(writer.literal, heads))
        arguments = tagged_arguments(writer, form, group[0])
        calls.append(writer.rule(f"({head}) {space} {arguments} {writer.literal(closing)}"))
    call = _one_of(writer, calls)
    if not form.call_closing:
        # The section's markers stand around each call.
        return CallRules(form.section.opening, call)
    items = _repeated(writer, call, space, several=several)
    rest = f"{space} {items} {space} {writer.literal(form.section.closing)}"
    return CallRules(form.section.opening, rest)


def _harmony(writer: GrammarWriter, tools: Sequence[Tool]) -> CallRules:
    calls = []
    for tool in tools:
        recipient = quote(f"commentary to=functions.{tool.name}")
        kind = f'(" "? {writer.literal("<|constrain|>")} "json")? {writer.literal("<|message|>")}'
        calls.append(writer.rule(f"{recipient} {kind} {_arguments(writer, tool)}"))
    return CallRules("<|channel|>", _one_of(writer, calls))


def _key(name: str) -> str:
    return quote(f'"{name}":')


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
