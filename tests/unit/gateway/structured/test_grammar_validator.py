"""Checks of grammars: hostile ones are refused by name, in bounded time, and end no process."""

from collections.abc import Sequence
from typing import Any

import pytest

from services.gateway.conversation.constraint import Constraint
from services.gateway.http.errors import ApiError
from services.gateway.structured.grammar_validator import GrammarValidator
from services.gateway.structured.trials import Trials
from shared.clock import ManualClock
from shared.model.grammars import LEVELS_MAX
from tests.unit.gateway.structured.matching import TRIALS

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
        GrammarValidator([], TRIALS).check_constraint(Constraint(kind, value, "response_format"))
    assert found.value.status == 400
    assert (found.value.param or "").startswith("response_format")
    assert "levels" in found.value.message


def test_grammar_for_patches_of_an_agent_is_accepted() -> None:
    """Codex sends one of this form with every request."""
    GrammarValidator([], TRIALS).check_constraint(Constraint("lark", APPLY_PATCH, "tools"))


@pytest.mark.parametrize(
    ("keyword", "fits"), [("maximum", True), ("const", True), ("minimum", False)]
)
def test_schema_with_an_integer_of_any_size_is_accepted_or_refused_by_name(
    keyword: str, fits: bool
) -> None:
    """JSON knows no largest integer, and the library's own limit is no error of the server."""
    schema = {"type": "integer", keyword: _BIG}
    if fits:
        GrammarValidator([], TRIALS).check_schema(schema, "response_format")
        return
    with pytest.raises(ApiError) as found:
        GrammarValidator([], TRIALS).check_schema(schema, "response_format")
    assert (found.value.status, found.value.param) == (400, "response_format")


class _CountedTrials(Trials):
    """Trials that count the grammars, each of which takes a fifth of a second."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.count = 0

    def find_problem(self, text: str, special_ids: Sequence[int]) -> str:
        self.clock.advance(0.2)
        self.count += 1
        return TRIALS.find_problem(text, special_ids)


def test_search_for_the_refused_part_ends_when_its_time_is_over() -> None:
    """A schema whose parts take long to compile does not hold a thread that others wait for."""
    trials = _CountedTrials()
    properties = {f"p{n}": {"type": "string", "maxLength": n} for n in range(80)}
    schema = {"type": "object", "properties": {**properties, "bad": {"if": {"const": 1}}}}
    with pytest.raises(ApiError) as found:
        GrammarValidator([], trials, trials.clock).check_schema(schema, "tools[0].parameters")
    assert found.value.param == "tools[0].parameters"
    assert trials.count < 6


def test_grammar_that_was_refused_is_not_compiled_again() -> None:
    """A client that repeats its request gets the same answer at once."""
    trials = _CountedTrials()
    validator = GrammarValidator([], trials)
    schema = {"type": "object", "properties": {"bad": {"if": {"const": 1}}}}
    errors, counts = [], []
    for _ in range(2):
        with pytest.raises(ApiError) as found:
            validator.check_schema(schema, "response_format")
        errors.append((found.value.param, found.value.message))
        counts.append(trials.count)
    assert errors[0] == errors[1]
    assert errors[0][0] == "response_format.properties.bad"
    assert counts[0] == counts[1]


def test_many_patterns_of_different_texts_are_accepted() -> None:
    """Their number alone is no harm, nor that their schemas refer to each other."""
    parts = {f"p{n}": {"type": "string", "pattern": f"^[a-z]{{{n}}}$"} for n in range(1, 40)}
    schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/y"}}}
    schema |= {"$defs": {"y": {"type": "object", "properties": parts}}}
    GrammarValidator([1], TRIALS).check_schema(schema, "response_format")
