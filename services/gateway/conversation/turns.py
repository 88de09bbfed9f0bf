"""Turns of the model that a client sends in several parts. Owns joining them to one message."""

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


def joined_thoughts(thoughts: Iterable[str]) -> str | None:
    """Return the thoughts of one turn as one text with a paragraph for each; None without any.

    Args:
        thoughts: the thoughts in order. A later one that this server sent begins with line ends.
    """
    pieces: list[str] = []
    for thought in filter(None, thoughts):
        if pieces and not thought[0].isspace():
            pieces.append("\n\n")
        pieces.append(thought)
    return "".join(pieces) or None


def _joined(turn: list[ConversationMessage]) -> list[ConversationMessage]:
    if len(turn) < 2:
        return turn
    return [
        dataclasses.replace(
            turn[0],
            text="".join(message.text for message in turn),
            reasoning=joined_thoughts(message.reasoning or "" for message in turn),
            calls=[call for message in turn for call in message.calls],
        )
    ]
