"""Meaning of a conversation as digests. Owns what two spellings of one turn have in common.

Clients send back what the model wrote in their own spelling: calls with other white space and
another order of keys, with the defaults of their tools added, new ids, no reasoning, null or "" for
no text. None of this counts.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from services.gateway.conversation.conversation import Call, ConversationMessage, Tool
from services.gateway.http.request_body import decode_arguments

EXACT_INTEGER_MAX = 2**53
"""Above it, clients in JavaScript change integers."""

Defaults = Mapping[str, Mapping[str, Any]]
"""Name of a tool -> its arguments with a default -> the default."""


def argument_defaults(tools: Sequence[Tool]) -> Defaults:
    """Return the defaults that the tools' schemas give to arguments."""
    found: dict[str, dict[str, Any]] = {}
    for tool in tools:
        properties = (tool.parameters or {}).get("properties")
        if isinstance(properties, dict):
            found[tool.name] = {
                name: _plain(schema["default"])
                for name, schema in properties.items()
                if isinstance(schema, dict) and "default" in schema
            }
    return found


def digest_messages(messages: list[ConversationMessage], tools: Sequence[Tool]) -> list[bytes]:
    """Return one digest per message, of the meaning of all messages up to it.

    Two conversations with equal digests say the same, call the same tools with equal arguments, and
    got the same results.

    Args:
        messages: the conversation.
        tools: its tools; clients add their defaults to calls.
    """
    defaults = argument_defaults(tools)
    digests: list[bytes] = []
    last = b""
    calls: dict[str, int] = {}
    for message in messages:
        if message.calls:
            calls = {call.call_id: number for number, call in enumerate(message.calls)}
        last = digest_message(last, message, calls, defaults)
        digests.append(last)
    return digests


def digest_message(
    before: bytes, message: ConversationMessage, calls: dict[str, int], defaults: Defaults
) -> bytes:
    """Return the digest of a conversation whose last message is this one.

    Args:
        before: digest of the messages before it; b"" without any.
        message: the message.
        calls: positions of the latest calls by their ids, for a message with a result.
        defaults: arguments that mean the same as no argument.
    """
    is_answer = message.role == "assistant"
    fields = [
        message.role,
        message.text.strip() if is_answer else message.text,
        message.author,
        [[call.name, _given(call, defaults)] for call in message.calls],
        None if message.answers is None else calls.get(message.answers, message.answers),
    ]
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(before + text.encode(), digest_size=24).digest()


def written_calls(calls: list[tuple[str, str, str]]) -> list[Call]:
    """Return calls of which only the text of the arguments is known.

    Args:
        calls: id, name and arguments of each.

    Raises:
        ApiError: as for a client that sends such arguments.
    """
    return [
        Call(call_id, name, decode_arguments(text, "arguments")) for call_id, name, text in calls
    ]


def _given(call: Call, defaults: Defaults) -> Any:
    """Return the arguments of a call without those that have their default."""
    arguments, own = _plain(call.arguments), defaults.get(call.name)
    if not own or not isinstance(arguments, dict):
        return arguments
    # In Python, but not in JSON, false equals 0.
    return {
        name: value
        for name, value in arguments.items()
        if name not in own or (type(value), value) != (type(own[name]), own[name])
    }


def _plain(value: Any) -> Any:
    """Return a JSON value in which 1.0 is 1, as clients in JavaScript write it."""
    if isinstance(value, float) and value.is_integer() and abs(value) < EXACT_INTEGER_MAX:
        return int(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value
