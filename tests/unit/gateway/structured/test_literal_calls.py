"""Grammars of Gemma's and Python-like calls: literals that follow a schema."""

import json
from typing import Any

import pytest

from services.gateway.conversation.conversation import Tool, ToolChoice
from services.gateway.http.errors import ApiError
from services.gateway.output.events import CallArguments, CallBegun, Text, joined
from services.gateway.output.families import OutputFormat
from services.gateway.structured.answer_grammar import AnswerGrammars, AnswerWishes
from shared.messages import Grammar
from tests.unit.gateway.structured.matching import END, SPECIAL_TOKENS, TRIALS, matches, random_text

FORMATS = ["gemma4", "function_gemma", "lfm2", "olmo3", "pythonic"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "note": {"type": "string"},
        "depth": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "null"}]},
        "kind": {"enum": ["a", 'b "c"', 3, True]},
        "code": {"type": "string", "pattern": "^[a-z]{2}[0-9]$"},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        "node": {"$ref": "#/$defs/node"},
        "counts": {"type": "object", "additionalProperties": {"type": "integer"}},
    },
    "required": ["kind", "tags"],
    "additionalProperties": False,
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "is_on": {"type": ["boolean", "null"]},
                "more": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1},
            },
            "required": ["is_on"],
        }
    },
}
STRICT = [Tool("find", None, SCHEMA, is_strict=True)]
FREE = [Tool("find", None, SCHEMA)]
GOOD = {
    "gemma4": '<|tool_call>call:find{depth:4,kind:<|"|>a<|"|>,node:{is_on:null},'
    'note:<|"|>it\'s "x"\n<|"|>,tags:[true,false]}<tool_call|>',
    "function_gemma": "<start_function_call>call:find{depth:4,kind:<escape>a<escape>,"
    'node:{is_on:null},note:<escape>it\'s "x"\n<escape>,tags:[true,false]}<end_function_call>',
    "lfm2": '<|tool_call_start|>[find(note="it\'s \\"x\\"\\n", depth=4, kind="a", '
    'tags=[True, False], node={"is_on": None})]<|tool_call_end|>',
    "olmo3": '<function_calls>\nfind(note="it\'s \\"x\\"\\n", depth=4, kind="a", '
    'tags=[True, False], node={"is_on": None})\n</function_calls>',
    "pythonic": '[find(note="it\'s \\"x\\"\\n", depth=4, kind="a", tags=[True, False], '
    'node={"is_on": None})]',
}
"""A call as models of the format write it."""
VALUE = {
    "note": 'it\'s "x"\n',
    "depth": 4,
    "kind": "a",
    "tags": [True, False],
    "node": {"is_on": None},
}


def grammar_of(name: str, tools: list[Tool], choice: ToolChoice) -> Grammar:
    """Return the grammar of an answer in a format."""
    grammars = AnswerGrammars(
        SPECIAL_TOKENS, SPECIAL_TOKENS, OutputFormat(name, "off"), [END], trials=TRIALS
    )
    found = grammars.answer(AnswerWishes(tools=tools, tool_choice=choice), "")
    assert found is not None
    return found


def arguments(text: str, name: str) -> list[dict[str, Any]]:
    """Return the arguments of each call in a text, which has nothing else."""
    parser = OutputFormat(name, "off").parser(STRICT, "")
    assert parser is not None
    found: list[str] = []
    for event in joined([*parser.push(text), *parser.finish()]):
        assert not (isinstance(event, Text) and event.text.strip()), text
        if isinstance(event, CallBegun):
            found.append("")
        if isinstance(event, CallArguments):
            found[-1] += event.text
    return [json.loads(one) for one in found]


def assert_node(node: dict[str, Any]) -> None:
    assert node["is_on"] in (True, False, None)
    assert set(node) <= {"is_on", "more"}
    for one in node.get("more", []):
        assert_node(one)


@pytest.mark.parametrize("name", FORMATS)
def test_random_text_of_strict_grammar_is_read_back_as_valid_arguments(name: str) -> None:
    """References, alternatives, lists, maps, constants and patterns of a schema hold."""
    # Random characters never end a free text between markers.
    properties = {key: part for key, part in SCHEMA["properties"].items() if key != "note"}
    tools = [Tool("find", None, {**SCHEMA, "properties": properties}, is_strict=True)]
    grammar = grammar_of(name, tools, ToolChoice("required", may_call_several=False))
    for seed in range(25):
        text = random_text(grammar, seed)
        [value] = arguments(text, name)
        assert set(value) <= set(SCHEMA["properties"]), text
        assert value["kind"] in ("a", 'b "c"', 3, True), text
        assert 1 <= len(value["tags"]) <= 3, text
        assert all(isinstance(one, bool) for one in value["tags"]), text
        assert value.get("depth") is None or 0 <= value["depth"] <= 9, text
        assert len(value.get("code", "ab1")) == 3, text
        assert all(isinstance(one, int) for one in value.get("counts", {}).values()), text
        if "node" in value:
            assert_node(value["node"])


@pytest.mark.parametrize("name", FORMATS)
def test_calls_as_models_write_them_match(name: str) -> None:
    """The grammar has the spelling of the family's template, for strict and for other tools."""
    choice = ToolChoice("required", may_call_several=False)
    assert arguments(GOOD[name], name) == [VALUE]
    for tools in (STRICT, FREE):
        assert matches(grammar_of(name, tools, choice), GOOD[name])


@pytest.mark.parametrize("name", FORMATS)
def test_calls_against_the_schema_do_not_match(name: str) -> None:
    """A missing argument, an unknown one, a wrong type and another tool are refused."""
    grammar = grammar_of(name, STRICT, ToolChoice("required"))
    for good, bad in [
        ("find", "search"),
        ("true", '"yes"') if "gemma" in name else ("True", '"yes"'),
        ("depth", "length"),
        ("4", "44"),
    ]:
        assert good in GOOD[name]
        assert not matches(grammar, GOOD[name].replace(good, bad, 1)), bad
    assert not matches(grammar, "No call.")


@pytest.mark.parametrize("name", FORMATS)
def test_several_calls_match_only_if_wanted(name: str) -> None:
    """Formats with a list or lines have the calls in it, the others one section after another."""
    good = GOOD[name]
    if name in ("lfm2", "pythonic"):
        call = good[good.index("find(") : good.rindex(")") + 1]
        two = good.replace(call, f"{call}, {call}")
    elif name == "olmo3":
        call = good.split("\n")[1]
        two = good.replace(call, f"{call}\n{call}")
    else:
        two = good + good
    assert len(arguments(two, name)) == 2
    assert matches(grammar_of(name, STRICT, ToolChoice("required")), two)
    one = ToolChoice("required", may_call_several=False)
    assert not matches(grammar_of(name, STRICT, one), two)


@pytest.mark.parametrize("name", FORMATS)
def test_free_choice_allows_text_and_constrains_calls(name: str) -> None:
    """With strict tools and the choice auto an answer may be text, and a call follows the
    schema."""
    grammar = grammar_of(name, STRICT, ToolChoice("auto"))
    assert matches(grammar, "Just an answer: {1, 2} (really).")
    assert matches(grammar, GOOD[name])
    assert not matches(grammar, GOOD[name].replace("4", "44"))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "part", [{"allOf": [{"type": "string"}]}, {"not": {}}, {"$ref": "#/$defs/nowhere"}]
)
def test_schema_that_literals_cannot_follow_is_refused(name: str, part: dict[str, Any]) -> None:
    """A strict tool is never served without its schema."""
    tool = Tool("find", None, {"type": "object", "properties": {"x": part}}, is_strict=True)
    with pytest.raises(ApiError) as refused:
        grammar_of(name, [tool], ToolChoice("required"))
    assert refused.value.status == 400


@pytest.mark.parametrize("name", FORMATS)
def test_schema_whose_references_nest_too_deeply_for_literals_is_refused(name: str) -> None:
    """Hundreds of definitions that name each other are no error of the server."""
    chain: dict[str, Any] = {f"a{n}": {"$ref": f"#/$defs/a{n + 1}"} for n in range(900)}
    schema = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/a0"}},
        "$defs": {**chain, "a900": {"type": "string"}},
    }
    with pytest.raises(ApiError) as refused:
        grammar_of(name, [Tool("find", None, schema, is_strict=True)], ToolChoice("required"))
    assert refused.value.status == 400
    assert "too deeply" in refused.value.message
