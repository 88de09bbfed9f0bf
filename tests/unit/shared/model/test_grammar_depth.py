"""Grammars that nest deeply: they are refused or compiled, and never end the process."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from llguidance import LLTokenizer, TokenizerWrapper

from services.gateway.structured.byte_tokenizer import ByteTokenizer
from shared import limits
from shared.errors import Refusal
from shared.model.grammar_depth import count_levels
from shared.model.grammars import LEVELS_MAX, compile_grammar

_TOKENIZER = LLTokenizer(TokenizerWrapper(ByteTokenizer([])), slices=[])


def _lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _schema(schema: Any) -> str:
    return json.dumps({"grammars": [{"json_schema": schema}]})


def _rules(count: int, before: str = "", after: str = "") -> str:
    lines = [f"a{n}: {before}a{n + 1}{after}" for n in range(count)]
    return "\n".join(["start: a0", *lines, f'a{count}: "x"']) + "\n"


def _references(count: int, **sibling: Any) -> dict[str, Any]:
    chain = {f"a{n}": {"$ref": f"#/$defs/a{n + 1}", **sibling} for n in range(count)}
    return {"$ref": "#/$defs/a0", "$defs": {**chain, f"a{count}": {"type": "string"}}}


def _lists(count: int) -> dict[str, Any]:
    chain = {
        f"a{n}": {"type": "array", "items": {"$ref": f"#/$defs/a{n + 1}"}} for n in range(count)
    }
    return {"$ref": "#/$defs/a0", "$defs": {**chain, f"a{count}": {"type": "string"}}}


def _places(depth: int) -> dict[str, Any]:
    """Return a schema whose references name each level of one deep part."""
    names = ["#/$defs/t" + "/items" * level for level in range(depth)]
    part: dict[str, Any] = {"anyOf": [*({"$ref": name} for name in names), {"type": "null"}]}
    for _ in range(depth):
        part = {"items": part, "type": "array"}
    return {"$ref": "#/$defs/t", "$defs": {"t": part}}


DEEP = {
    "rules": _lark(_rules(9_000)),
    "groups": _lark(_rules(330, "(" * 27 + '"y" ', ")" * 27)),
    "terminals": _lark(_rules(9_000).replace("a", "A").replace("stArt", "start")),
    "rules in one line": _lark(_rules(6_000).replace("\n", " -> z ").replace(" -> z ", " ")),
    "references": _schema(_references(4_500)),
    "lists": _schema(_lists(3_000)),
    "places": _schema(_places(100)),
}
TOO_DEEP = {
    "rules": _lark(_rules(11_000)),
    "rules behind expressions with line ends": _lark(
        "start: a0\n" + "".join(f"a{n}: /x\nz: / a{n + 1}\n" for n in range(11_000)) + 'a11000: ""'
    ),
    "rules in one line": _lark(
        "start: a0\n" + " ".join(f'a{n}: "x" a{n + 1} -> z' for n in range(11_000))
    ),
    "rules behind flags": _lark(
        "start: a0\n" + "".join(f'a{n}: "x"ia{n + 1}\n' for n in range(11_000)) + 'a11000: ""'
    ),
    "terminals": _lark(_rules(11_000).replace("a", "A").replace("stArt", "start")),
    "templates": _lark("start: " + "a{" * 11_000 + "b" + "}" * 11_000),
    "conditions": _lark("start: a::0\na::_: x %if " + "not(" * 11_000 + ")" * 11_000),
    "references": _schema(_references(5_500)),
    "references in Lark": _lark("start: %json " + json.dumps(_references(5_500))),
    "places": _schema(_places(140)),
    "bases": _schema({**_references(2_500), "properties": {"x": {"$id": "y"}}}),
    "plain Lark": _rules(11_000),
}


def _shared_definitions(count: int) -> dict[str, Any]:
    """Return definitions as of an OpenAPI document, all of which lead to all others."""

    def names(number: int) -> Iterator[tuple[str, Any]]:
        for factor in (3, 7, 11):
            yield f"p{factor}", {"$ref": f"#/$defs/m{(number * factor + 1) % count}"}
        following = {"$ref": f"#/$defs/m{(number + 1) % count}"}
        yield "list", {"type": "array", "items": {"anyOf": [{"type": "null"}, following]}}

    models = {
        f"m{n}": {"type": "object", "properties": dict(names(n)), "additionalProperties": False}
        for n in range(count)
    }
    return {"$ref": "#/$defs/m0", "$defs": models}


@pytest.mark.parametrize("name", DEEP)
def test_deep_grammar_within_the_bound_is_compiled(name: str) -> None:
    """The thread that compiles it has a stack that is large enough."""
    assert LEVELS_MAX / 3 < count_levels(DEEP[name]) <= LEVELS_MAX
    matcher = compile_grammar(_TOKENIZER, DEEP[name])
    if not matcher.is_error():
        matcher.compute_bitmask()
        assert matcher.deep_copy().compute_bitmask()


@pytest.mark.parametrize("name", TOO_DEEP)
def test_grammar_that_would_end_the_process_is_refused(name: str) -> None:
    """The count is one from above, however the levels are written."""
    with pytest.raises(Refusal, match="levels"):
        compile_grammar(_TOKENIZER, TOO_DEEP[name])


def test_longest_texts_are_counted_at_once() -> None:
    """Names that are defined and used many times do not multiply."""
    for text in ("a: a\n" * 52_000, "a " * 131_000 + "\n", "a:" * 131_000, "/" * 262_000):
        assert len(text) <= limits.GRAMMAR_CHARS_MAX
        assert count_levels(text) > 0


def test_schema_of_500_definitions_that_name_each_other_is_compiled() -> None:
    """Documents of real interfaces lie far below the bound."""
    text = _schema(_shared_definitions(500))
    assert count_levels(text) < LEVELS_MAX / 2
    assert not compile_grammar(_TOKENIZER, text).is_error()


def test_levels_of_flat_grammars_do_not_grow_with_their_length() -> None:
    """Thousands of rules or properties side by side are no depth."""
    rules = "".join(f"r{n}: /x/ (r{n + 1} | SPACE)?\n" for n in range(0, 4_000, 2))
    tools = "start: " + " | ".join(f"r{n}" for n in range(0, 4_000, 2)) + "\nSPACE: / /\n" + rules
    assert count_levels(_lark(tools)) < 10
    assert (
        count_levels(_schema({"properties": {f"p{n}": {"type": "string"} for n in range(4_000)}}))
        < 10
    )


def test_panic_inside_the_library_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no Exception, and would end the thread or leave a request without an answer."""

    class Panic(BaseException):
        pass

    def fail(*_: object, **__: object) -> None:
        raise Panic("unreachable")

    monkeypatch.setattr("shared.model.grammars.LLMatcher", fail)
    for text in ('start: "x"', DEEP["rules"]):
        with pytest.raises(Refusal, match="Panic"):
            compile_grammar(_TOKENIZER, text)
