"""The input of a custom tool, taken out of arguments in pieces."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.dialects.responses.custom_input import CustomInput

PATCH = '*** Begin Patch\n*** Update File: a.py\n@@\n-a = "\\n"\n+b = "ü 🎉"\n*** End Patch\n'


def read(pieces: list[str]) -> str:
    """Return the input of arguments that arrive in these pieces."""
    reader = CustomInput()
    return "".join([*map(reader.push, pieces), reader.finish()])


def cut(text: str, places: list[int]) -> list[str]:
    """Return a text in pieces."""
    ends = [*sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (json.dumps({"input": PATCH}), PATCH),
        (json.dumps({"input": PATCH}, ensure_ascii=False), PATCH),
        (json.dumps({"patch": PATCH}, indent=2), PATCH),
        (PATCH, PATCH),
        ('{"input": "a", "more": "b"}', "a"),
        ('{"input": 5}', '{"input": 5}'),
        ('["a"]', '["a"]'),
        ("{}", ""),
        ("", ""),
        ('{"inp', '{"inp'),
        ('{"input": "cut', "cut"),
        ('{"input": "\\ud83d\\ude00 \\ud83d! \\x \\u00', "😀 \ufffd! \\x \\u00"),
        ('{"k\\"ey": "v"}', "v"),
        ('{"' + "k" * 2_000 + '": "v"}', '{"' + "k" * 2_000 + '": "v"}'),
    ],
)
def test_custom_input_is_first_string_of_object_or_text_itself(
    arguments: str, expected: str
) -> None:
    """An object gives its first string, other text stays, broken escapes are text."""
    assert read([arguments]) == expected
    assert read(list(arguments)) == expected


@given(
    st.one_of(
        st.builds(lambda text: json.dumps({"input": text}), st.text()),
        st.text(alphabet='{}":\\ ud83e\n[]a0', max_size=60),
        st.builds(lambda text: '{"input": "' + text, st.text(alphabet='\\ud83dc0"}e', max_size=40)),
    ),
    st.lists(st.integers(min_value=0, max_value=10_000), max_size=8),
)
def test_custom_input_does_not_depend_on_cuts(arguments: str, places: list[int]) -> None:
    """However the arguments are cut, the input is the same."""
    assert read(cut(arguments, places)) == read([arguments])


def test_custom_input_of_a_million_escapes_takes_linear_time() -> None:
    """Time grows with the text: it is read on the event loop while it arrives."""
    arguments = json.dumps({"input": "\n" * 500_000})
    started_s = time.perf_counter()
    text = read([arguments[start : start + 1_000] for start in range(0, len(arguments), 1_000)])
    assert len(text) == 500_000
    assert time.perf_counter() - started_s < 10.0
    assert len(read([arguments])) == 500_000
    assert time.perf_counter() - started_s < 20.0
