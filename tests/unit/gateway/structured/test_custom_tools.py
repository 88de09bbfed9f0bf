"""Custom tools with a grammar, such as Codex's apply_patch, inside each format of calls."""

import json
from collections.abc import Sequence

import pytest

from services.gateway.conversation.constraint import Constraint
from services.gateway.conversation.conversation import Tool, ToolChoice
from services.gateway.dialects.responses.tools import Toolbox
from services.gateway.output.events import CallArguments, Text, joined
from services.gateway.output.families import TOOL_FORMATS, OutputFormat
from services.gateway.structured.answer_grammar import AnswerGrammars, AnswerWishes
from shared import limits
from shared.messages import Grammar
from tests.unit.gateway.structured.matching import END, SPECIAL_TOKENS, TRIALS, matches

LARK = """start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
hunk: "*** Update File: " /(.+)/ LF line+
line: ("@@" | "+" | "-" | " ") /(.*)/ LF -> change
%import common.LF
"""
PATCH = """*** Begin Patch
*** Update File: a.py
@@
-x = "1"
+x = 2 </b> 🎉
*** End Patch"""
CALLS = {
    "qwen_xml": "<tool_call>\n<function=apply_patch>\n<parameter=input>\n{}\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm": "<tool_call>apply_patch\n<arg_key>input</arg_key>\n<arg_value>{}</arg_value>\n"
    "</tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="apply_patch">\n<parameter name="input">{}'
    "</parameter>\n</invoke>\n</minimax:tool_call>",
    "gemma4": '<|tool_call>call:apply_patch{{input:<|"|>{}<|"|>}}<tool_call|>',
}
"""A call in formats that write texts without escapes."""


def patch_tool(definition: str = LARK, syntax: str = "lark") -> Tool:
    """Return Codex's custom tool as the model sees it."""
    format_ = {"type": "grammar", "syntax": syntax, "definition": definition}
    [tool] = Toolbox().read([{"type": "custom", "name": "apply_patch", "format": format_}], "tools")
    return tool


def grammar_of(name: str, tool: Tool, choice: ToolChoice | None = None) -> Grammar:
    """Return the grammar of an answer that must call the tool."""
    grammars = AnswerGrammars(
        SPECIAL_TOKENS, SPECIAL_TOKENS, OutputFormat(name, "off"), [END], trials=TRIALS
    )
    demand = choice or ToolChoice("named", "apply_patch", may_call_several=False)
    found = grammars.answer(AnswerWishes(tools=[tool], tool_choice=demand), "")
    assert found is not None
    return found


@pytest.mark.parametrize("name", CALLS)
def test_demanded_call_of_custom_tool_matches_its_grammar(name: str) -> None:
    """A patch matches, and is read back unchanged; any other text does not."""
    grammar = grammar_of(name, patch_tool())
    call = CALLS[name].format(PATCH)
    assert matches(grammar, call)
    for bad in ("*** Begin Patch\n*** End Patch", "x = 2", PATCH.replace("-x", "x"), ""):
        assert not matches(grammar, CALLS[name].format(bad)), bad

    parser = OutputFormat(name, "off").parser([patch_tool()], "")
    assert parser is not None
    events = joined([*parser.push(call), *parser.finish()])
    arguments = "".join(one.text for one in events if isinstance(one, CallArguments))
    assert json.loads(arguments) == {"input": PATCH}


def test_regular_expression_of_custom_tool_holds_too() -> None:
    """The syntax `regex` is enforced as well."""
    grammar = grammar_of("qwen_xml", patch_tool("[0-9]{3}", "regex"))
    assert matches(grammar, CALLS["qwen_xml"].format("123"))
    assert not matches(grammar, CALLS["qwen_xml"].format("12"))


def test_strict_tool_beside_custom_tool_enforces_both_with_a_free_choice() -> None:
    """An answer that has a grammar for another reason has the custom tool's too."""
    strict = Tool("list", None, {"type": "object", "additionalProperties": False}, is_strict=True)
    form = OutputFormat("qwen_xml", "off")
    grammars = AnswerGrammars(SPECIAL_TOKENS, SPECIAL_TOKENS, form, [END], trials=TRIALS)
    grammar = grammars.answer(AnswerWishes(tools=[strict, patch_tool()]), "")
    assert grammar is not None
    assert matches(grammar, f"I change it.\n{CALLS['qwen_xml'].format(PATCH)}")
    assert not matches(grammar, CALLS["qwen_xml"].format("x = 2"))


FREE_CALLS = {
    "qwen_xml": "<tool_call>\n<function=shell>\n<parameter=command>\nls <b> | wc\n</parameter>\n"
    "<parameter=any name>\n3\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>shell\n<arg_key>command</arg_key>\n<arg_value>ls <b> | wc</arg_value>\n"
    "<arg_key>any name</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="shell">\n<parameter name="command">ls <b> | wc'
    '</parameter>\n<parameter name="any name">3</parameter>\n</invoke>\n</minimax:tool_call>',
    "gemma4": '<|tool_call>call:shell{command:<|"|>ls <b> | wc<|"|>,<|"|>any name<|"|>:3}'
    "<tool_call|>",
}
"""A call of a tool that is not strict, with an argument of which its schema says nothing."""
SHELL = Tool("shell", None, {"type": "object", "properties": {"command": {"type": "string"}}})


def free_choice(
    name: str, tools: Sequence[Tool], reasoning: str = "off", tail: str = ""
) -> Grammar | None:
    """Return the grammar of an answer whose model decides whether it calls tools."""
    form = OutputFormat(name, reasoning)
    grammars = AnswerGrammars(SPECIAL_TOKENS, SPECIAL_TOKENS, form, [END], trials=TRIALS)
    return grammars.answer(AnswerWishes(tools=tools), tail)


@pytest.mark.parametrize("name", CALLS)
def test_free_choice_constrains_calls_of_custom_tool_and_nothing_else(name: str) -> None:
    """Codex never demands a call. Text before and after calls, and other tools, stay free."""
    grammar = free_choice(name, [SHELL, patch_tool()])
    assert grammar is not None
    good, other = CALLS[name].format(PATCH), FREE_CALLS[name]
    opening = next(iter(TOOL_FORMATS[name].openings))
    for text in (
        "",
        "Just text with <b>, { and\n```\ncode\n```",
        f"The marker is `{opening}`, as I said.",
        good,
        f"I change it.\n{good}\n{other}\nBoth are done.",
        f"{other}{other}",
    ):
        assert matches(grammar, text), text
    for bad in ("*** Begin Patch\n*** End Patch", "x = 2", PATCH.replace("-x", "x"), ""):
        for text in (CALLS[name].format(bad), f"{other}\n{CALLS[name].format(bad)}"):
            assert not matches(grammar, text), text

    parser = OutputFormat(name, "off").parser([SHELL, patch_tool()], "")
    assert parser is not None
    events = joined([*parser.push(f"{good}\n{other}"), *parser.finish()])
    found = [json.loads(one.text) for one in events if isinstance(one, CallArguments)]
    assert found[0] == {"input": PATCH}
    assert found[1]["command"] == "ls <b> | wc"


@pytest.mark.parametrize("name", CALLS)
def test_tools_that_are_not_strict_share_their_rules(name: str) -> None:
    """An agent's hundred tools make no grammar that takes long to compile at every turn."""
    tools = [Tool(f"tool{number}", None, {"type": "object"}) for number in range(100)]
    grammar = free_choice(name, [*tools, patch_tool()])
    assert grammar is not None
    assert len(grammar.text) < 5_000
    assert matches(grammar, FREE_CALLS[name].replace("shell", "tool99"))
    assert not matches(grammar, FREE_CALLS[name].replace("shell", "apply_patch"))


def test_quoted_marker_with_a_free_choice_is_read_as_text() -> None:
    """What the grammar lets through behind a marker is no call."""
    text = "The marker is `<tool_call>`, then <b>."
    parser = OutputFormat("qwen_xml", "off").parser([patch_tool()], "")
    assert parser is not None
    events = joined([*parser.push(text), *parser.finish()])
    assert [one.text for one in events if isinstance(one, Text)] == [text]


def test_free_choice_with_open_reasoning_constrains_the_call_after_it() -> None:
    """Reasoning stays as it is, and comes first."""
    grammar = free_choice("qwen_xml", [patch_tool()], "think", "<think>\n")
    assert grammar is not None
    call = CALLS["qwen_xml"]
    assert matches(grammar, f"I see <b>.\n</think>\n\n{call.format(PATCH)}")
    assert matches(grammar, "I see.\n</think>\n\nNothing to do.")
    assert not matches(grammar, f"I see.\n</think>\n\n{call.format('x = 2')}")


@pytest.mark.parametrize(
    ("name", "tools"),
    [
        ("hermes", [patch_tool()]),
        ("glm", [SHELL]),
        ("glm", [patch_tool("start: nowhere")]),
        ("glm", [patch_tool("x", "gbnf")]),
        ("glm", [patch_tool(f'start: "{"x" * limits.GRAMMAR_CHARS_MAX}"')]),
        ("glm", [patch_tool(), Tool("b" * limits.GRAMMAR_CHARS_MAX)]),
    ],
    ids=["escapes", "no custom tool", "broken", "other syntax", "long", "long with others"],
)
def test_free_choice_is_served_without_a_grammar_where_none_can_hold(
    name: str, tools: list[Tool]
) -> None:
    """The client did not demand it, so it is no error: the tool's description still has it."""
    assert free_choice(name, tools) is None


def test_free_choice_is_served_without_a_grammar_if_the_ranks_can_match_none() -> None:
    """A model with `tokenizer.model` alone serves Codex too."""
    form = OutputFormat("glm", "off")
    grammars = AnswerGrammars(SPECIAL_TOKENS, SPECIAL_TOKENS, form, [END], can_match=False)
    assert grammars.answer(AnswerWishes(tools=[patch_tool()]), "") is None


@pytest.mark.parametrize("definition", ["start: nowhere", "no grammar"])
def test_grammar_that_cannot_be_compiled_is_a_description(definition: str) -> None:
    """The call is demanded all the same, with any text."""
    grammar = grammar_of("qwen_xml", patch_tool(definition))
    assert matches(grammar, CALLS["qwen_xml"].format("x = 2"))
    assert not matches(grammar, "No call.")


def test_format_with_escapes_takes_any_text() -> None:
    """In JSON a grammar of the text cannot hold, so a call with one text is demanded."""
    call = {"name": "apply_patch", "arguments": {"input": PATCH}}
    grammar = grammar_of("hermes", patch_tool())
    assert matches(grammar, f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>")
    assert not matches(grammar, "No call.")
    other = json.dumps({**call, "arguments": {"path": "a.py"}})
    assert not matches(grammar, f"<tool_call>\n{other}\n</tool_call>")


def test_custom_tool_of_a_request_keeps_its_form() -> None:
    """The path of the grammar in the request is kept for errors; other syntaxes are text."""
    expected = Constraint("lark", LARK, "tools[0].format.definition")
    assert patch_tool().text_form == expected
    assert patch_tool("x", "gbnf").text_form is None
