"""Code in Markdown: spans and blocks are known by their backticks, however the text is cut."""

import pytest

from services.gateway.output.code_spans import CodeSpans


def _found(text: str) -> str:
    """Return what a marker after the text stands in: a quote, other code, or nothing."""
    found = set()
    for pieces in ([text], list(text)):
        code = CodeSpans()
        for piece in pieces:
            code.add(piece)
        code.meet_marker()
        found.add("quote" if code.is_quote else "code" if code.is_open else "")
    [result] = found
    return result


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", ""),
        ("write `", "quote"),
        ("write ``", "quote"),
        ("write `a ", "code"),
        ("write `a`", ""),
        ("write `a` or `", "quote"),
        ("write ``a ` b`` and ", ""),
        ("a stray ` in a paragraph\n\n", ""),
        ("a span `over\nlines ", "code"),
        ("```\n", "code"),
        ("```", "code"),
        ("  ```python\ncode\n", "code"),
        ("```\ncode `x\n```\n", ""),
        ("````\n```\n", "code"),
        ("```code``` and ", ""),
        ("text ```\n", "code"),
    ],
)
def test_code_is_known_by_the_backticks_before_it(text: str, expected: str) -> None:
    """A marker right after opening backticks is a quote; elsewhere in code it may be meant."""
    assert _found(text) == expected


def test_further_markers_of_a_quote_are_quoted_too() -> None:
    """A span that begins with a marker is about calls up to its end."""
    code = CodeSpans()
    code.add("as `")
    code.meet_marker()
    code.add("<tool_call>\n")
    code.meet_marker()
    assert code.is_quote
    code.add("` and then ")
    code.meet_marker()
    assert not code.is_quote
