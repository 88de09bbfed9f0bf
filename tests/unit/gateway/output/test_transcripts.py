"""Golden transcripts of every family: the same output however the text is cut."""

import itertools
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.output import families
from services.gateway.output.arguments_text import ArgumentsText
from services.gateway.output.events import (
    CallArguments,
    CallBegun,
    CallEnded,
    OutputEvent,
    Reasoning,
    Text,
    joined,
)
from tests.support.effort import cases
from tests.unit.gateway.output import transcripts
from tests.unit.gateway.output.transcript import TOOLS, Transcript


def _events(transcript: Transcript, cuts: list[int]) -> list[OutputEvent]:
    """Return the joined events of a transcript in pieces, with one id for all calls.

    Fails if text does not come from the places that the parser names, or from settled text.
    """
    output_format = families.OutputFormat(transcript.tool_format, transcript.reasoning_format)
    parser = output_format.parser(TOOLS, transcript.prompt_tail)
    assert parser is not None
    events: list[OutputEvent] = []
    text = transcript.text
    positions = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    final_chars = 0
    for piece in [*(text[start:end] for start, end in itertools.pairwise(positions)), None]:
        new = parser.finish() if piece is None else parser.push(piece)
        found = parser.take_text_places()
        texts = ["".join(text[one.start : one.stop] for one in places) for places in found]
        assert texts == [event.text for event in new if isinstance(event, Text)]
        for place in itertools.chain(*found):
            assert final_chars <= place.start
            final_chars = place.stop
        assert final_chars <= parser.final_chars
        final_chars = parser.final_chars
        events += new
    assert parser.call_count == sum(isinstance(event, CallBegun) for event in events)
    return [
        CallBegun(event.number, "id", event.name) if isinstance(event, CallBegun) else event
        for event in joined(events)
    ]


def _calls(events: list[OutputEvent]) -> list[tuple[str, str]]:
    """Return names and arguments; fail if events of a call are not together."""
    calls: list[tuple[str, str]] = []
    name, arguments = "", ""
    for event in events:
        match event:
            case CallBegun(number=number):
                assert not name
                assert number == len(calls)
                name, arguments = event.name, ""
            case CallArguments(text=text):
                assert name
                arguments += text
            case CallEnded():
                calls.append((name, arguments))
                name = ""
            case _:
                assert not name
    assert not name
    return calls


@pytest.mark.parametrize("name", transcripts.ALL)
def test_transcript_of_family_gives_its_answer_reasoning_and_calls(name: str) -> None:
    """Every transcript has the answer, the reasoning and the calls that it means."""
    transcript = transcripts.ALL[name]

    events = _events(transcript, [])

    assert "".join(one.text for one in events if isinstance(one, Text)) == transcript.answer
    reasoning = "".join(one.text for one in events if isinstance(one, Reasoning))
    assert reasoning == transcript.reasoning
    calls = _calls(events)
    assert [one[0] for one in calls] == [one[0] for one in transcript.calls]
    for (_, arguments), (_, expected) in zip(calls, transcript.calls, strict=True):
        if transcript.is_cut:
            with pytest.raises(json.JSONDecodeError):
                json.loads(arguments)
        else:
            assert json.loads(arguments) == expected


@pytest.mark.deep
@pytest.mark.parametrize("name", transcripts.ALL)
def test_transcript_cut_at_every_place_gives_the_same_output(name: str) -> None:
    """One cut anywhere (`make test`: at every third place), and one at every character, change
    nothing.
    """
    transcript = transcripts.ALL[name]
    whole = _events(transcript, [])

    assert _events(transcript, list(range(len(transcript.text)))) == whole
    for cut in range(0, len(transcript.text), cases(3, 1)):
        assert _events(transcript, [cut]) == whole


@given(
    name=st.sampled_from(sorted(transcripts.ALL)),
    cuts=st.lists(st.integers(0, 10_000), max_size=200),
)
def test_transcript_cut_at_random_gives_the_same_output(name: str, cuts: list[int]) -> None:
    """Every partition of the text, with several pieces at once, gives the same events."""
    transcript = transcripts.ALL[name]

    assert _events(transcript, cuts) == _events(transcript, [])


@given(
    tool_format=st.sampled_from(sorted(families.TOOL_FORMATS)),
    data=st.data(),
    cuts=st.lists(st.integers(0, 10_000), max_size=60),
)
def test_text_of_markers_in_any_order_gives_the_same_output_however_it_is_cut(
    tool_format: str, data: st.DataObject, cuts: list[int]
) -> None:
    """Nonsense of a format's own markers never fails, and its cuts change nothing."""
    call_format = families.TOOL_FORMATS[tool_format]
    pieces = [
        *call_format.openings,
        *call_format.special_texts,
        *["now", "edit-file", "path", "text", "line", "call:", '{"name": "now"', '"arguments": '],
        *['{"path": "x"}', "{", "}", "[", "]", "(", ")", ",", ":", "=", '"', "'", "\\", "\n", " "],
        *["<think>", "</think>", "1", "x", "null", "ü", "functions.now:0", "function", "to="],
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=30)))
    reasoning_format = "harmony" if tool_format == "harmony" else "think"
    transcript = Transcript("random", tool_format, text, reasoning_format=reasoning_format)

    whole = _events(transcript, [])

    assert _events(transcript, cuts) == whole
    calls = _calls(whole)
    may_be_cut = bool(whole) and isinstance(whole[-1], CallEnded)
    for _, arguments in calls[:-1] if may_be_cut else calls:
        assert isinstance(json.loads(arguments), dict)
    if may_be_cut:
        written: list[str] = []
        started = ArgumentsText(written.append)
        started.add(calls[-1][1])
        assert not started.is_broken


def test_name_and_id_of_call_come_before_its_arguments() -> None:
    """A call begins as soon as its name is complete, and arguments follow as they arrive."""
    parser = families.OutputFormat("hermes").parser(TOOLS, "")
    assert parser is not None
    assert parser.push('<tool_call>{"name": "now') == []
    [begun] = parser.push('"')
    assert isinstance(begun, CallBegun)
    assert re.fullmatch("call_[0-9a-f]{24}", begun.call_id)
    assert parser.push(', "arguments": {"a": "b') == [CallArguments('{"a": "b')]
    assert parser.push("cd") == [CallArguments("cd")]


def test_string_between_tags_arrives_piece_by_piece_as_json() -> None:
    """A string value of a tagged format is passed on while the model writes it."""
    parser = families.OutputFormat("qwen_xml").parser(TOOLS, "")
    assert parser is not None
    [begun, _] = parser.push("<tool_call>\n<function=edit-file>\n<parameter=text>\n")
    assert isinstance(begun, CallBegun)
    assert parser.push('say "') == [CallArguments('say \\"')]
    assert parser.push("hi\nyou") == [CallArguments("hi\\nyou")]
    assert parser.push("\n</para") == []
    assert parser.push("llel") == [CallArguments("\\n</parallel")]
    assert parser.push("<parameter=line>\n1") == [CallArguments("<parameter=line>\\n1")]


def test_value_that_is_no_json_does_not_hold_back_the_rest_of_the_answer() -> None:
    """Its string has no end, and the text after the call must not wait for the last token."""
    parser = families.OutputFormat("qwen_xml").parser(TOOLS, "")
    assert parser is not None
    parser.push('<tool_call>\n<function=edit-file>\n<parameter=ranges>\n[1, "a\n</parameter>\n')
    parser.push("</function>\n</tool_call>\n")
    found = [event for _ in range(1_000) for event in parser.push("Some words and more of them.")]
    assert CallArguments('"[1, \\"a"}') in found
    assert parser.push("Now.") == [Text("Now.")]


def test_ids_of_kimi_are_kept_and_those_of_mistral_have_nine_letters_or_digits() -> None:
    """Ids in the text are the calls' ids; generated ones follow the family's rule."""
    found = {}
    for name, text in {
        "kimi_k2": "<|tool_call_begin|>functions.now:7<|tool_call_argument_begin|>{}",
        "mistral": "[TOOL_CALLS]now[ARGS]{}",
    }.items():
        parser = families.OutputFormat(name).parser(TOOLS, "")
        assert parser is not None
        begun = parser.push(text)[0]
        assert isinstance(begun, CallBegun)
        found[name] = begun.call_id
    assert found["kimi_k2"] == "functions.now:7"
    assert re.fullmatch("[a-zA-Z0-9]{9}", found["mistral"])


def test_only_text_that_may_begin_a_call_is_held_back() -> None:
    """Only a possible start of a call, and white space before it, is held."""
    parser = families.OutputFormat("hermes").parser(TOOLS, "")
    assert parser is not None
    assert parser.push("Hello there") == [Text("Hello there")]
    assert parser.push(" \n") == []
    assert parser.push("you <tool") == [Text(" \nyou")]
    assert parser.push("box>") == [Text(" <toolbox>")]
