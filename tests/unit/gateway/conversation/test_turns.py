"""Turns of the model that clients send in several messages."""

import json
from typing import Any

import msgspec

from services.gateway.conversation.conversation import Call, ConversationMessage
from services.gateway.conversation.turns import joined_turns
from services.gateway.dialects.openai.chat import read_messages
from services.gateway.dialects.openai.request_types import ChatCompletionRequest

_A, _B = Call("a", "look", {"x": 1}), Call("b", "look", {})


def _said(text: str = "", *calls: Call, reasoning: str | None = None) -> ConversationMessage:
    return ConversationMessage("assistant", text, reasoning=reasoning, calls=list(calls))


def _result(call_id: str) -> ConversationMessage:
    return ConversationMessage("tool", "done", answers=call_id)


def test_what_follows_a_call_is_part_of_its_turn() -> None:
    """Texts, thoughts and calls after a call stand in one message, before the results."""
    turn = [_said("One.", _A, reasoning="t"), _said(" Two."), _said("", _B, reasoning="u")]

    found = joined_turns([*turn, _result("a"), _result("b"), _said("Three.")])

    whole = _said("One. Two.", _A, _B, reasoning="t\n\nu")
    assert found == [whole, _result("a"), _result("b"), _said("Three.")]
    assert turn[0] == _said("One.", _A, reasoning="t")


def test_messages_before_a_call_and_of_others_stay_apart() -> None:
    """Two answers in a row, and a call after an answer, are what the client sent."""
    user = ConversationMessage("user", "go")
    messages = [_said("One."), _said("Two."), _said("", _A), user, _said("", _B)]

    assert joined_turns(messages) == messages


def test_text_between_call_and_result_joins_the_call_in_chat_requests() -> None:
    """gpt-oss's template refuses a result that does not follow its call."""
    function = {"name": "look", "arguments": json.dumps(_A.arguments)}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "a", "type": "function", "function": function}],
        },
        {"role": "assistant", "content": "Looking."},
        {"role": "tool", "tool_call_id": "a", "content": "done"},
    ]
    body = msgspec.convert({"model": "m", "messages": messages}, ChatCompletionRequest)

    found = read_messages(body.messages, [])

    assert found[1:] == [_said("Looking.", _A), _result("a")]
