"""Tool calls: found in any partition of the text; other text stays text."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.tokenizing.tool_calls import ParsedCall, ToolCallParser

_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "n": 1}}\n</tool_call>'
_CASES = {
    "one call": (_CALL, "", ["weather"]),
    "text before": (f"Let me see.\n{_CALL}", "Let me see.", ["weather"]),
    "two calls": (f"{_CALL}\n{_CALL}\n", "", ["weather"] * 2),
    "no call": ("a < b and <tool> \n", "a < b and <tool> \n", []),
    "broken JSON": ("<tool_call>{oops</tool_call>!", "<tool_call>{oops</tool_call>!", []),
    "broken later": ("x \n<tool_call>{</tool_call>", "x \n<tool_call>{</tool_call>", []),
    "no object": ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
    "unfinished": ('x <tool_call>{"name": "a"', 'x <tool_call>{"name": "a"', []),
    "no arguments": ('<tool_call>{"name": "now"}</tool_call>', "", ["now"]),
    "arguments as text": (
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        ["f"],
    ),
    "text after": (f"{_CALL} done", " done", ["weather"]),
}


def _split(text: str, cuts: list[int]) -> tuple[str, list[ParsedCall]]:
    parser = ToolCallParser()
    pieces: list[str | ParsedCall] = []
    positions = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    for start, end in itertools.pairwise(positions):
        pieces += parser.push(text[start:end])
    pieces += parser.finish()
    words = "".join(piece for piece in pieces if isinstance(piece, str))
    return words, [piece for piece in pieces if isinstance(piece, ParsedCall)]


@pytest.mark.parametrize("case", _CASES)
@given(cuts=st.lists(st.integers(0, 10_000), max_size=200))
def test_tool_calls_are_found_however_the_text_is_cut(case: str, cuts: list[int]) -> None:
    """Every partition of the text gives the same text and calls."""
    text, words, names = _CASES[case]
    found_words, calls = _split(text, cuts)
    assert found_words == words
    assert [call.name for call in calls] == names
    assert all(isinstance(json.loads(call.arguments), dict) for call in calls)


def test_tool_call_arguments_keep_names_values_and_order() -> None:
    """Names, values and order of the arguments are unchanged."""
    _, calls = _split(_CALL, [])
    assert list(json.loads(calls[0].arguments).items()) == [("city", "Köln"), ("n", 1)]
    assert calls[0].call_id.startswith("call_")


def test_only_text_that_may_begin_tool_call_is_held_back() -> None:
    """Only a possible start of a call, and white space before it, is held."""
    parser = ToolCallParser()
    assert parser.push("Hello there") == ["Hello there"]
    assert parser.push(" \n") == []
    assert parser.push("you <tool") == [" \nyou"]
    assert parser.push("box>") == [" <toolbox>"]
