"""Text of a call's arguments: always a JSON object, and unchanged if it was one."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.conversation.conversation import INVALID_ARGUMENTS
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
