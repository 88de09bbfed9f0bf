"""What requests of the Messages API say to the model, in the shapes that Claude Code sends."""

import json
import time
from typing import Any

import msgspec
import pytest

from services.gateway.conversation.conversation import Call, ConversationMessage, ToolChoice
from services.gateway.dialects.messages import reading
from services.gateway.dialects.messages.reading import ReadMessagesRequest
from services.gateway.dialects.messages.request_types import CountTokensRequest
from services.gateway.http.errors import ApiError

_BILLING = "x-anthropic-billing-header: cc_version=2.1.330.{}; cc_entrypoint=cli;"
_CACHE = {"cache_control": {"type": "ephemeral"}}
_READ_TOOL: dict[str, Any] = {
    "name": "Read",
    "description": "Reads a file.",
    "input_schema": {"type": "object", "properties": {"file_path": {"type": "string"}}},
}


def _read(**fields: Any) -> ReadMessagesRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    return reading.read(msgspec.convert(body, CountTokensRequest), [])


def _messages(*messages: dict[str, Any], **fields: Any) -> list[ConversationMessage]:
    return _read(messages=list(messages), **fields).conversation.messages


def _text(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **fields}


def _refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        _read(**fields)
    assert caught.value.status == 400
    return caught.value


def test_system_blocks_become_one_message_without_billing_line() -> None:
    """The billing line differs from session to session, so it is dropped wherever it leads."""
    blocks = [
        _text(_BILLING.format("abc")),
        _text("You code.", **_CACHE),
        _text("Rules.", **_CACHE),
    ]
    system = ConversationMessage("system", "You code.\n\nRules.")
    user = ConversationMessage("user", "x")
    assert _read(system=blocks).conversation.messages == [system, user]
    text = _BILLING.format("def") + "\nYou code.\n\nRules."
    assert _read(system=text).conversation.messages == [system, user]
    assert _read(system=[_text(_BILLING.format("x"))]).conversation.messages == [user]
    late = [_text("You code."), _text(_BILLING.format("abc"))]
    assert "billing" in _read(system=late).conversation.messages[0].text


def test_many_billing_lines_are_dropped_in_one_pass() -> None:
    """Cutting them off one by one would copy the text each time, and hold up all other bodies."""
    started_s = time.process_time()
    text = (_BILLING.format("a") + "\n\n") * 100_000 + "You code."
    assert _read(system=text).conversation.messages[0].text == "You code."
    assert time.process_time() - started_s < 2.0


def test_same_message_reads_the_same_as_list_with_cache_control_and_as_text() -> None:
    """Claude Code marks only the last message, so each message changes its form once."""
    marked = {"role": "system", "content": [_text("Date: today.", **_CACHE)]}
    plain = {"role": "system", "content": "Date: today."}
    user = {"role": "user", "content": "x"}
    assert _messages(user, marked) == _messages(user, plain)
    assert _read(messages=[user, marked]).has_cache_control
    assert not _read(messages=[user, plain]).has_cache_control


def test_system_messages_stay_at_their_place() -> None:
    """A system message that moved to the front would change the prefix in every turn."""
    found = _messages(
        {"role": "user", "content": "a"},
        {"role": "system", "content": "b"},
        {"role": "user", "content": "c"},
        system="first",
    )
    assert [(message.role, message.text) for message in found] == [
        ("system", "first"), ("user", "a"), ("system", "b"), ("user", "c"),
    ]  # fmt: skip


def test_assistant_blocks_become_reasoning_text_and_calls() -> None:
    """Thinking blocks come back as reasoning, and calls keep their ids and arguments."""
    content = [
        {"type": "thinking", "thinking": "I must look.", "signature": ""},
        _text("I look."),
        {"type": "tool_use", "id": "functions.Read:0", "name": "Read", "input": {"a": [1]}},
    ]
    result = {"type": "tool_result", "tool_use_id": "functions.Read:0", "content": "text"}
    found = _messages(
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": content},
        {"role": "user", "content": [result]},
    )
    calls = [Call("functions.Read:0", "Read", {"a": [1]})]
    assert found[1] == ConversationMessage(
        "assistant", "I look.", reasoning="I must look.", calls=calls
    )
    assert found[2] == ConversationMessage("tool", "text", answers="functions.Read:0")


def _after_call(*content: dict[str, Any]) -> list[dict[str, Any]]:
    call = {"type": "tool_use", "id": "c", "name": "Read", "input": {}}
    return [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": list(content)},
    ]


def test_tool_results_stand_before_the_text_of_the_same_message() -> None:
    """Templates want results right behind the calls."""
    result = {"type": "tool_result", "tool_use_id": "c", "content": [_text("a"), _text("b")]}
    found = _messages(*_after_call(_text("reminder"), result, _text("go on", **_CACHE)))
    assert found[2:] == [
        ConversationMessage("tool", "a\n\nb", answers="c"),
        ConversationMessage("user", "reminder\n\ngo on"),
    ]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"content": "no such file", "is_error": True}, "Error: no such file"),
        ({"content": "Error: none", "is_error": True}, "Error: none"),
        ({"content": "ok", "is_error": False}, "ok"),
        ({}, ""),
        ({"content": None}, ""),
    ],
)
def test_failed_tool_result_says_so(fields: dict[str, Any], text: str) -> None:
    """Chat templates have no field for failures."""
    result = {"type": "tool_result", "tool_use_id": "c", **fields}
    assert _messages(*_after_call(result))[2].text == text


def test_deferred_tool_is_shown_where_its_reference_stands() -> None:
    """Found tools must not change the beginning of the prompt, or the whole cache is lost."""
    deferred = {**_READ_TOOL, "name": "Grep", "defer_loading": True}
    reference = {"type": "tool_reference", "tool_name": "Grep"}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [reference]}
    read = _read(messages=_after_call(result), tools=[deferred, _READ_TOOL])
    conversation = read.conversation
    assert [tool.name for tool in conversation.tools] == ["Read"]
    assert [tool.name for tool in conversation.callable_tools] == ["Read", "Grep"]
    shown = conversation.messages[2].text
    function = json.loads(shown[shown.index("{") :])["function"]
    assert function["name"] == "Grep"
    assert function["parameters"] == _READ_TOOL["input_schema"]
    assert read.ignored == []


def test_deferred_tool_with_an_integer_of_any_size_is_shown() -> None:
    """The writer of JSON that knows 64 bits must not make an internal error of it."""
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 10**30}}}
    deferred = {**_READ_TOOL, "name": "Grep", "defer_loading": True, "input_schema": schema}
    reference = {"type": "tool_reference", "tool_name": "Grep"}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [reference]}
    shown = _messages(*_after_call(result), tools=[deferred])[2].text
    assert json.loads(shown[shown.index("{") :])["function"]["parameters"] == schema


def test_tool_is_written_out_only_at_the_first_of_its_references() -> None:
    """A small request with many references to a long tool must not become gigabytes of text."""
    long = {**_READ_TOOL, "name": "Grep", "defer_loading": True, "description": "d" * 10_000}
    reference = {"type": "tool_reference", "tool_name": "Grep"}
    content = {"type": "tool_result", "tool_use_id": "c", "content": [reference] * 500}
    found = _messages(*_after_call(content), tools=[long])[-1].text
    assert found.count(long["description"]) == 1
    assert found.count("The tool Grep can be called") == 500
    assert len(found) < 50_000


def test_unknown_blocks_are_left_out_and_reported() -> None:
    """History is replayed, so one refused block would end the session."""
    unknown = {"type": "tool_addition", "tool": {"name": "New"}}
    search = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}
    read = _read(
        messages=[
            {"role": "user", "content": [_text("a", later=1), unknown]},
            {"role": "assistant", "content": [search]},
            {"role": "user", "content": [unknown]},
            {"role": "user", "content": "b"},
        ]
    )
    assert read.conversation.messages == [
        ConversationMessage("user", "a"),
        ConversationMessage("user", "b"),
    ]
    assert read.ignored == [
        "messages.content.later",
        "messages.content.tool_addition",
        "messages.content.server_tool_use",
    ]


def test_images_become_a_note_and_text_documents_their_text() -> None:
    """The model can say that it does not see the image, and the header names it too."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A"}}
    source = {"type": "text", "media_type": "text/plain", "data": "content"}
    document = {"type": "document", "source": source, "title": "Title"}
    pdf = {"type": "document", "source": {"type": "base64", "data": "A"}}
    found = {"type": "search_result", "source": "s", "title": "t", "content": [_text("c")]}
    read = _read(messages=[{"role": "user", "content": [image, document, pdf, found]}])
    text = read.conversation.messages[0].text
    assert "reads only text" in text
    assert "Title\ncontent" in text
    assert "t\ns\nc" in text
    assert read.ignored == ["messages.content.image", "messages.content.document.base64"]


def test_tools_that_run_at_anthropic_are_left_out_and_reported() -> None:
    """The model cannot call them, and clients send them unasked."""
    read = _read(tools=[{"type": "web_search_20250305", "name": "web_search"}, _READ_TOOL])
    assert [tool.name for tool in read.conversation.tools] == ["Read"]
    assert read.ignored == ["tools.web_search_20250305"]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, ToolChoice()),
        ({"type": "none"}, ToolChoice("none")),
        ({"type": "any"}, ToolChoice("required")),
        ({"type": "tool", "name": "Read"}, ToolChoice("named", "Read", param="tool_choice.name")),
        (
            {"type": "any", "disable_parallel_tool_use": True},
            ToolChoice("required", "", may_call_several=False),
        ),
    ],
)
def test_tool_choice_keeps_its_meaning(choice: dict[str, Any], expected: ToolChoice) -> None:
    """Every kind of choice is handed on."""
    assert _read(tools=[_READ_TOOL], tool_choice=choice).conversation.tool_choice == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"thinking": {"type": "adaptive", "display": "summarized"}}, {}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            {"enable_thinking": True, "thinking": True},
        ),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        ({"output_config": {"effort": "max"}}, {"reasoning_effort": "high"}),
        ({"output_config": {"effort": "ultra"}, "thinking": {"type": "auto"}}, {}),
    ],
)
def test_thinking_and_effort_reach_the_chat_template(
    fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    """Templates get the names that they know."""
    assert _read(**fields).conversation.template_arguments == expected


def test_fields_without_effect_are_reported() -> None:
    """What Claude Code sends beside the conversation changes nothing, and the report says so."""
    read = _read(
        metadata={"user_id": '{"session_id":"s"}'},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        thinking={"type": "enabled", "budget_tokens": 9},
    )
    assert read.ignored == ["thinking.budget_tokens", "metadata", "context_management"]


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"user_id": '{"device_id":"d","session_id":"s"}'}, "s"),
        ({"user_id": '{"device_id":"d"}'}, '{"device_id":"d"}'),
        ({"user_id": "alice"}, "alice"),
        ({"user_id": '{"session_id":3}'}, '{"session_id":3}'),
        ({"user_id": None}, None),
        ({}, None),
        ("x", None),
        (None, None),
    ],
)
def test_session_is_named_by_the_user_id(metadata: object, expected: str | None) -> None:
    """Claude Code puts the id of its session into it; other clients a text of their own."""
    assert reading.session_name(metadata) == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "assistant", "content": []}]}, "messages"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]},
         "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]},
         "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "no"}]}]},
         "messages[0].content[0].tool_use_id"),
        ({"messages": _after_call({"type": "tool_result", "tool_use_id": "c", "content": [
            {"type": "text", "text": 3}]})},
         "messages[2].content[0].content[0].text"),
        ({"system": [{"type": "text"}]}, "system[0].text"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ],
)  # fmt: skip
def test_invalid_request_is_refused_with_the_name_of_its_field(
    fields: dict[str, Any], param: str
) -> None:
    """A field that is wrong or would be answered wrongly is a 400 that names it."""
    assert _refused(**fields).param == param


def test_text_in_a_message_of_its_own_between_call_and_result_joins_the_call() -> None:
    """Some templates refuse a result that does not follow its call."""
    found = _messages(
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "a", "name": "Read", "input": {}}],
        },
        {"role": "assistant", "content": "Reading."},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "a", "content": "done"}],
        },
    )

    assert found[1:] == [
        ConversationMessage("assistant", "Reading.", calls=[Call("a", "Read", {})]),
        ConversationMessage("tool", "done", answers="a"),
    ]
