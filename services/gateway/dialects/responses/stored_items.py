"""Stored responses as JSON documents: their items, references to them, and pages. Pure.

A document has the response and all input items before it, so it needs no other document.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from services.gateway.dialects.responses.item_ids import item_id
from services.gateway.http import request_body
from services.gateway.http.errors import ApiError, invalid_field

REFERENCED_MAX = 64
"""Most stored responses whose items one request may reference."""
PAGE_ITEMS = 20
"""Items of a page unless `limit` says otherwise."""
PAGE_ITEMS_MAX = 100


class _Output(msgspec.Struct):
    output: msgspec.Raw


class Document(msgspec.Struct):
    """A stored response, whose parts are parsed only when they are needed."""

    input: msgspec.Raw
    """The input items as JSON."""
    response: msgspec.Raw
    """The response as JSON."""

    def items(self) -> list[Any]:
        """Return the input items and after them those of the response.

        Raises:
            ApiError: 400 when they have too many parts to be decoded without a delay.
        """
        output = msgspec.json.decode(self.response, type=_Output).output
        texts = [bytes(self.input), bytes(output)]
        _check_parts(texts)
        return [item for text in texts for item in msgspec.json.decode(text, type=list[Any])]


def input_json(items: list[Any], response_id: str) -> bytes:
    """Return input items as JSON, each with an id.

    Args:
        items: all input items of a response.
        response_id: its id, from which items without an id get theirs.

    Raises:
        ApiError: 400 when no later request could name them, because they have too many parts.
    """
    text = request_body.to_json(
        [
            item
            if item.get("id")
            else {"id": item_id(response_id, str(item.get("type")), f"in{number}"), **item}
            for number, item in enumerate(items)
            if isinstance(item, dict)
        ]
    )
    _check_parts([text])
    return text


def document(items: bytes, response: bytes) -> bytes:
    """Return a document to store.

    Args:
        items: the input items (`input_json`).
        response: the response as JSON.
    """
    return b'{"input":%b,"response":%b}' % (items, response)


def read_document(data: bytes) -> Document:
    """Return the document in stored bytes, which this server wrote."""
    return msgspec.json.decode(data, type=Document)


def references(items: list[Any]) -> Iterator[tuple[int, str]]:
    """Yield index and id of each item that only names a stored item.

    Raises:
        ApiError: 400 when several name the same one. Each would become its whole text, so that a
            small request would become gigabytes.
    """
    named: set[str] = set()
    for index, item in enumerate(items):
        if not _is_reference(item):
            continue
        if item["id"] in named:
            raise invalid_field(f"input[{index}].id", "an earlier item refers to it already.")
        named.add(item["id"])
        yield index, item["id"]


def resolved(items: list[Any], known: dict[str, Any]) -> list[Any]:
    """Return the items with the stored item in place of each reference.

    Args:
        items: the request's items.
        known: every stored item that they name, by id.
    """
    return [known[item["id"]] if _is_reference(item) else item for item in items]


def by_id(items: list[Any]) -> dict[str, Any]:
    """Return items by their ids."""
    return {item["id"]: item for item in items if isinstance(item.get("id"), str)}


def page(document: Document, query: dict[str, str]) -> bytes:
    """Return one page of a document's input items as JSON.

    Args:
        document: the stored response.
        query: `limit` (1 to 100), `order` (`asc` or `desc`) and `after`, an item's id.

    Raises:
        ApiError: 400 for a wrong value.
    """
    limit = query.get("limit", str(PAGE_ITEMS))
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= PAGE_ITEMS_MAX:
        raise invalid_field("limit", f"it must be 1 to {PAGE_ITEMS_MAX}.")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid_field("order", "it must be asc or desc.")
    items = msgspec.json.decode(document.input, type=list[Any])
    if order == "desc":
        items.reverse()
    if (after := query.get("after")) is not None:
        places = [number for number, item in enumerate(items) if item["id"] == after]
        if not places:
            raise invalid_field("after", "no item has this id.")
        items = items[places[0] + 1 :]
    shown = items[: int(limit)]
    content = {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(items) > len(shown),
    }
    return request_body.to_json(content)


def _check_parts(texts: list[bytes]) -> None:
    """Refuse stored items as a body of as many parts is refused: each response adds to them."""
    try:
        request_body.check_parts(texts)
    except ApiError:
        problem = (
            f"with the items of earlier responses it has more than {request_body.PARTS_MAX} "
            "objects, arrays, fields and list elements: send fewer items, or store false."
        )
        raise invalid_field("input", problem) from None


def _is_reference(item: Any) -> bool:
    if not isinstance(item, dict) or not isinstance(item.get("id"), str):
        return False
    kind = item.get("type")
    # OpenAI's client may leave the type out; then nothing but the id is there.
    return kind == "item_reference" or (kind is None and item.keys() <= {"id", "type"})
