"""Input items as messages of a conversation."""

from typing import Any

import pytest

from services.gateway.conversation.conversation import Call, ConversationMessage
from services.gateway.dialects.responses.items import ItemReader
from services.gateway.dialects.responses.tools import Toolbox
from services.gateway.http.errors import ApiError


def read(*items: Any, tools: list[Any] | None = None) -> ItemReader:
    """Return the reader after these items."""
    toolbox = Toolbox()
    toolbox.read(tools or [], "tools")
    reader = ItemReader(toolbox)
    reader.read(list(items), lambda index: f"input[{index}]")
    return reader


def call(call_id: str, name: str = "run", **fields: Any) -> dict[str, Any]:
    """Return a function call."""
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": "{}", **fields}


def output(call_id: str, text: Any = "done") -> dict[str, Any]:
    """Return the result of a function call."""
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def test_items_of_one_turn_become_one_message_of_the_model() -> None:
    """Reasoning, text and calls that follow each other are one message, as templates expect."""
    reader = read(
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Think."}],
            "encrypted_content": None,
        },
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I run.", "annotations": []}],
        },
        call("a", arguments='{"x": 1}'),
        call("b", arguments="no json"),
        output("a"),
        output("b", [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]),
    )
    assert reader.messages == [
        ConversationMessage("system", "Be brief."),
        ConversationMessage("user", "Hi"),
        ConversationMessage(
            "assistant",
            "I run.",
            reasoning="Think.",
            calls=[Call("a", "run", {"x": 1}), Call("b", "run", "no json")],
        ),
        ConversationMessage("tool", "done", answers="a"),
        ConversationMessage("tool", "onetwo", answers="b"),
    ]
    assert not reader.ignored


def test_reasoning_after_a_result_begins_a_new_message() -> None:
    """Interleaved reasoning stays at its place."""
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "More."}]}
    reader = read(call("a"), output("a"), thought, call("b"), output("b"), thought)
    roles = [message.role for message in reader.messages]
    assert roles == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert reader.messages[2].reasoning == reader.messages[4].reasoning == "More."
    assert reader.messages[2].calls[0].call_id == "b"


def test_text_and_reasoning_after_a_call_belong_to_its_turn() -> None:
    """A call's result follows the turn that made it, also with text after the call."""
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
    text = {"type": "message", "role": "assistant", "content": " Done."}
    first = {**text, "content": "I run."}
    reader = read(thought, first, call("a"), thought, call("b"), text, output("a"), output("b"))
    turn, *results = reader.messages
    assert (turn.text, turn.reasoning) == ("I run. Done.", "Hm.\n\nHm.")
    assert [one.call_id for one in turn.calls] == ["a", "b"]
    assert [one.answers for one in results] == ["a", "b"]


def test_namespaced_and_custom_calls_have_the_names_that_the_model_knows() -> None:
    """A replayed call reads as the model wrote it."""
    custom = {"type": "custom_tool_call", "call_id": "b", "name": "apply_patch", "input": "***"}
    reader = read(
        call("a", "spawn", namespace="agents"),
        custom,
        output("a"),
        {"type": "custom_tool_call_output", "call_id": "b", "output": "ok"},
    )
    assert reader.messages[0].calls == [
        Call("a", "agents__spawn", {}),
        Call("b", "apply_patch", {"input": "***"}),
    ]


def test_tools_found_by_search_may_be_called_and_stand_in_the_result() -> None:
    """The prompt's beginning stays the same: found tools are part of the search's result."""
    toolbox_tools = [{"type": "tool_search", "execution": "client", "parameters": {}}]
    found = {"type": "namespace", "name": "mail", "tools": [{"type": "function", "name": "send"}]}
    reader = read(
        {"type": "tool_search_call", "call_id": "s", "arguments": {"query": "mail"}},
        {"type": "tool_search_output", "call_id": "s", "tools": [found]},
        tools=toolbox_tools,
    )
    assert reader.messages[0].calls == [Call("s", "tool_search", {"query": "mail"})]
    assert "mail__send" in reader.messages[1].text
    assert reader._toolbox.origin("mail__send").namespace == "mail"
    assert [tool.name for tool in reader._toolbox.tools] == ["tool_search"]


def test_unknown_items_and_parts_are_left_out_and_named() -> None:
    """An item of an unknown kind does not stop a session."""
    reader = read(
        {"type": "web_search_call", "id": "ws", "status": "completed"},
        {"role": "user", "content": [{"type": "mystery"}, {"type": "input_text", "text": "Hi"}]},
    )
    assert reader.messages == [ConversationMessage("user", "Hi")]
    assert list(reader.ignored) == ["input.web_search_call", "input.content.mystery"]


def test_thought_between_text_and_call_is_part_of_their_turn() -> None:
    """gpt-oss thinks again after it has said its plan; two texts in a row are two turns."""
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
    text = {"type": "message", "role": "assistant", "content": "I run."}
    last, turn = read(text, text, thought, call("a")).messages
    assert (last.text, last.calls) == ("I run.", [])
    assert (turn.text, turn.reasoning, len(turn.calls)) == ("I run.", "Hm.", 1)


@pytest.mark.parametrize("second", ["More.", "\n\nMore."])
def test_thoughts_of_one_turn_are_paragraphs_whoever_wrote_them(second: str) -> None:
    """Those of this server have line ends between them already, which stay as they were."""
    first, later = (
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}
        for text in ("Think.", second)
    )
    reader = read(first, call("a"), later, call("b"))
    [turn] = reader.messages
    assert turn.reasoning == "Think.\n\nMore."


def test_image_in_tool_result_becomes_a_note_for_the_model() -> None:
    """A session with a screenshot in its history goes on."""
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    reader = read(call("a"), output("a", [image]))
    assert reader.messages[1].text == "[input_image left out: this model reads only text]"


@pytest.mark.parametrize(
    ("items", "param"),
    [
        (["text"], "input[0]"),
        ([{"role": "robot", "content": ""}], "input[0].role"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], "input[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text"),
        ([{"role": "user", "content": ["x"]}], "input[0].content[0]"),
        ([output("missing")], "input[0].call_id"),
        ([{"type": "function_call", "name": "x"}], "input[0].call_id"),
        ([call("a", arguments='{"a":' * 100 + "1" + "}" * 100)], "input[0].arguments"),
    ],
)
def test_invalid_items_are_refused_by_their_path(items: list[Any], param: str) -> None:
    """An item that is not valid is a 400 that names its place."""
    with pytest.raises(ApiError) as refused:
        read(*items)
    assert refused.value.status == 400
    assert refused.value.param == param
