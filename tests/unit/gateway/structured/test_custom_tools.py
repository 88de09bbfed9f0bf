"""Custom tools with a grammar, such as Codex's apply_patch, inside each format of calls."""

import json

import pytest

from services.gateway.conversation.constraint import Constraint
from services.gateway.conversation.conversation import Tool, ToolChoice
from services.gateway.dialects.responses.tools import Toolbox
from services.gateway.output.events import CallArguments, joined
from services.gateway.output.families import OutputFormat
from services.gateway.structured.answer_grammar import AnswerGrammars, AnswerWishes
from shared.messages import Grammar
from tests.unit.gateway.structured.matching import END, SPECIAL_TOKENS, matches

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
    grammars = AnswerGrammars(SPECIAL_TOKENS, SPECIAL_TOKENS, OutputFormat(name, "off"), [END])
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
    grammars = AnswerGrammars(SPECIAL_TOKENS, SPECIAL_TOKENS, form, [END])
    grammar = grammars.answer(AnswerWishes(tools=[strict, patch_tool()]), "")
    assert grammar is not None
    assert matches(grammar, f"I change it.\n{CALLS['qwen_xml'].format(PATCH)}")
    assert not matches(grammar, CALLS["qwen_xml"].format("x = 2"))


def test_free_choice_of_custom_tool_alone_has_no_grammar() -> None:
    """Without a demand its grammar is a description."""
    grammars = AnswerGrammars(SPECIAL_TOKENS, SPECIAL_TOKENS, OutputFormat("glm", "off"), [END])
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
