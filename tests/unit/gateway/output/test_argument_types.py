"""Arguments written as text: JSON of the type that the tool's schema allows."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.output.argument_types import ANY, ArgumentValue, argument_types, as_json

_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "choice": {"enum": ["a", 1, None]},
        "fixed": {"const": True},
        "optional": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "either": {"oneOf": [{"type": "string"}, {"$ref": "#/$defs/point"}]},
        "all": {"allOf": [{"description": "x"}, {"type": "number"}]},
        "nullable": {"type": "boolean", "nullable": True},
        "list": {"type": ["array", "null"]},
        "loop": {"$ref": "#/properties/loop"},
        "open": {"anyOf": [{"type": "string"}, {}]},
        "anything": {"description": "x"},
        "odd": True,
    },
    "$defs": {"point": {"type": "object"}},
}
_TYPES = {
    "text": {"string"},
    "choice": {"string", "integer", "null"},
    "fixed": {"boolean"},
    "optional": {"integer", "null"},
    "either": {"string", "object"},
    "all": {"number"},
    "nullable": {"boolean", "null"},
    "list": {"array", "null"},
    "loop": ANY,
    "open": ANY,
    "anything": ANY,
    "odd": ANY,
    "unknown": ANY,
}


@pytest.mark.parametrize("name", _TYPES)
def test_types_of_argument_are_those_of_its_schema(name: str) -> None:
    """Unions, references, enums and constants say which types a value may have."""
    assert argument_types(_SCHEMA, name) == _TYPES[name]


def test_schema_of_further_arguments_counts_for_unknown_names() -> None:
    """`additionalProperties` is the schema of names that have none."""
    assert argument_types({"additionalProperties": {"type": "integer"}}, "x") == {"integer"}
    assert argument_types({"properties": []}, "x") == ANY
    assert argument_types(None, "x") == ANY


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf", "allOf"])
def test_types_of_schema_that_branches_into_itself_are_any_and_read_at_once(keyword: str) -> None:
    """The event loop reads them: the time does not double with each level."""
    circle = {keyword: [{"$ref": "#/$defs/circle"}] * 20}
    wide: dict[str, Any] = {keyword: [{"enum": []}] * 50_000}
    schema = {
        "properties": {"circle": {"$ref": "#/$defs/circle"}, "wide": wide},
        "$defs": {"circle": circle},
    }
    began_s = time.process_time()
    assert argument_types(schema, "circle") == ANY
    assert argument_types(schema, "wide") == ANY
    assert time.process_time() - began_s < 0.1


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        ("3", {"integer"}, 3),
        ("3.0", {"integer"}, 3),
        ("3.5", {"integer"}, "3.5"),
        (" 2.50\n", {"number"}, 2.5),
        ("3", {"string"}, "3"),
        (" 3 ", {"string"}, " 3 "),
        ('"3"', {"string"}, '"3"'),
        ("null", {"string"}, "null"),
        ("null", {"string", "null"}, None),
        ("nul", {"string", "null"}, "nul"),
        ("3", {"string", "integer"}, 3),
        ("three", {"string", "integer"}, "three"),
        ("True", {"boolean"}, True),
        ("yes", {"boolean"}, "yes"),
        ("None", {"integer", "null"}, None),
        ('{"a": [1]}', {"object"}, {"a": [1]}),
        ("{'a': True, 'b': None}", {"object"}, {"a": True, "b": None}),
        ('{"a": "line\nend"}', {"object"}, {"a": "line\nend"}),
        ("(1, 2)", {"array"}, [1, 2]),
        ("[1", {"array"}, "[1"),
        ("[1]", {"string"}, "[1]"),
        ("[1]", ANY, [1]),
        ("true", ANY, True),
        ("'quoted'", ANY, "'quoted'"),
        ('"quoted"', ANY, "quoted"),
        ("plain", ANY, "plain"),
        ("", ANY, ""),
        ("007", ANY, "007"),
        ("1e999", {"number"}, float("inf")),
    ],
)
def test_text_becomes_json_of_a_type_that_fits(text: str, types: Any, expected: object) -> None:
    """Text is the JSON of an allowed type if it can be, else a string."""
    assert json.loads(as_json(text, frozenset(types))) == expected


@given(
    text=st.text() | st.sampled_from(["null", "nullify", " null ", "nul", "3"]),
    cuts=st.lists(st.integers(0, 50), max_size=5),
    types=st.sampled_from([{"string"}, {"string", "null"}, {"integer", "string"}, set()]),
)
def test_value_in_pieces_becomes_the_same_json(text: str, cuts: list[int], types: Any) -> None:
    """A value that arrives in pieces is JSON, and the same as in one piece."""
    text = text.encode(errors="replace").decode()

    def written(places: list[int]) -> str:
        pieces: list[str] = []
        value = ArgumentValue(frozenset(types), pieces.append)
        ends = sorted(min(place, len(text)) for place in [*places, len(text)])
        start = 0
        for end in ends:
            value.add(text[start:end])
            start = end
        value.end()
        return "".join(pieces)

    assert written(cuts) == written([])
    assert json.loads(written([])) == json.loads(as_json(text, frozenset(types)))


def test_long_text_that_is_only_python_stays_a_text() -> None:
    """Reading it as Python would keep all streams waiting."""
    short, long = ("[" + count * "'a', " + "]" for count in (100, 4_000))
    assert json.loads(as_json(short, frozenset({"array"}))) == ["a"] * 100
    assert json.loads(as_json(long, frozenset({"array"}))) == long
