"""Checks of grammars: hostile ones are refused by name, in bounded time, and end no process."""

import time
from typing import Any

import pytest

from services.gateway.conversation.constraint import Constraint
from services.gateway.http.errors import ApiError
from services.gateway.structured import grammar_validator, trial
from services.gateway.structured.grammar_validator import GrammarValidator
from shared.clock import ManualClock
from shared.model.grammars import LEVELS_MAX, compile_grammar

_BIG = 10**30
APPLY_PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""


def _chain(count: int, **last: Any) -> dict[str, Any]:
    chain = {f"a{n}": {"$ref": f"#/$defs/a{n + 1}"} for n in range(count)}
    return {"$ref": "#/$defs/a0", "$defs": {**chain, f"a{count}": {"type": "string", **last}}}


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("lark", "start: a0\n" + "".join(f"a{n}: a{n + 1}\n" for n in range(LEVELS_MAX)) + "x: y"),
        ("json_schema", _chain(LEVELS_MAX // 2)),
    ],
)
def test_constraint_that_nests_too_deeply_is_refused_by_its_field(kind: Any, value: Any) -> None:
    """One short request would end the process otherwise, on the gateway and on every rank."""
    with pytest.raises(ApiError) as found:
        GrammarValidator([]).check_constraint(Constraint(kind, value, "response_format"))
    assert found.value.status == 400
    assert (found.value.param or "").startswith("response_format")
    assert "levels" in found.value.message


def test_grammar_for_patches_of_an_agent_is_accepted() -> None:
    """Codex sends one of this form with every request."""
    GrammarValidator([]).check_constraint(Constraint("lark", APPLY_PATCH, "tools"))


@pytest.mark.parametrize(
    ("keyword", "fits"), [("maximum", True), ("const", True), ("minimum", False)]
)
def test_schema_with_an_integer_of_any_size_is_accepted_or_refused_by_name(
    keyword: str, fits: bool
) -> None:
    """JSON knows no largest integer, and the library's own limit is no error of the server."""
    schema = {"type": "integer", keyword: _BIG}
    if fits:
        GrammarValidator([]).check_schema(schema, "response_format")
        return
    with pytest.raises(ApiError) as found:
        GrammarValidator([]).check_schema(schema, "response_format")
    assert (found.value.status, found.value.param) == (400, "response_format")


def test_search_for_the_refused_part_ends_when_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A schema whose parts take long to compile does not hold a thread that others wait for."""
    clock = ManualClock()
    compiled: list[str] = []

    def compile_slowly(tokenizer: Any, text: str) -> Any:
        clock.advance(0.2)
        compiled.append(text)
        return compile_grammar(tokenizer, text)

    monkeypatch.setattr(grammar_validator, "compile_grammar", compile_slowly)
    properties = {f"p{n}": {"type": "string", "maxLength": n} for n in range(80)}
    schema = {"type": "object", "properties": {**properties, "bad": {"if": {"const": 1}}}}
    with pytest.raises(ApiError) as found:
        GrammarValidator([], clock).check_schema(schema, "tools[0].parameters")
    assert found.value.param == "tools[0].parameters"
    assert len(compiled) < 6


def test_grammar_that_was_refused_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that repeats its request gets the same answer at once."""
    validator = GrammarValidator([])
    schema = {"type": "object", "properties": {"bad": {"if": {"const": 1}}}}
    errors = []
    for _ in range(2):
        with pytest.raises(ApiError) as found:
            validator.check_schema(schema, "response_format")
        errors.append((found.value.param, found.value.message))
        monkeypatch.setattr(grammar_validator, "compile_grammar", None)
    assert errors[0] == errors[1]
    assert errors[0][0] == "response_format.properties.bad"


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json_schema", {"allOf": [{"type": "string", "pattern": f"a{n}"} for n in range(60)]}),
        (
            "json_schema",
            {
                "$ref": "#/$defs/a0",
                "$defs": {
                    f"a{n}": {"type": "string", "pattern": f"a{n}", "$ref": f"#/$defs/a{n + 1}"}
                    for n in range(60)
                }
                | {"a60": {"type": "string", "pattern": "b"}},
            },
        ),
        ("lark", "start: A\nA: " + " & ".join(f"/(.|\\n)*a{n}(.|\\n)*/" for n in range(60))),
    ],
)
def test_patterns_whose_combinations_never_end_are_refused_in_seconds(
    monkeypatch: pytest.MonkeyPatch, kind: Any, value: Any
) -> None:
    """A kilobyte would occupy a thread for ever; the process that tries it is ended."""
    monkeypatch.setattr(trial, "TRIAL_S_MAX", 1.5)
    began_s = time.monotonic()
    with pytest.raises(ApiError) as found:
        GrammarValidator([1]).check_constraint(Constraint(kind, value, "response_format"))
    assert found.value.param == "response_format"
    assert "fewer patterns" in found.value.message
    assert time.monotonic() - began_s < 10.0


def test_many_patterns_of_different_texts_are_accepted() -> None:
    """Their number alone is no harm, nor that their schemas refer to each other."""
    parts = {f"p{n}": {"type": "string", "pattern": f"^[a-z]{{{n}}}$"} for n in range(1, 40)}
    schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/y"}}}
    schema |= {"$defs": {"y": {"type": "object", "properties": parts}}}
    GrammarValidator([1]).check_schema(schema, "response_format")
