"""Ids of responses and of their items. Owns their form.

A response `resp_X` has the output items `msg_X_0`, `fc_X_1` and so on. An input item that came
without an id is stored as `msg_X_in0`. So an item's id tells where the item is stored.
"""

RESPONSE_PREFIX = "resp_"
_PREFIXES = {
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "tool_search_call": "tsc",
}
"""First parts of ids by the type of the item; others have that of a message."""


def item_id(response_id: str, item_type: str, place: str) -> str:
    """Return the id of an item.

    Args:
        response_id: id of the response to which it belongs.
        item_type: the item's type.
        place: its number in the response, in a form that no other item has.
    """
    prefix = _PREFIXES.get(item_type, "msg")
    return f"{prefix}_{response_id.removeprefix(RESPONSE_PREFIX)}_{place}"


def response_of(item_id: str) -> str | None:
    """Return the id of the response in which an item was stored, None if its id names none."""
    parts = item_id.split("_")
    return f"{RESPONSE_PREFIX}{parts[1]}" if len(parts) == 3 else None
