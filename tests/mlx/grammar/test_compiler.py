"""Compilation beside the steps: its outcome is reported, and a slow grammar delays no other."""

from pathlib import Path

import pytest

from services.rank_worker.sampling.grammar.compiler import GrammarCompiler
from shared.messages import Grammar
from tests.mlx.grammar.tiny_tokenizer import (
    json_schema,
    make_compiler,
    regex,
    write_tokenizer,
)
from tests.support.waiting import PROCESS_DEADLINE_S, wait_until

SLOW = json_schema(
    {
        "type": "object",
        "properties": {f"property_{number}": {"type": "string"} for number in range(4_000)},
        "additionalProperties": False,
    }
)
"""Takes a second or more."""

Reports = list[tuple[int, int, str]]


@pytest.fixture
def reporting(tmp_path: Path) -> tuple[GrammarCompiler, Reports]:
    """A compiler and its reports so far."""
    reports: Reports = []
    folder = write_tokenizer(tmp_path)
    return GrammarCompiler(folder, lambda *report: reports.append(report)), reports


def test_each_grammar_is_reported_once_with_its_step_and_sequence(
    reporting: tuple[GrammarCompiler, Reports],
) -> None:
    """One that cannot be compiled, or does not fit the tokens so far, with the reason."""
    compiler, reports = reporting
    compiler.start(regex("[0-9]+"), [], sequence_id=1, step_id=7)
    compiler.start(regex("("), [], sequence_id=2, step_id=7)
    compiler.start(regex("[0-9]+"), [5, 5], sequence_id=3, step_id=8)
    wait_until(lambda: len(reports) == 3, PROCESS_DEADLINE_S, failure=lambda: reports)
    outcomes = {(step_id, sequence_id): bool(error) for step_id, sequence_id, error in reports}
    assert outcomes == {(7, 1): False, (7, 2): True, (8, 3): True}


def test_slow_grammar_delays_no_other_even_if_many_sequences_wait_for_it(
    reporting: tuple[GrammarCompiler, Reports],
) -> None:
    """It is compiled once, and no thread waits for it."""
    compiler, reports = reporting
    slow = [compiler.start(SLOW, [], sequence_id=n, step_id=1) for n in range(1, 9)]
    compiler.start(regex("[a-z]+"), [], sequence_id=9, step_id=1)
    wait_until(lambda: reports, PROCESS_DEADLINE_S, failure="the quick grammar was not compiled")
    assert reports == [(1, 9, "")]
    assert not any(one.ready.done() for one in slow)
    wait_until(lambda: len(reports) == 9, PROCESS_DEADLINE_S, failure=lambda: reports)
    assert {error for _, _, error in reports} == {""}


def _slow(number: int) -> Grammar:
    """Return a grammar that takes long, and is not the same as that of another number."""
    properties = {f"p{number}_{n}": {"type": "string"} for n in range(2_000)}
    return json_schema({"type": "object", "properties": properties, "additionalProperties": False})


def test_grammar_of_another_tenant_does_not_wait_for_the_queue_of_one_with_many(
    reporting: tuple[GrammarCompiler, Reports],
) -> None:
    """One tenant gets all threads but one; its first sequences are not even done."""
    compiler, reports = reporting
    compiler.wait_until_ready()
    for number in range(1, 13):
        compiler.start(_slow(number), [], sequence_id=number, step_id=1, tenant="many")
    compiler.start(regex("[a-z]+"), [], sequence_id=99, step_id=1, tenant="one")
    wait_until(lambda: (1, 99, "") in reports, PROCESS_DEADLINE_S, failure=lambda: reports)
    assert len(reports) <= 4


def test_grammar_that_no_sequence_waits_for_any_more_is_not_begun(
    reporting: tuple[GrammarCompiler, Reports],
) -> None:
    """Requests that are sent and aborted leave nothing in the queue."""
    compiler, reports = reporting
    compiler.wait_until_ready()
    started = [
        compiler.start(_slow(n % 12), [], sequence_id=n, step_id=1, tenant=f"t{n % 2}")
        for n in range(1, 25)
    ]
    assert compiler.queued >= 8
    for matcher in started:
        matcher.ready.cancel()
    assert compiler.queued == 0
    compiler.start(_slow(11), [], sequence_id=99, step_id=2, tenant="t0")
    wait_until(
        lambda: reports,
        PROCESS_DEADLINE_S,
        failure="a grammar that was dropped is not compiled when wanted",
    )
    assert reports == [(2, 99, "")]


def test_grammar_that_two_tenants_wait_for_is_compiled_once_when_the_first_has_its_turn(
    reporting: tuple[GrammarCompiler, Reports],
) -> None:
    """The tenant with a short queue does not wait for that of the other."""
    compiler, reports = reporting
    compiler.wait_until_ready()
    for number in range(1, 13):
        compiler.start(_slow(number), [], sequence_id=number, step_id=1, tenant="many")
    shared = regex("[a-z]{2}")
    compiler.start(shared, [], sequence_id=20, step_id=1, tenant="many")
    compiler.start(shared, [], sequence_id=21, step_id=1, tenant="one")
    wait_until(lambda: (1, 21, "") in reports, PROCESS_DEADLINE_S, failure=lambda: reports)
    assert len(reports) <= 5


def test_sequence_dropped_before_its_grammar_is_compiled_is_not_reported(
    reporting: tuple[GrammarCompiler, Reports],
) -> None:
    """The others that use the grammar are."""
    compiler, reports = reporting
    dropped = compiler.start(SLOW, [], sequence_id=1, step_id=1)
    compiler.start(SLOW, [], sequence_id=2, step_id=1)
    assert dropped.ready.cancel()
    wait_until(lambda: reports, PROCESS_DEADLINE_S, failure="the other was not compiled")
    assert reports == [(1, 2, "")]


def test_grammar_used_before_is_compiled_at_once(tmp_path: Path) -> None:
    """A copy of it stands at the start."""
    compiler = make_compiler(tmp_path)
    first = compiler.matcher(SLOW, [])
    first.ready.result()
    first.prepare()
    again = compiler.matcher(SLOW, [])
    again.ready.result(timeout=0.5)
    assert again.constrained_drafts([]) == (0, [])


@pytest.mark.parametrize(("count", "fails"), [(9_000, False), (20_000, True)])
def test_rules_that_name_each_other_deeply_end_one_request_at_most(
    reporting: tuple[GrammarCompiler, Reports], count: int, fails: bool
) -> None:
    """The library would end the process, on every rank in turn and again after each recovery."""
    compiler, reports = reporting
    rules = "".join(f"a{n}: a{n + 1}\n" for n in range(count))
    grammar = Grammar(text=f'start: a0\n{rules}a{count}: "x"\n', end_ids=[2])
    matcher = compiler.start(grammar, [], sequence_id=1, step_id=1)
    wait_until(lambda: reports, PROCESS_DEADLINE_S, failure="there is no report")
    assert bool(matcher.error) == fails
    assert ("levels" in matcher.error) == fails
