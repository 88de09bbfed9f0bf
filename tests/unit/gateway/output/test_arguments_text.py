"""Text of a call's arguments: always a JSON object, and unchanged if it was one."""

import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.conversation.conversation import INVALID_ARGUMENTS
from services.gateway.output import json_text
from services.gateway.output.arguments_text import ArgumentsText

_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
_junk = st.lists(
    st.sampled_from([*'{}[]:," \n\\ux9a-.', '"a"', "null", "True", "12", "\\u00e9", "ü"])
)


def _written(pieces: list[str], *, is_broken_off: bool = False) -> tuple[str, ArgumentsText]:
    found: list[str] = []
    arguments = ArgumentsText(found.append)
    for piece in pieces:
        arguments.add(piece)
    if is_broken_off:
        arguments.break_off()
    arguments.end()
    return "".join(found), arguments


@given(
    value=st.dictionaries(st.text(), _values, max_size=4),
    indent=st.sampled_from([None, 1]),
    has_escapes=st.booleans(),
)
def test_object_is_passed_on_as_it_is(
    value: dict[str, Any], indent: int | None, has_escapes: bool
) -> None:
    """JSON objects are not changed, however they are spelled and cut."""
    text = json.dumps(value, indent=indent, ensure_ascii=has_escapes)

    found, arguments = _written(list(text))

    assert (found, arguments.is_whole) == (text, True)
    assert _written([text])[0] == text


@given(values=st.lists(_values, max_size=3), indent=st.sampled_from([None, 1]))
def test_values_that_come_whole_are_passed_on_as_they_are(
    values: list[Any], indent: int | None
) -> None:
    """Formats that write values as text have them only at their end."""
    texts = [json.dumps(value, indent=indent) for value in values]
    pieces = ["{"]
    for number, text in enumerate(texts):
        pieces += [", " if number else "", f'"{number}": ', text]

    found, arguments = _written([*pieces, "}"])

    assert (found, arguments.is_whole) == ("".join([*pieces, "}"]), True)


@pytest.mark.parametrize(("depth", "fits"), [(json_text.DEPTH_MAX - 1, True), (500, False)])
def test_value_that_comes_whole_is_as_deep_as_one_in_pieces(depth: int, fits: bool) -> None:
    """A client could not send deeper arguments back."""
    text = "[" * depth + "]" * depth

    found, arguments = _written(['{"a": ', text, "}"])

    assert arguments.is_broken != fits
    assert found == _written(list(f'{{"a": {text}}}'))[0]


def test_long_value_that_comes_whole_is_not_read_part_by_part() -> None:
    """Its parts would take most of a second, in which no other stream goes on."""
    called: list[str] = []
    arguments = ArgumentsText(lambda _: None)
    arguments.add('{"a": ')
    sys.setprofile(lambda frame, event, _: called.append(event))
    try:
        arguments.add(json.dumps(list(range(10_000))))
    finally:
        sys.setprofile(None)
    assert called.count("call") < 100


@given(pieces=_junk)
def test_any_text_becomes_an_object_in_which_its_rest_is_visible(pieces: list[str]) -> None:
    """Any text that is broken off gives one JSON object, however the text is cut."""
    found, arguments = _written(pieces, is_broken_off=True)

    assert isinstance(json.loads(found), dict)
    assert INVALID_ARGUMENTS in json.loads(found)
    assert arguments.is_broken
    assert _written(list("".join(pieces)), is_broken_off=True)[0] == found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": b} c', {"a": None, INVALID_ARGUMENTS: "b} c"}),
        ('{"a": "x" y', {"a": "x", INVALID_ARGUMENTS: "y"}),
        ('{"a" 1}', {"a": None, INVALID_ARGUMENTS: "1}"}),
        ('{"a": {"b": [1, 2 3]', {"a": {"b": [1, 2]}, INVALID_ARGUMENTS: "3]"}),
        ('{"a": 1}}', {"a": 1, INVALID_ARGUMENTS: "}"}),
        ('["a"]', {INVALID_ARGUMENTS: '["a"]'}),
        ("plain", {INVALID_ARGUMENTS: "plain"}),
        ('{"a": "x\n\\d\\u12", "b": [1,],}', {"a": "x\n\\d\\u12", "b": [1]}),
        (" {} \n", {}),
    ],
)
def test_text_that_does_not_fit_is_the_value_of_one_more_key(text: str, expected: Any) -> None:
    """The text before it stays as it is, and strings are mended."""
    assert json.loads(_written([text])[0]) == expected


def test_object_that_is_cut_off_stays_incomplete() -> None:
    """A client must not act on half a value."""
    for text in ("", "{", '{"a": "b', '{"a": 1, ', '{"a": [1'):
        with pytest.raises(json.JSONDecodeError):
            json.loads(_written([text])[0])
