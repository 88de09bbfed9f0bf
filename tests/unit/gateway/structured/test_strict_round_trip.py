"""Strict calls from grammar to parser: what a grammar accepts is read as valid arguments."""

import json
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from services.gateway.conversation.conversation import Tool, ToolChoice
from services.gateway.output.calls.gemma_calls import GemmaCalls
from services.gateway.output.calls.tagged_calls import TaggedCalls
from services.gateway.output.events import CallArguments, CallBegun, joined
from services.gateway.output.families import TOOL_FORMATS, OutputFormat
from services.gateway.structured.answer_grammar import AnswerGrammars, AnswerWishes
from shared.messages import Grammar
from tests.unit.gateway.structured.matching import END, SPECIAL_TOKENS, TRIALS, matches, random_text

TAGGED = [name for name, form in TOOL_FORMATS.items() if isinstance(form, TaggedCalls)]
OTHERS = ["hermes", "mistral", "kimi_k2", "gemma4", "function_gemma", "lfm2", "olmo3"]

_TEXTS = st.sampled_from(["red", "b c", 'q"x"', "null", "12", "true", "", "[1]", "{", " x", "ü\n"])
_STRINGS = st.one_of(
    st.just({"type": "string"}),
    st.builds(lambda texts: {"type": "string", "enum": texts}, st.lists(_TEXTS, min_size=1)),
    st.builds(lambda texts: {"enum": ["safe", *texts]}, st.lists(_TEXTS)),
    st.builds(
        lambda text: {"type": "string", "pattern": text},
        st.sampled_from(["^https://", "[0-9]{3}$", r"^a\$", "x|^y$", "^[^/]+$", r"^(a|b/)\w+$"]),
    ),
    st.just({"const": "a b"}),
    st.just({"$ref": "#/$defs/color"}),
)
_NUMBERS = st.one_of(
    st.sampled_from([{"type": "integer"}, {"type": "number"}, {"const": 4}]),
    st.builds(
        lambda low: {"type": "integer", "minimum": low, "maximum": low + 20}, st.integers(-9, 90)
    ),
)
_PLAIN = st.one_of(
    _STRINGS,
    _NUMBERS,
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {}, {"$ref": "#/$defs/node"}]),
    st.builds(lambda one: {"type": "array", "items": one, "maxItems": 2}, _STRINGS),
    st.builds(
        lambda one: {"type": "object", "properties": {"k": one}, "additionalProperties": False},
        _NUMBERS,
    ),
)
_PARTS = st.one_of(
    _PLAIN,
    st.sampled_from(
        [
            {"type": ["string", "null"]},
            {"type": ["string", "null"], "enum": ["red", None]},
            {"type": ["string", "integer"]},
            {"type": ["string", "boolean", "array"]},
            {"allOf": [{"$ref": "#/$defs/color"}], "description": "A color."},
        ]
    ),
    st.builds(lambda one: {"anyOf": [one, {"type": "null"}]}, _PLAIN),
    st.builds(lambda some: {"anyOf": some}, st.lists(_PLAIN, min_size=2, max_size=3)),
)
_NAMES = ["path", "max_count", "note-2", "type"]
_DEFINITIONS: dict[str, Any] = {
    "color": {"type": "string", "enum": ["red", "dark blue"]},
    "node": {
        "type": "object",
        "properties": {"id": {"type": "integer"}},
        "required": ["id"],
        "additionalProperties": False,
    },
}


@st.composite
def schemas(draw: st.DrawFn) -> dict[str, Any]:
    """Return schemas of a tool's arguments."""
    names = draw(st.lists(st.sampled_from(_NAMES), min_size=1, max_size=3, unique=True))
    return {
        "type": "object",
        "properties": {name: draw(_PARTS) for name in names},
        "required": [name for name in names if draw(st.booleans())],
        "additionalProperties": False,
        "$defs": _DEFINITIONS,
    }


def strict_tool(schema: dict[str, Any]) -> Tool:
    """Return a strict tool with a schema."""
    return Tool("find", None, schema, is_strict=True)


def grammar_of(tool: Tool, name: str) -> Grammar:
    """Return the grammar of an answer that calls the tool once."""
    grammars = AnswerGrammars(
        SPECIAL_TOKENS, SPECIAL_TOKENS, OutputFormat(name, "off"), [END], trials=TRIALS
    )
    choice = ToolChoice("required", may_call_several=False)
    found = grammars.answer(AnswerWishes(tools=[tool], tool_choice=choice), "")
    assert found is not None
    return found


def read(text: str, tool: Tool, name: str) -> Any:
    """Return the arguments of the one call in a text."""
    parser = OutputFormat(name, "off").parser([tool], "")
    assert parser is not None
    events = joined([*parser.push(text), *parser.finish()])
    assert [one.name for one in events if isinstance(one, CallBegun)] == ["find"], (text, events)
    written = "".join(one.text for one in events if isinstance(one, CallArguments))
    return json.loads(written, parse_float=lambda number: max(-1e300, min(float(number), 1e300)))


def ends_of(name: str) -> list[str]:
    """Return texts that end values of a format, and texts that are easily taken for others."""
    form = TOOL_FORMATS[name]
    tricky = ["null", "true", "12", "-7.5", "[1]", "{'a': 1}", "hi", " ", "\n", "https://x", "123"]
    if not isinstance(form, TaggedCalls):
        return [*tricky, '"', "<escape>", '<|"|>']
    end, call_end = form.value.closing, form.call_closing
    ended = [f"{end}\n{form.key.opening}", f"{call_end}\n{form.section.closing}"]
    # With a line end they only stand in texts, without one also in JSON strings.
    inside = [f"{end}{form.key.opening}", f"{end}{call_end}", f"{call_end}{form.section.closing}"]
    return [*tricky, end, end, f"{end}\n", f"\n{end}\n", *ended, *inside]


@pytest.mark.parametrize("name", [*TAGGED, *OTHERS])
@settings(deadline=None, max_examples=25)
@given(schema=schemas(), seed=st.integers(0, 10_000))
def test_any_text_of_a_strict_grammar_is_read_as_arguments_that_match_the_schema(
    name: str, schema: dict[str, Any], seed: int
) -> None:
    """Strings with quotes, words, numbers and brackets in them arrive as they were meant."""
    # Formats with literals of their own refuse joined schemas.
    assume(name in TAGGED or "allOf" not in json.dumps(schema))
    tool = strict_tool(schema)
    text = random_text(grammar_of(tool, name), seed, likely=ends_of(name))
    value = read(text, tool, name)
    error = next(iter(jsonschema_rs.validator_for(schema).iter_errors(value)), None)
    assert error is None, f"{text}\n{value}\n{error}"


@pytest.mark.parametrize("name", TAGGED)
def test_optional_string_of_a_strict_tool_is_written_without_quotes(name: str) -> None:
    """Pydantic's Optional[str], an enum behind a reference and a bare enum are raw texts."""
    schema = {
        "type": "object",
        "properties": {
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
            "color": {"$ref": "#/$defs/color"},
            "mode": {"enum": ["fast", "slow"]},
        },
        "required": ["note", "color", "mode"],
        "additionalProperties": False,
        "$defs": _DEFINITIONS,
    }
    tool = strict_tool(schema)
    grammar = grammar_of(tool, name)
    values = {"note": 'say "hi"\n', "color": "dark blue", "mode": "fast"}
    text = call_text(name, values)
    assert matches(grammar, text), text
    assert read(text, tool, name) == values
    quoted = {key: json.dumps(value) for key, value in values.items()}
    for key in ("color", "mode"):
        assert not matches(grammar, call_text(name, {**values, key: quoted[key]}))


@pytest.mark.parametrize("name", [*TAGGED, "gemma4", "function_gemma"])
@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("^https://", ["https://", "https://a.b/c\nd"], [" https://", "http://"]),
        ("[0-9]{2}$", ["12", "a 12"], ["12 a", "1"]),
        (r"^a\$", ["a$", "a$b"], ["a", "ba$"]),
        ("^a|b$", ["ac", "cb"], ["ca", "bc"]),
        ("[a|^$]b|(c|d)", ["x|b", "$b", "xcx"], ["b", "a"]),
    ],
)
def test_pattern_is_found_anywhere_in_a_text_unless_it_has_anchors(
    name: str, pattern: str, good: list[str], bad: list[str]
) -> None:
    """As JSON Schema has it, also where the text stands without quotes."""
    properties = {"url": {"type": "string", "pattern": pattern}}
    tool = strict_tool({"type": "object", "properties": properties, "required": ["url"]})
    grammar = grammar_of(tool, name)
    for value in good:
        text = call_text(name, {"url": value})
        assert matches(grammar, text), text
        assert read(text, tool, name) == {"url": value}
    for value in bad:
        assert not matches(grammar, call_text(name, {"url": value})), value


def call_text(name: str, values: dict[str, str]) -> str:
    """Return a call with these texts as a model of the format writes it."""
    form = TOOL_FORMATS[name]
    if isinstance(form, GemmaCalls):
        pairs = [f"{key}:{form.quote}{value}{form.quote}" for key, value in values.items()]
        return f"{form.opening}call:find{{{','.join(pairs)}}}{form.closing}"
    assert isinstance(form, TaggedCalls)
    line = "\n" if form.has_lines else ""
    closing = form.string_key_closing or form.key.closing
    pairs = [
        f"{form.key.opening}{key}{closing}{form.value.opening}{line}{value}{line}"
        f"{form.value.closing}"
        for key, value in values.items()
    ]
    head = f"{form.section.opening}{form.name.opening}find{form.name.closing}"
    end = f"{form.call_closing}{form.section.closing}"
    return head + "\n".join(["", *pairs, end])
