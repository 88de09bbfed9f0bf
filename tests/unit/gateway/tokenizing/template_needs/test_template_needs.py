"""Demands of chat templates: found by trying the template, and met without a change of meaning."""

import json
from typing import Any

import pytest

from services.gateway.conversation.conversation import INVALID_ARGUMENTS
from services.gateway.http.errors import ApiError
from services.gateway.tokenizing.template_needs.needs import TemplateNeeds
from services.gateway.tokenizing.tokenizer import Tokenizer
from tests.unit.gateway.tokenizing import chat_templates

_TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
_CALLS = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + ' ' }}"
    "{{- message.content or '' }}"
    "{%- for call in message.tool_calls or [] %}{{- '(' + call.id + ' ' + call.function.name }}"
    "ARGUMENTS{{- ')' }}{%- endfor %}"
    "{%- if message.role == 'tool' %}{{- '[' + message.tool_call_id + ' ' + message.name + ']' }}"
    "{%- endif %}{%- endfor %}"
)
_TEXT_ARGUMENTS = _CALLS.replace("ARGUMENTS", "{{- call.function.arguments + '' }}")
_OBJECT_ARGUMENTS = _CALLS.replace("ARGUMENTS", "{{- call.function.arguments | tojson }}")
_PRINTED_ARGUMENTS = _CALLS.replace("ARGUMENTS", "{{- call.function.arguments }}")
_SHORT_IDS = (
    "{%- for message in messages %}{%- for call in message.tool_calls or [] %}"
    "{%- if call.id | length != 9 %}{{- raise_exception('ids have 9 characters') }}{%- endif %}"
    "{%- endfor %}{%- endfor %}" + _OBJECT_ARGUMENTS
)
_FIRST_SYSTEM = (
    "{%- for message in messages %}{%- if message.role == 'system' and not loop.first %}"
    "{{- raise_exception('only the first message may be of the system') }}{%- endif %}"
    "{%- endfor %}" + chat_templates.PLAIN_TURNS
)
_THINKING = (
    "{%- for message in messages %}"
    "{%- if message.thinking and message.content and message.tool_calls %}"
    "{{- raise_exception('either thinking or content') }}{%- endif %}"
    "{{- '<|im_start|>' + message.role + ' ' + (message.thinking or '') + '|' }}"
    "{{- message.content or '' }}{%- endfor %}"
)
_WALKED_ARGUMENTS = _CALLS.replace(
    "ARGUMENTS",
    "{%- for key, value in call.function.arguments.items() %}{{- ' ' ~ key ~ '=' ~ value }}"
    "{%- endfor %}",
)
_ALTERNATING = (
    "{%- set ns = namespace(count=0) %}{%- for message in messages %}"
    "{%- if message.role == 'system' and not loop.first %}"
    "{{- raise_exception('a late system message') }}{%- endif %}"
    "{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}"
    "{%- if (message.role == 'user') != (ns.count % 2 == 0) %}"
    "{{- raise_exception('roles must alternate') }}{%- endif %}"
    "{%- set ns.count = ns.count + 1 %}{%- endif %}{%- endfor %}" + _SHORT_IDS
)
_REPLAYING = {
    "plain": _OBJECT_ARGUMENTS,
    "walks through arguments, as Qwen3-Coder and GLM": _WALKED_ARGUMENTS,
    "alternating without calls and results, as Mistral": _ALTERNATING,
    "alternating without empty turns, as Ministral": (
        "{%- for message in messages %}"
        "{%- if message.role == 'assistant' and not message.content and not message.tool_calls %}"
        "{{- raise_exception('an empty turn') }}{%- endif %}{%- endfor %}" + _ALTERNATING
    ),
    "refuses two calls, as Llama 3": (
        "{%- for message in messages %}{%- if (message.tool_calls or []) | length > 1 %}"
        "{{- raise_exception('one call at once') }}{%- endif %}{%- endfor %}" + _OBJECT_ARGUMENTS
    ),
    "writes the first call, as gpt-oss": (
        "{%- for message in messages %}{%- if message.role == 'tool' and not "
        "(loop.previtem.tool_calls or loop.previtem.role == 'tool') %}"
        "{{- raise_exception('a result without call') }}{%- endif %}{%- endfor %}"
        + _OBJECT_ARGUMENTS.replace("message.tool_calls or []", "(message.tool_calls or [])[:1]")
    ),
}
"""Templates with the rules of real families."""


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _called(call_id: str, content: str = "", **fields: Any) -> list[dict[str, Any]]:
    function = {"name": "look", "arguments": {"a": "ü", "n": 1}}
    call = {"id": call_id, "type": "function", "function": function}
    return [
        _user("go"),
        {"role": "assistant", "content": content, "tool_calls": [call], **fields},
        {"role": "tool", "tool_call_id": call_id, "content": "done"},
    ]


def _turn(*calls: tuple[str, Any], content: str = "") -> dict[str, Any]:
    """Return the assistant's turn with calls, each by its id and its arguments."""
    called = [
        {"id": call_id, "type": "function", "function": {"name": "look", "arguments": arguments}}
        for call_id, arguments in calls
    ]
    return {"role": "assistant", "content": content, "tool_calls": called}


def _result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


_ONE, _TWO = ("call_1", {"a": "one"}), ("call_2", {"a": "two"})
_REPLAYED = {
    "two calls": (
        [_user("go"), _turn(_ONE, _TWO), _result("call_1", "first"), _result("call_2", "second")],
        ["one", "first", "two", "second"],
    ),
    "user after a result": (
        [_user("go"), _turn(_ONE), _result("call_1", "first"), _user("stop"), _turn(_TWO)],
        ["go", "one", "first", "stop", "two"],
    ),
    "system after a result": (
        [
            *[{"role": "system", "content": "brief"}, _user("go"), _turn(_ONE)],
            *[_result("call_1", "first"), {"role": "system", "content": "hurry"}, _turn(_TWO)],
            *[_result("call_2", "second"), {"role": "assistant", "content": "done"}],
            *[_user("more"), {"role": "system", "content": "slowly"}],
        ],
        ["brief", "go", "one", "first", "hurry", "two", "second", "done", "more", "slowly"],
    ),
    "empty turn": (
        [_user("go"), {"role": "assistant", "content": ""}, _user("more")],
        ["go", "more"],
    ),
    "empty turn after a result": (
        [
            *[_user("go"), _turn(_ONE), _result("call_1", "first")],
            *[{"role": "assistant", "content": "", "reasoning_content": "x"}, _user("more")],
        ],
        ["go", "one", "first", "more"],
    ),
    "broken arguments": (
        [_user("go"), _turn(("call_1", '{"a": "o')), _result("call_1", "first"), _user("more")],
        ["go", "look", "invalid_arguments", "first", "more"],
    ),
}
"""Conversations that agents replay, and texts of them in order."""


def _rendered(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> str:
    prompt = tokenizer.encode_chat(messages, _TOOLS, {})
    return tokenizer.decode_whole(list(prompt.ids)).replace("<|im_start|>", "\n")


@pytest.mark.parametrize("template", [_TEXT_ARGUMENTS, _OBJECT_ARGUMENTS, _PRINTED_ARGUMENTS])
def test_arguments_are_rendered_as_json_for_each_way_a_template_writes_them(template: str) -> None:
    """Templates that add the arguments to a text, dump them or print them all write JSON."""
    text = _rendered(chat_templates.tokenizer(template), _called("call_1"))

    arguments = text.partition("(call_1 look")[2].partition(")")[0]
    assert json.loads(arguments) == {"a": "ü", "n": 1}


def test_tool_result_has_name_of_called_tool() -> None:
    """A template that asks for the name of the answered tool finds it."""
    text = _rendered(chat_templates.tokenizer(_OBJECT_ARGUMENTS), _called("call_1"))

    assert "tool done[call_1 look]" in text


def test_ids_become_short_and_stay_equal_if_template_refuses_long_ones() -> None:
    """Ids of another server fit Mistral's templates, and calls and results still match."""
    tokenizer = chat_templates.tokenizer(_SHORT_IDS)

    text = _rendered(tokenizer, _called("toolu_0123456789"))

    call_id = text.partition("(")[2].partition(" ")[0]
    assert len(call_id) == 9
    assert f"[{call_id} look]" in text
    assert "(abcDEF123 look" in _rendered(tokenizer, _called("abcDEF123"))


def test_neighbours_of_one_role_are_joined_if_template_demands_alternation() -> None:
    """Two user messages in a row become one; the system prompt becomes part of it."""
    tokenizer = chat_templates.tokenizer(chat_templates.TAKES_TURNS)
    messages = [{"role": "system", "content": "be brief"}, _user("one"), _user("two")]

    text = _rendered(tokenizer, messages)

    assert "\nuser\nbe brief\n\none\n\ntwo<|im_end|>" in text
    with pytest.raises(ApiError):
        tokenizer.encode_chat([{"role": "assistant", "content": "x"}], None, {})


def test_neighbours_stay_apart_if_template_accepts_them() -> None:
    """Messages of one role are not joined without need."""
    text = _rendered(chat_templates.tokenizer(chat_templates.PLAIN_TURNS), [_user("a"), _user("b")])

    assert "\nuser\na<|im_end|>\n\nuser\nb<|im_end|>" in text


def test_later_system_message_keeps_its_place_if_template_refuses_its_role() -> None:
    """A system message between others stays there as a message of the user."""
    late = [_user("a"), {"role": "assistant", "content": "b"}, {"role": "system", "content": "c"}]
    system = {"role": "system", "content": "s"}

    refusing = _rendered(chat_templates.tokenizer(_FIRST_SYSTEM), [system, *late])
    accepting = _rendered(chat_templates.tokenizer(chat_templates.PLAIN_TURNS), [system, *late])

    assert "\nsystem\ns<|im_end|>" in refusing
    assert refusing.index("\nassistant\nb") < refusing.index("\nuser\nc<|im_end|>")
    assert "\nsystem\nc<|im_end|>" in accepting


def test_several_system_messages_at_the_start_become_one_if_template_takes_one() -> None:
    """Instructions in two messages stay instructions."""
    messages = [{"role": "system", "content": text} for text in ("s", "t")]

    text = _rendered(chat_templates.tokenizer(_FIRST_SYSTEM), [*messages, _user("a")])

    assert "\nsystem\ns\n\nt<|im_end|>" in text


def test_reasoning_reaches_template_in_the_field_that_it_reads() -> None:
    """Reasoning of earlier turns is in the field of the template, with text if it must be."""
    tokenizer = chat_templates.tokenizer(_THINKING)

    both = _rendered(tokenizer, _called("1", content="said", reasoning_content="thought"))
    only = _rendered(tokenizer, [_user("a"), {"role": "assistant", "content": "b"}])

    assert "\nassistant thought\n\nsaid|" in both
    assert "\nassistant |b" in only


def test_reasoning_of_earlier_turns_is_kept_for_agents_if_template_can() -> None:
    """With tools, the argument that keeps earlier reasoning is set, unless a client sets it."""
    shown = "loop.index0 > ns.last"
    template = chat_templates.STRIPS_THINKING
    assert shown in template
    kept = f"({shown} or not clear_thinking | default(true))"
    tokenizer = chat_templates.tokenizer(template.replace(shown, kept))
    messages = [
        _user("a"),
        {"role": "assistant", "content": "b", "reasoning_content": "thought"},
        _user("c"),
    ]

    def rendered(tools: Any, **arguments: Any) -> str:
        return tokenizer.decode_whole(list(tokenizer.encode_chat(messages, tools, arguments).ids))

    assert "thought" in rendered(_TOOLS)
    assert "thought" not in rendered(_TOOLS, clear_thinking=True)
    assert "thought" not in rendered(None)


@pytest.mark.parametrize("conversation", _REPLAYED)
@pytest.mark.parametrize("template", _REPLAYING)
def test_conversation_of_an_agent_is_rendered_by_templates_of_all_families(
    template: str, conversation: str
) -> None:
    """No replayed turn is refused, and none of its texts is lost or at another place."""
    messages, texts = _REPLAYED[conversation]

    text = _rendered(chat_templates.tokenizer(_REPLAYING[template]), messages)

    if conversation == "two calls":
        for call, result in zip(texts[::2], texts[1::2], strict=True):
            assert -1 < text.find(call) < text.find(result)
    else:
        places = [text.find(one) for one in texts]
        assert -1 not in places
        assert places == sorted(places)


def test_calls_of_one_turn_stand_before_their_results_if_template_takes_one_each() -> None:
    """Each call comes right before its result, also if another message is between; text is kept."""
    turn = _turn(_ONE, _TWO, ("call_3", {}), content="Both.")
    again = _turn(_ONE, _TWO)
    messages = [
        *[turn, _result("call_2", "second"), _user("stop"), _result("call_1", "first"), again],
        *[_result("call_1", "third"), _result("call_2", "fourth")],
    ]

    found = TemplateNeeds(has_one_call=True).adapt(messages)

    assert [
        message["tool_calls"][0]["id"] if "tool_calls" in message else message["content"]
        for message in found
    ] == [
        *["call_3", "call_2", "second", "stop", "call_1", "first"],
        *["call_1", "third", "call_2", "fourth"],
    ]
    assert [message["content"] for message in found if "tool_calls" in message] == [
        *["Both.", "", "", "", ""]
    ]


def test_arguments_that_are_no_object_stay_visible_in_one() -> None:
    """Also a template that wants text gets the JSON of an object."""
    message = _turn(("call_1", '{"a": "o'))

    [kept] = TemplateNeeds().adapt([message])
    [as_text] = TemplateNeeds(has_text_arguments=True).adapt([message])

    expected = {INVALID_ARGUMENTS: '{"a": "o'}
    assert kept["tool_calls"][0]["function"]["arguments"] == expected
    assert json.loads(as_text["tool_calls"][0]["function"]["arguments"]) == expected


def test_messages_are_not_changed_in_place() -> None:
    """Adapting leaves the caller's messages as they are."""
    messages = [*_called("call_1", reasoning_content="thought"), _turn(_ONE, ("call_2", "{"))]
    messages += [_result("call_2", "x"), _user("y"), {"role": "assistant", "content": ""}]
    before = json.dumps(messages)

    TemplateNeeds(
        has_text_arguments=True,
        has_short_ids=True,
        joins_neighbours=True,
        has_one_call=True,
        has_empty_turns=False,
        joined_to_results=frozenset({"user"}),
    ).adapt(messages)

    assert json.dumps(messages) == before
