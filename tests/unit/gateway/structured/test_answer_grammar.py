"""Grammars of answers: content, reasoning first, and calls in each family's own format."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from services.gateway.conversation.constraint import Constraint, any_json_object
from services.gateway.conversation.conversation import Tool, ToolChoice
from services.gateway.http.errors import ApiError
from services.gateway.output.events import CallArguments, CallBegun, OutputEvent, joined
from services.gateway.output.families import TOOL_FORMATS, OutputFormat
from services.gateway.structured.answer_grammar import AnswerGrammars, AnswerWishes
from shared.messages import Grammar
from tests.unit.gateway.structured.matching import (
    END,
    SPECIAL_TOKENS,
    TRIALS,
    matches,
    random_text,
)

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"type": "string", "enum": ["a", "b c"]},
        "is_on": {"type": "boolean"},
    },
    "required": ["count", "kind"],
    "additionalProperties": False,
}
TOOLS = [
    Tool("read_file", "Reads.", SCHEMA, is_strict=True),
    Tool("list", None, {"type": "object", "properties": {}, "additionalProperties": False}, True),
]
PERSON = Constraint("json_schema", SCHEMA, "response_format")
CONSTRAINED_FORMATS = [
    *("harmony", "minimax", "longcat", "glm", "kimi_k2", "deepseek_v32", "deepseek_v4"),
    *("deepseek_v3", "seed", "qwen_xml", "mistral", "command", "nemotron", "phi4", "granite3"),
    *("jamba", "hermes", "llama3", "llama4", "gemma4", "function_gemma", "lfm2", "olmo3"),
    "pythonic",
]


def grammars(tools: str = "hermes", reasoning: str = "off", **added: int) -> AnswerGrammars:
    """Return the grammars of a model with these formats."""
    return AnswerGrammars(
        SPECIAL_TOKENS,
        {**SPECIAL_TOKENS, **added},
        OutputFormat(tools, reasoning),
        [END],
        trials=TRIALS,
    )


def answer(
    wishes: AnswerWishes, tools: str = "hermes", reasoning: str = "off", tail: str = ""
) -> Grammar:
    """Return the grammar of an answer, which must have one."""
    found = grammars(tools, reasoning).answer(wishes, tail)
    assert found is not None
    return found


def parse(text: str, tools: str, reasoning: str = "off") -> list[OutputEvent]:
    """Return the events of a completion."""
    parser = OutputFormat(tools, reasoning).parser(TOOLS, "")
    assert parser is not None
    return joined([*parser.push(text), *parser.finish()])


def test_answer_without_demands_has_no_grammar() -> None:
    """Tools that are not strict and text that is free need no mask."""
    tools = [Tool("read_file", None, SCHEMA)]
    assert grammars().answer(AnswerWishes(tools=tools), "") is None


def test_content_of_a_schema_matches_valid_json_alone() -> None:
    """White space is free within a limit; a wrong value, a missing key or more text is refused."""
    grammar = answer(AnswerWishes(PERSON))
    assert grammar.end_ids == [END]
    assert matches(grammar, '{"count": 5, "kind": "b c"}')
    assert matches(grammar, '{\n  "count":5,\n  "kind":"a",\n  "is_on": true\n}')
    for bad in [
        '{"count": 100, "kind": "a"}',
        '{"count": 5}',
        '{"count": 5, "kind": "a"} x',
        '{"count": 5, "kind": "a", "more": 1}',
        '{"count":' + " " * 65 + '5, "kind": "a"}',
    ]:
        assert not matches(grammar, bad), bad
    for seed in range(20):
        value = json.loads(random_text(grammar, seed))
        assert 0 <= value["count"] <= 99


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        (any_json_object("response_format"), '{"a": [1, {"b": null}]}', "[1]"),
        (Constraint("regex", r"[0-9]{3}/[a-z]+\.", "guided_regex"), "123/abc.", "123/abc"),
        (Constraint("choice", ["yes", 'n"o', "yes/no"], "guided_choice"), 'n"o', "no"),
        (Constraint("lark", 'start: "a" n+\nn: /[0-9]/', "guided_grammar"), "a12", "12"),
    ],
)
def test_content_of_each_kind_matches_good_texts_and_no_bad_ones(
    constraint: Constraint, good: str, bad: str
) -> None:
    """Objects, regular expressions, choices and Lark grammars hold for answers and raw texts."""
    for grammar in (answer(AnswerWishes(constraint)), grammars().raw(constraint)):
        assert matches(grammar, good)
        assert not matches(grammar, bad)


def test_reasoning_before_constrained_content_is_free() -> None:
    """A model that begins to reason by itself may, and need not; the constraint follows."""
    grammar = answer(AnswerWishes(PERSON), reasoning="think")
    body = '{"count": 5, "kind": "a"}'
    assert matches(grammar, body)
    assert matches(grammar, f"<think>\n{{not json}} </b>\n</think>\n\n{body}")
    # GLM writes a line end first.
    assert matches(grammar, f"\n<think>Hm.</think>\n{body}")
    assert not matches(grammar, f"<think>\n</think>\n\nHere: {body}")
    assert not matches(grammar, f"Well <think></think>{body}")


def test_reasoning_that_the_prompt_has_begun_ends_before_the_grammar_begins() -> None:
    """With a closing marker of one token the grammar begins after it, else it has the marker."""
    body = '{"count": 5, "kind": "a"}'
    gated = grammars("hermes", "think", **{"</think>": 77}).answer(
        AnswerWishes(PERSON), "<|im_start|>assistant\n<think>\n"
    )
    assert gated is not None
    assert gated.begin_ids == [77]
    assert matches(gated, f"\n\n{body}")
    written = answer(AnswerWishes(PERSON), reasoning="think", tail="<think>\n")
    assert written.begin_ids == []
    assert matches(written, f"I think.\n</think>\n\n{body}")
    assert not matches(written, body)


CALL = '{"name": "read_file", "arguments": {"count": 5, "kind": "a"}}'
FREE_CALL = '{"name": "read_file", "arguments": {"count": -1}}'


@pytest.mark.parametrize("choice", ["auto", "required", "named"])
def test_call_inside_reasoning_cannot_escape_the_grammar(choice: str) -> None:
    """The parser would read a call there: reasoning cannot have a marker that is text."""
    demand = ToolChoice(choice, "read_file")  # type: ignore[arg-type]
    wishes = AnswerWishes(tools=TOOLS, tool_choice=demand)
    good = f"<tool_call>{CALL}</tool_call>"
    bad = f"<tool_call>{FREE_CALL}</tool_call>"
    for tail, begin in (("<think>\n", ""), ("", "<think>")):
        grammar = answer(wishes, reasoning="think", tail=tail)
        assert matches(grammar, f"{begin}I call it.</think>{good}")
        assert not matches(grammar, f"{begin}I call it.</think>{bad}")
        assert not matches(grammar, f"{begin}I call it. {bad}</think>{good}")
        assert not matches(grammar, f"{begin}I call it. {bad}")


def test_reasoning_without_a_grammar_bars_the_openings_of_calls() -> None:
    """Where all markers are tokens, ids alone are excluded; else the grammar begins at once."""
    wishes = AnswerWishes(tools=TOOLS, tool_choice=ToolChoice("required"))
    markers = {"</think>": 77, "<tool_call>": 78}
    for name, barred in (("hermes", [78]), ("qwen_xml", None)):
        found = grammars(name, "think", **markers).answer(wishes, "<think>\n")
        assert found is not None
        assert found.begin_ids == ([] if barred is None else [77])
        assert found.barred_ids == (barred or [])
    without_tools = grammars("hermes", "think", **markers).answer(AnswerWishes(PERSON), "<think>")
    assert without_tools is not None
    assert without_tools.barred_ids == []


def test_free_text_has_no_other_opening_of_calls() -> None:
    """Qwen3-Coder's parser reads a call without its first marker too."""
    grammar = answer(AnswerWishes(tools=TOOLS), "qwen_xml")
    assert matches(grammar, "Use <function> and <tool_call.")
    assert not matches(grammar, "<function=read_file>\n</function>\n</tool_call>")


def test_reasoning_that_the_prompt_has_ended_cannot_begin_again() -> None:
    """A template that switches reasoning off closes it in the prompt."""
    grammar = answer(AnswerWishes(PERSON), reasoning="think", tail="<think>\n\n</think>\n\n")
    assert matches(grammar, '{"count": 5, "kind": "a"}')
    assert not matches(grammar, '<think></think>{"count": 5, "kind": "a"}')


@pytest.mark.parametrize("name", CONSTRAINED_FORMATS)
def test_required_calls_of_each_format_are_read_back_as_calls_that_match_the_schema(
    name: str,
) -> None:
    """Random texts of the grammar become nothing but calls of the tools, with valid arguments."""
    reasoning = "harmony" if name == "harmony" else "off"
    wishes = AnswerWishes(tools=TOOLS, tool_choice=ToolChoice("required", may_call_several=False))
    grammar = answer(wishes, name, reasoning)
    for seed in range(12):
        text = random_text(grammar, seed)
        events = parse(text, name, reasoning)
        calls = [one for one in events if isinstance(one, CallBegun)]
        assert len(calls) == 1, (text, events)
        assert calls[0].name in ("read_file", "list"), text
        pieces = [one.text for one in events if isinstance(one, CallArguments)]
        value = json.loads("".join(pieces) or "{}")
        if calls[0].name == "read_file":
            assert set(value) <= set(SCHEMA["properties"]), text
            assert 0 <= value["count"] <= 99, text
            assert value["kind"] in ("a", "b c"), text
        else:
            assert value == {}, text


def test_every_format_of_calls_has_a_grammar_or_is_refused_by_name() -> None:
    """Formats without a grammar are known, and a request that needs one gets a 400."""
    wishes = AnswerWishes(tools=TOOLS, tool_choice=ToolChoice("required"))
    for name in set(TOOL_FORMATS) - set(CONSTRAINED_FORMATS):
        with pytest.raises(ApiError, match=name) as refused:
            grammars(name).answer(wishes, "")
        assert refused.value.param == "tool_choice"


def test_named_choice_allows_that_tool_alone_and_several_calls_only_if_wanted() -> None:
    """`tool_choice` with a name, and parallel_tool_calls."""
    call = '<tool_call>\n{"name": "list", "arguments": {}}\n</tool_call>'
    other = (
        '<tool_call>\n{"name": "read_file", "arguments": {"count": 1, "kind": "a"}}\n</tool_call>'
    )
    one = ToolChoice("named", "list", may_call_several=False)
    several = ToolChoice("required")
    assert matches(answer(AnswerWishes(tools=TOOLS, tool_choice=one)), call)
    assert not matches(answer(AnswerWishes(tools=TOOLS, tool_choice=one)), other)
    assert not matches(answer(AnswerWishes(tools=TOOLS, tool_choice=one)), f"{call}\n{call}")
    assert matches(answer(AnswerWishes(tools=TOOLS, tool_choice=several)), f"{call}\n{other}")
    assert not matches(answer(AnswerWishes(tools=TOOLS, tool_choice=several)), "No.")


def test_strict_tools_with_a_free_choice_allow_text_and_constrain_every_call() -> None:
    """Text may come before a call; what follows the marker is a call or nothing."""
    grammar = answer(AnswerWishes(tools=TOOLS))
    call = '<tool_call>\n{"name": "list", "arguments": {}}\n</tool_call>'
    bad = '<tool_call>\n{"name": "read_file", "arguments": {"count": "x"}}\n</tool_call>'
    assert matches(grammar, "Just text with < and {.")
    assert matches(grammar, f"I look.\n{call}\n{call}")
    assert not matches(grammar, bad)
    assert not matches(grammar, "text <tool_call> more text")


def test_strict_tools_of_a_format_with_values_in_tags_keep_text_values_free() -> None:
    """A text value may be anything up to its closing tag; others are JSON of their type."""
    schema = {
        "type": "object",
        "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}},
        "required": ["path"],
        "additionalProperties": False,
    }
    wishes = AnswerWishes(
        tools=[Tool("read", None, schema, True)], tool_choice=ToolChoice("required")
    )
    grammar = answer(wishes, "qwen_xml")
    text = (
        '<tool_call>\n<function=read>\n<parameter=path>\na "b"\n<c>\n</parameter>\n'
        "<parameter=lines>\n12\n</parameter>\n</function>\n</tool_call>"
    )
    assert matches(grammar, text)
    assert not matches(grammar, text.replace("12", "twelve"))
    assert not matches(grammar, text.replace("path", "place"))


def test_content_with_tools_allows_a_call_instead() -> None:
    """With response_format and tools a model answers in JSON or calls a tool."""
    grammar = answer(AnswerWishes(PERSON, tools=TOOLS))
    assert matches(grammar, '{"count": 5, "kind": "a"}')
    assert matches(grammar, '<tool_call>{"name": "list", "arguments": {}}</tool_call>')
    assert not matches(grammar, "text")


def test_schema_that_cannot_be_matched_is_refused_with_the_path_of_its_part() -> None:
    """The error names the smallest part, also behind a reference."""
    look = {"type": "string", "pattern": "(?=a)b"}
    cases = [
        ({"type": "object", "properties": {"a": {"items": {"not": {}}}}}, ".properties.a.items"),
        ({"properties": {"b": {"anyOf": [{"type": "null"}, look]}}}, ".properties.b.anyOf[1]"),
        (
            {
                "properties": {"c": {"$ref": "#/$defs/X"}},
                "$defs": {"X": {"properties": {"y": look}}},
            },
            ".$defs.X.properties.y",
        ),
        ({"type": "what"}, ""),
    ]
    for schema, path in cases:
        with pytest.raises(ApiError) as refused:
            grammars().answer(AnswerWishes(Constraint("json_schema", schema, "format")), "")
        assert refused.value.status == 400
        assert refused.value.param == f"format{path}", refused.value


def test_strict_tool_whose_schema_cannot_be_matched_is_refused_with_its_path() -> None:
    """The error names the tool's own field, which has another name in each dialect."""
    schema: dict[str, Any] = {"properties": {"x": {"not": {}}}}
    bad = Tool("bad", None, schema, is_strict=True, param="tools[4].input_schema")
    with pytest.raises(ApiError) as refused:
        grammars().answer(AnswerWishes(tools=[TOOLS[0], bad]), "")
    assert refused.value.param == "tools[4].input_schema.properties.x"


@pytest.mark.parametrize(
    ("wishes", "param"),
    [
        (AnswerWishes(PERSON), "response_format"),
        (AnswerWishes(tools=TOOLS), "tools"),
        (AnswerWishes(tools=TOOLS, tool_choice=ToolChoice("required")), "tool_choice"),
    ],
    ids=["schema", "strict tools", "required"],
)
def test_grammar_that_cannot_be_made_is_refused_by_the_field_that_demands_it(
    wishes: AnswerWishes, param: str
) -> None:
    """A model without an end cannot be constrained; the error names the cause in the request."""
    endless = AnswerGrammars(SPECIAL_TOKENS, SPECIAL_TOKENS, OutputFormat("hermes", "off"), [])
    with pytest.raises(ApiError) as refused:
        endless.answer(wishes, "")
    assert refused.value.param == param == wishes.param


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint("regex", "(a", "guided_regex"),
        Constraint("regex", "(?=a)", "guided_regex"),
        Constraint("lark", "start: nowhere", "guided_grammar"),
        Constraint("lark", "start: " + '"a" ' * 100_000, "guided_grammar"),
        Constraint("choice", [], "guided_choice"),
    ],
    ids=["open group", "look-ahead", "unknown rule", "too long", "no choice"],
)
def test_constraint_that_is_not_valid_is_refused_by_its_field(constraint: Constraint) -> None:
    """Regular expressions, Lark grammars and choices give a 400 that names the field."""
    with pytest.raises(ApiError) as refused:
        grammars().raw(constraint)
    assert (refused.value.status, refused.value.param) == (400, constraint.param)


def test_parts_of_a_request_are_checked_one_by_one_and_not_again_with_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between them other tenants have their turns: many strict tools do not hold a thread."""
    tools = [Tool(f"t{n}", None, {**SCHEMA, "title": str(n)}, is_strict=True) for n in range(5)]
    wishes = AnswerWishes(PERSON, tools)
    made = grammars()
    checks = made.checks(wishes)
    assert len(checks) == 6
    compiled: list[str] = []
    find_problem = TRIALS.find_problem

    def counting(text: str, special_ids: Sequence[int]) -> str:
        compiled.append(text)
        return find_problem(text, special_ids)

    monkeypatch.setattr(TRIALS, "find_problem", counting)
    for check in checks:
        before = len(compiled)
        check()
        assert len(compiled) == before + 1
    assert made.answer(wishes, "") is not None
    assert len(compiled) == len(checks) + 1


def test_model_whose_tokenizer_ranks_cannot_read_refuses_every_grammar() -> None:
    """A model with tokenizer.model alone gives a 400 in place of a stream that fails."""
    blind = AnswerGrammars(
        SPECIAL_TOKENS, SPECIAL_TOKENS, OutputFormat("hermes", "off"), [END], can_match=False
    )
    with pytest.raises(ApiError, match="which has no tokenizer") as refused:
        blind.answer(AnswerWishes(PERSON), "")
    assert (refused.value.status, refused.value.param) == (400, "response_format")
    with pytest.raises(ApiError, match="which has no tokenizer"):
        blind.raw(Constraint("regex", "a", "guided_regex"))
    assert blind.answer(AnswerWishes(tools=[Tool("read_file", None, SCHEMA)]), "") is None
