"""Calls that are written for a model, and what two spellings of a call have in common."""

import json
from typing import Any

import pytest

from services.gateway.conversation.conversation import Call, Tool
from services.gateway.output.calls.call_format import CallFormat
from services.gateway.output.events import CallArguments, CallBegun, Text, joined
from services.gateway.output.families import TOOL_FORMATS, OutputFormat
from services.gateway.output.harmony import Harmony

_ARGUMENTS: dict[str, Any] = {
    "text": 'a "b"\n\\d </x> ü',
    "count": 3,
    "ratio": -2.5,
    "is_new": True,
    "other": None,
    "items": ["one", {"deep": [1, False], "a: b": []}],
}
_FORMATS = [name for name, form in TOOL_FORMATS.items() if isinstance(form, CallFormat)]
_TYPES = ("string", "integer", "number", "boolean", "null", "array")
_PROPERTIES = {name: {"type": kind} for name, kind in zip(_ARGUMENTS, _TYPES, strict=True)}
_TOOLS = [Tool("read", parameters={"type": "object", "properties": _PROPERTIES}), Tool("now")]
_SIMPLE_CALL = '<|channel|>commentary to=functions.read<|message|>{"a": 1}'


@pytest.mark.parametrize("name", _FORMATS)
def test_written_calls_are_read_back_without_text(name: str) -> None:
    """Two calls with values of every type have the same names and arguments again."""
    form = TOOL_FORMATS[name]
    assert isinstance(form, CallFormat)
    parser = OutputFormat(name, "off").parser(_TOOLS, "")
    assert parser is not None

    text = form.write([Call("call_1", "read", _ARGUMENTS), Call("call_2", "now", {})])

    events = joined([*parser.push(text), *parser.finish()])
    names = [one.name for one in events if isinstance(one, CallBegun)]
    assert names == ["read", "now"], text
    arguments = [json.loads(one.text) for one in events if isinstance(one, CallArguments)]
    assert arguments == [_ARGUMENTS, {}], text
    assert not [one for one in events if isinstance(one, Text)], text


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.read <|constrain|>json",
        "<|channel|>commentary to=functions.read json",
        " to=functions.read<|channel|>commentary json",
        " to=functions.read<|channel|>commentary",
    ],
)
def test_headers_of_one_call_are_equal_when_simplified(header: str) -> None:
    """The recipient may come first, and the form of the arguments may be left out."""
    thought = "<|channel|>analysis<|message|>to=x json<|end|><|start|>assistant"
    arguments = '<|message|>{"a": 1}'

    assert Harmony.simplify(header + arguments) == _SIMPLE_CALL
    assert Harmony.simplify(thought + header + arguments) == thought + _SIMPLE_CALL


@pytest.mark.parametrize(
    "text",
    [
        '<|channel|>commentary to=functions.write<|message|>{"a": 1}',
        '<|channel|>analysis to=functions.read<|message|>{"a": 1}',
        '<|channel|>commentary to=functions.read<|message|>{"a": 2}',
        '<|channel|>commentary<|message|>{"a": 1}',
    ],
)
def test_other_calls_stay_different_when_simplified(text: str) -> None:
    """Tool, channel and arguments count."""
    assert Harmony.simplify(text) != _SIMPLE_CALL
