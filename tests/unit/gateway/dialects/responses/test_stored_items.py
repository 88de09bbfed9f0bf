"""Stored responses as documents, references to their items, and pages of them."""

from typing import Any

import orjson
import pytest

from services.gateway.dialects.responses import item_ids, stored_items
from services.gateway.http import request_body
from services.gateway.http.errors import ApiError

ITEMS: list[Any] = [
    {"role": "user", "content": "one"},
    {"type": "function_call", "call_id": "a", "name": "run", "arguments": "{}"},
    {"type": "function_call_output", "id": "own", "call_id": "a", "output": "x"},
]
RESPONSE = orjson.dumps({"id": "resp_77", "output": [{"id": "msg_77_0", "type": "message"}]})


def document() -> stored_items.Document:
    """Return a document of three input items and one output item."""
    items = stored_items.input_json(ITEMS, "resp_77")
    return stored_items.read_document(stored_items.document(items, RESPONSE))


def page(**query: str) -> Any:
    """Return a page of the document's items."""
    return orjson.loads(stored_items.page(document(), query))


def test_document_has_all_items_with_ids_and_the_response() -> None:
    """Items without an id get one, from which the response can be found."""
    read = document()
    assert orjson.loads(bytes(read.response))["id"] == "resp_77"
    ids = [item["id"] for item in read.items()]
    assert ids == ["msg_77_in0", "fc_77_in1", "own", "msg_77_0"]
    assert item_ids.response_of("msg_77_in0") == item_ids.response_of("msg_77_0")
    assert item_ids.response_of("msg_77_0") == "resp_77"
    assert item_ids.response_of("own") is None


def test_document_has_integers_of_any_size_and_deep_parts() -> None:
    """Items without effect are stored as they came; no check of other items has seen them."""
    deep: list[Any] = []
    for _ in range(300):
        deep = [deep]
    items = [{"type": "x", "number": 10**30, "deep": deep}]
    data = stored_items.document(stored_items.input_json(items, "resp_77"), RESPONSE)
    [item, _] = stored_items.read_document(data).items()
    assert (item["number"], item["deep"]) == (10**30, deep)


def test_references_are_replaced_by_the_items_that_they_name() -> None:
    """A reference may leave out its type; other items stay as they are."""
    known = stored_items.by_id(document().items())
    items: list[Any] = [{"type": "item_reference", "id": "own"}, {"id": "msg_77_in0"}, ITEMS[0]]
    assert list(stored_items.references(items)) == [(0, "own"), (1, "msg_77_in0")]
    resolved = stored_items.resolved(items, known)
    assert [item.get("content", item.get("output")) for item in resolved] == ["x", "one", "one"]


def test_second_reference_to_the_same_item_is_refused() -> None:
    """Thousands of references to one long item would become gigabytes of text."""
    items: list[Any] = [{"id": "own"}, ITEMS[0], {"type": "item_reference", "id": "own"}]
    with pytest.raises(ApiError) as caught:
        list(stored_items.references(items))
    assert (caught.value.status, caught.value.param) == (400, "input[2].id")


def test_stored_items_have_no_more_parts_than_a_body() -> None:
    """Each response of a chain could add as many, until decoding them stops every other request."""
    many: list[Any] = [{"type": "x", "id": "x", "parts": [{}] * (request_body.PARTS_MAX // 5)}]
    head = stored_items.input_json(many, "resp_1")
    with pytest.raises(ApiError) as refused:
        stored_items.input_json(many * 3, "resp_1")
    assert (refused.value.status, refused.value.param) == (400, "input")
    response = b'{"id":"resp_1","output":%b}' % head
    stored = stored_items.read_document(stored_items.document(b"[]", response))
    assert stored.items() == many
    twice = head[:-1] + b"," + head[1:]
    stored = stored_items.read_document(stored_items.document(twice, response))
    with pytest.raises(ApiError):
        stored.items()


def test_pages_go_through_all_items_in_both_orders() -> None:
    """The newest come first unless asked otherwise, and each page says whether more follow."""
    first = page(limit="2")
    assert [item["id"] for item in first["data"]] == ["own", "fc_77_in1"]
    assert first["has_more"]
    rest = page(limit="2", after=first["last_id"])
    assert [item["id"] for item in rest["data"]] == ["msg_77_in0"]
    assert not rest["has_more"]
    assert page(order="asc")["first_id"] == "msg_77_in0"


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "x"}, "limit"),
        ({"limit": "9" * 5_000}, "limit"),
        ({"order": "up"}, "order"),
        ({"after": "nothing"}, "after"),
    ],
)
def test_wrong_page_is_refused_by_its_parameter(query: dict[str, str], param: str) -> None:
    """A wrong value is a 400 that names it."""
    with pytest.raises(ApiError) as refused:
        page(**query)
    assert refused.value.param == param
