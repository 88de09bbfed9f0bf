"""Turns with several calls as turns with one call each, for templates that take no more."""

from typing import Any

Messages = list[dict[str, Any]]


def with_single_calls(messages: Messages) -> Messages:
    """Return the messages with one call in each, which stands before the result of the call."""
    found: Messages = []
    waiting: dict[str, dict[str, Any]] = {}
    for index, message in enumerate(messages):
        calls = message.get("tool_calls") or []
        if len(calls) > 1:
            found.extend(waiting.values())
            answered = _answered(messages, index)
            turns = _split(message, sorted(calls, key=lambda call: answered.get(call["id"], -1)))
            # Calls without a result come first, and so does the text.
            count = sum(call["id"] not in answered for call in calls)
            found += turns[: count or 1]
            waiting = {turn["tool_calls"][0]["id"]: turn for turn in turns[count or 1 :]}
            continue
        if message.get("tool_call_id") in waiting:
            found.append(waiting.pop(message["tool_call_id"]))
        found.append(message)
    return [*found, *waiting.values()]


def _answered(messages: Messages, index: int) -> dict[str, int]:
    """Return where the results of a message's calls are, by the ids of the calls."""
    places: dict[str, int] = {}
    for place in range(index + 1, len(messages)):
        if messages[place].get("tool_calls"):
            break
        if messages[place]["role"] == "tool":
            places.setdefault(messages[place].get("tool_call_id", ""), place)
    return places


def _split(message: dict[str, Any], calls: list[dict[str, Any]]) -> Messages:
    """Return a message with several calls as one message for each; the first has the text."""
    bare = {"role": message["role"], "content": ""}
    heads = [message, *[bare] * (len(calls) - 1)]
    return [{**head, "tool_calls": [call]} for head, call in zip(heads, calls, strict=True)]
