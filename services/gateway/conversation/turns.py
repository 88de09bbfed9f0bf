"""Turns of the model that a client sends as several messages. Owns joining them to one."""

import dataclasses
from collections.abc import Iterable

from services.gateway.conversation.conversation import ConversationMessage


def joined_turns(messages: Iterable[ConversationMessage]) -> list[ConversationMessage]:
    """Return messages in which what the model said after a call is part of the call's turn.

    Results follow their calls then, as chat templates want it.

    Args:
        messages: the messages, which stay as they are.
    """
    found: list[ConversationMessage] = []
    turn: list[ConversationMessage] = []
    has_calls = False
    for message in messages:
        if message.role != "assistant" or not has_calls:
            found += _joined(turn)
            turn = []
        turn.append(message)
        has_calls = message.role == "assistant" and (has_calls or bool(message.calls))
    return found + _joined(turn)


def _joined(turn: list[ConversationMessage]) -> list[ConversationMessage]:
    if len(turn) < 2:
        return turn
    thoughts = [message.reasoning for message in turn if message.reasoning]
    return [
        dataclasses.replace(
            turn[0],
            text="".join(message.text for message in turn),
            reasoning="\n\n".join(thoughts) or None,
            calls=[call for message in turn for call in message.calls],
        )
    ]
