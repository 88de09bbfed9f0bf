"""Unknown fields of requests: left out and named, or refused."""

import json
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.http import ignored_fields
from services.gateway.http.errors import ApiError
from services.gateway.http.ignored_fields import LenientDecoder, LoggedFields, RefusedField, shown


class _Part(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class _User(msgspec.Struct, tag_field="role", tag="user", forbid_unknown_fields=True):
    content: str | list[_Part]


class _Tool(msgspec.Struct, tag_field="role", tag="tool", forbid_unknown_fields=True):
    content: str
    call: str | None = None


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    messages: list[_User | _Tool]
    bias: dict[int, float] | None = None
    free: dict[str, Any] | None = None


_decoder = LenientDecoder(
    _Body,
    {
        "guided": RefusedField("it is not supported.", (0, "off")),
        "messages.prefix": RefusedField("no.", (False,)),
    },
)


def test_body_with_known_fields_only_is_decoded_without_report() -> None:
    """A body with known fields only has nothing to report, and free objects keep all fields."""
    body = {"messages": [{"role": "user", "content": "x"}], "bias": {"3": 1}, "free": {"a": {}}}
    decoded, ignored = _decoder.decode(json.dumps(body).encode())
    assert ignored == []
    assert decoded.bias == {3: 1.0}
    assert decoded.free == {"a": {}}


def test_unknown_fields_are_left_out_at_every_depth_and_named_without_indexes() -> None:
    """Fields of the body, of messages and of their parts are named once each, in order."""
    part = {"type": "text", "text": "a", "cache": 1}
    body = {
        "new": [1],
        "messages": [
            {"role": "user", "content": [part, part], "author": {}},
            {"role": "tool", "content": "b", "name": "c"},
        ],
        "bias": {"3": 1},
        "free": {"anything": 1},
    }
    decoded, ignored = _decoder.decode(json.dumps(body).encode())
    assert ignored == ["new", "messages.author", "messages.content.cache", "messages.name"]
    assert decoded.messages == [_User([_Part("text", "a")] * 2), _Tool("b")]
    assert decoded.free == {"anything": 1}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided": 1}, "guided"),
        ({"messages": [{"role": "user", "content": "x", "prefix": True}]}, "messages.prefix"),
        ({"new": 1, "messages": [{"role": "user"}]}, "messages[0].content"),
        ({"new": 1, "messages": [{"role": "bob"}]}, "messages[0].role"),
        ({"new": 1, "bias": {"x": 1}}, "bias"),
        ({"new": 1, "free": 3}, "free"),
    ],
)
def test_body_is_refused_for_field_that_must_not_be_ignored_or_is_wrong_beside_unknown_one(
    fields: dict[str, Any], param: str
) -> None:
    """Leniency ends where the answer would be wrong; other mistakes are found as before."""
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    with pytest.raises(ApiError) as caught:
        _decoder.decode(json.dumps(body).encode())
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("value", [None, "", [], 0, "off"])
def test_refused_field_that_asks_for_nothing_is_passed_over(value: object) -> None:
    """A field that is not set, or set to what the server does anyway, is no reason to refuse."""
    body = {"messages": [{"role": "user", "content": "x"}], "guided": value}
    assert _decoder.decode(json.dumps(body).encode()) == (_Body([_User("x")]), [])


def test_one_refused_value_among_neutral_ones_is_found() -> None:
    """Each message's field counts, not only the first one's."""
    messages = [{"role": "user", "content": "x", "prefix": value} for value in (False, True, False)]
    with pytest.raises(ApiError) as caught:
        _decoder.decode(json.dumps({"messages": messages}).encode())
    assert caught.value.param == "messages.prefix"


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"new":1', b'{"new":"\\ud800"}', b'{"new":' * 50_000, b'{"new":1e400}']
)
def test_invalid_json_behind_unknown_field_is_a_400(body: bytes) -> None:
    """A body that is not JSON is refused, also if the mistake comes after unknown fields."""
    with pytest.raises(ApiError) as caught:
        _decoder.decode(body)
    assert caught.value.status == 400


_json = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.text("abc", min_size=1, max_size=2), _json, max_size=4))
def test_unknown_fields_never_change_what_is_decoded(more: dict[str, Any]) -> None:
    """A request means the same with any unknown fields as without them."""
    known = {"messages": [{"role": "user", "content": "x"}]}
    decoded, ignored = _decoder.decode(json.dumps({**more, **known}).encode())
    assert decoded == _Body([_User("x")])
    assert sorted(ignored) == sorted(more)


@given(st.text())
def test_reported_name_is_short_printable_ascii_without_separators(name: str) -> None:
    """A client's name for a field cannot add headers, log lines or metrics of its own."""
    text = shown(name)
    assert len(text) <= ignored_fields.NAME_CHARS_MAX
    assert all(" " < char <= "~" and char not in ',"\\' for char in text)


def test_field_is_logged_once_per_key_and_the_memory_is_bounded() -> None:
    """Each pair of field and key is new once; beyond the bound nothing is."""
    logged = LoggedFields()
    assert logged.add("store", "alice")
    assert not logged.add("store", "alice")
    assert logged.add("store", "bob")
    found = sum(logged.add(f"field{number}", "") for number in range(5_000))
    assert found == ignored_fields.REMEMBERED_MAX - 2
