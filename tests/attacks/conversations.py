"""Attacks with conversations: many items, blocks and tools, and values of unusual form."""

import json
from typing import Any

from tests.attacks.attack import BODY_BYTES_MAX, Attack, ask, filled, repeat
from tests.attacks.attacker import MODEL, QUESTION, Attacker, post

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
_ITEMS_MAX = 16_384
_HUGE = 10**30
"""An integer of more than 64 bits."""


def tool_references(attacker: Attacker) -> None:
    """Refer to a tool of a megabyte in 24,000 places, each of which could write it out."""
    tool = {
        "name": "long",
        "description": "word " * 200_000,
        "input_schema": {"type": "object"},
        "defer_loading": True,
    }
    reference = {"type": "tool_reference", "tool_name": "long"}
    message = {"role": "user", "content": [reference] * 1_000}
    body = {"model": MODEL, "max_tokens": 1, "tools": [tool], "messages": [message] * 24}
    repeat(attacker, post(body, MESSAGES))


def item_references(attacker: Attacker) -> None:
    """Refer 16,000 times to one stored item of 8 KB."""
    part = {"type": "input_text", "text": "word " * 200}
    item = {"id": "msg_long", "type": "message", "role": "user", "content": [part] * 8}
    stored = ask(attacker, _response([item], store=True), RESPONSES).get("id")
    references = [{"type": "item_reference", "id": "msg_long"}] * 16_000
    body = _response(references, store=False, previous_response_id=stored)
    repeat(attacker, post(body, RESPONSES))


def billing_lines(attacker: Attacker) -> None:
    """Send 16 MB of the lines that are cut off before instructions."""
    start = b'{"model":"lockstep-demo","max_tokens":1,"messages":[{"role":"user","content":"x"}],'
    body = filled(start + b'"system":"', b"x-anthropic-billing-header:\\n", b'"}')
    repeat(attacker, post(body, MESSAGES))


def unknown_kinds(attacker: Attacker) -> None:
    """Send thousands of items, each of another unknown kind, in small and in large bodies."""
    requests = [
        post(_response([QUESTION, *({"type": f"a{n}"} for n in range(count))]), RESPONSES)
        for count in (3_000, _ITEMS_MAX - 1)
    ]
    repeat(attacker, *requests)


def many_tools(attacker: Attacker) -> None:
    """Offer as many tools as are allowed, and name each of them again; or far too many."""
    requests = []
    for count in (600, 1_024, 9_000):
        tools = [{"type": "custom", "name": f"t{n}", "defer_loading": True} for n in range(count)]
        names = [{"type": "custom", "name": tool["name"]} for tool in tools]
        choice = {"type": "allowed_tools", "mode": "auto", "tools": names}
        body = _response([QUESTION], tools=tools, tool_choice=choice)
        requests.append(post(body, RESPONSES))
    repeat(attacker, *requests)


def joined_items(attacker: Attacker) -> None:
    """Send 16,382 messages of the assistant after a call, which all belong to its turn."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    count = _ITEMS_MAX - 2
    text = "x" * (BODY_BYTES_MAX // count - 64)
    body = _response([QUESTION, call, *[{"role": "assistant", "content": text}] * count])
    repeat(attacker, post(body, RESPONSES))


def big_integers(attacker: Attacker) -> None:
    """Send integers of more than 64 bits wherever a part of the body becomes JSON again."""
    schema = {"type": "object", "properties": {"x": {"type": "integer", "maximum": _HUGE}}}
    function = {"name": "f", "parameters": schema, "strict": True}
    format_ = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    chat = {"model": MODEL, "messages": [QUESTION], "max_tokens": 1}
    tool = {"name": "f", "input_schema": schema}
    requests = [
        post({**chat, "response_format": format_}, CHAT),
        post({**chat, "tools": [{"type": "function", "function": function}]}, CHAT),
        post({**chat, "tools": [tool]}, MESSAGES),
        post(_response([QUESTION, {"type": "x", "a": _HUGE}], store=True), RESPONSES),
        post(_response([QUESTION], tools=[{"type": "function", **function}]), RESPONSES),
        post(_response([QUESTION], metadata={"a": _HUGE}), RESPONSES),
    ]
    repeat(attacker, *requests)


def deep_ignored(attacker: Attacker) -> None:
    """Nest parts that are ignored 300 to 5,000 levels deep."""
    unknown = {"type": "x", "a": "deep"}
    bodies = [
        (RESPONSES, _response([QUESTION, unknown], store=True)),
        (RESPONSES, _response([QUESTION], tools=[unknown])),
        (MESSAGES, {"model": MODEL, "max_tokens": 1, "messages": [_message([unknown])]}),
        (CHAT, {"model": MODEL, "max_tokens": 1, "messages": [QUESTION], "unknown": "deep"}),
    ]
    requests = [
        post(json.dumps(body).replace('"deep"', "[" * levels + "]" * levels).encode(), path)
        for levels in (300, 900, 5_000)
        for path, body in bodies
    ]
    repeat(attacker, *requests)


def branching_refs(attacker: Attacker) -> None:
    """Offer a tool whose argument refers to itself in twenty ways, and demand a call."""
    schema = {
        "type": "object",
        "properties": {"x": {"$ref": "#/d"}},
        "required": ["x"],
        "d": {"anyOf": [{"$ref": "#/d"}] * 20 + [{"type": "integer"}]},
    }
    function = {"type": "function", "function": {"name": "f", "parameters": schema}}
    body = {"model": MODEL, "messages": [QUESTION], "max_tokens": 64, "tools": [function]}
    repeat(attacker, *(post({**body, "tool_choice": mode}, CHAT) for mode in ("auto", "required")))


def _response(items: list[Any], **fields: Any) -> dict[str, Any]:
    """Return the body of a request for a response of one token."""
    return {"model": MODEL, "input": items, "max_output_tokens": 1, "store": False, **fields}


def _message(content: list[Any]) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": "Hello."}, *content]}


ATTACKS = [
    Attack("tool-references", tool_references, status=400),
    Attack("item-references", item_references, status=400),
    Attack("billing-lines", billing_lines, status=200),
    Attack("unknown-kinds", unknown_kinds, status=200),
    Attack("many-tools", many_tools, status=200),
    Attack("joined-items", joined_items, status=400),
    Attack("big-integers", big_integers, status=200),
    Attack("deep-ignored", deep_ignored, status=200),
    Attack("branching-refs", branching_refs, status=200),
]
