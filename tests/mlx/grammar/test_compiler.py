"""Compilation beside the steps: its outcome is reported, and a slow grammar delays no other."""

import gc
import sys
import threading
from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer

from services.rank_worker.sampling.grammar import compiler as compiler_module
from services.rank_worker.sampling.grammar.compiler import GrammarCompiler
from shared.messages import Grammar
from shared.model import grammars
from shared.model.grammars import compile_grammar
from tests.mlx.grammar.tiny_tokenizer import (
    json_schema,
    make_compiler,
    regex,
    token_texts,
    write_tokenizer,
)
from tests.support.waiting import PROCESS_DEADLINE_S, wait_until

SLOW = json_schema(
    {
        "type": "object",
        "properties": {f"property_{number}": {"type": "string"} for number in range(2_000)},
        "additionalProperties": False,
    }
)
"""Takes half a second or more."""

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


def test_slow_grammar_of_many_sequences_delays_no_other_tenant(
    reporting: tuple[GrammarCompiler, Reports],
) -> None:
    """Each has an automaton of its own, which is compiled in the turns of its tenant."""
    compiler, reports = reporting
    slow = [compiler.start(SLOW, [], sequence_id=n, step_id=1, tenant="a") for n in range(1, 5)]
    compiler.start(regex("[a-z]+"), [], sequence_id=9, step_id=1, tenant="b")
    wait_until(lambda: reports, PROCESS_DEADLINE_S, failure="the quick grammar was not compiled")
    assert reports == [(1, 9, "")]
    assert not any(one.ready.done() for one in slow)
    wait_until(lambda: len(reports) == 5, PROCESS_DEADLINE_S, failure=lambda: reports)
    assert {error for _, _, error in reports} == {""}


@pytest.mark.parametrize("has_spare", [False, True])
def test_sequence_is_not_held_back_by_what_others_of_its_grammar_have_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_spare: bool
) -> None:
    """A sequence that uses up all states of its automaton ends alone. Otherwise ranks would differ,
    because the threads that fill masks take turns in any order."""
    monkeypatch.setattr(grammars, "LEXER_STATES_MAX", 60)
    compiler = make_compiler(tmp_path)
    grammar = regex("(.|\\n)*a(.|\\n){12}")
    if has_spare:
        for _ in range(2):
            compiler.matcher(grammar, []).ready.result()
    texts = token_texts()
    drawn = [texts.index(letter) for letter in "abbaababbbaabababbababaabbbababaab"]
    counts = []
    first, second = compiler.matcher(grammar, []), compiler.matcher(grammar, [])
    for matcher in (first, second):
        matcher.ready.result()
        count = 0
        while count < len(drawn) and matcher.check():
            matcher.grammar.state.compute_bitmask()
            matcher.take(drawn[count : count + 1])
            count += 1
        counts.append(count)
    assert counts[0] == counts[1]
    assert 3 < counts[0] < len(drawn)


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


def test_grammar_that_waits_in_the_queue_of_one_tenant_is_compiled_in_the_turn_of_another(
    reporting: tuple[GrammarCompiler, Reports],
) -> None:
    """The tenant with a short queue does not wait for that of the other, nor for its spares."""
    compiler, reports = reporting
    compiler.wait_until_ready()
    for number in range(1, 13):
        compiler.start(_slow(number), [], sequence_id=number, step_id=1, tenant="many")
    shared = regex("[a-z]{2}")
    for number in (20, 21):
        compiler.start(shared, [], sequence_id=number, step_id=1, tenant="many")
    compiler.start(shared, [], sequence_id=22, step_id=1, tenant="one")
    wait_until(lambda: (1, 22, "") in reports, PROCESS_DEADLINE_S, failure=lambda: reports)
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


def test_grammar_that_comes_again_is_compiled_before_the_sequence_after_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent sends the same one with every turn; its matcher stands at the start."""
    grammar, compiled = regex("again [0-9]+"), list[str]()
    may_compile = threading.Event()
    may_compile.set()

    def counting(tokenizer: LLTokenizer, text: str) -> LLMatcher:
        if text != grammar.text:
            return compile_grammar(tokenizer, text)  # compilers of other tests still work
        may_compile.wait()
        matcher = compile_grammar(tokenizer, text)
        compiled.append(text)
        return matcher

    monkeypatch.setattr(compiler_module, "compile_grammar", counting)
    compiler = make_compiler(tmp_path)
    compiler.matcher(grammar, []).ready.result()
    assert len(compiled) == 1
    compiler.matcher(grammar, []).ready.result()
    wait_until(lambda: len(compiled) == 3, PROCESS_DEADLINE_S, failure="no spare was compiled")
    may_compile.clear()
    again = compiler.matcher(grammar, [])
    again.ready.result(PROCESS_DEADLINE_S)
    may_compile.set()
    assert again.constrained_drafts([]) == (0, [])


def test_compiled_grammar_of_a_sequence_that_ended_is_freed_at_once(tmp_path: Path) -> None:
    """Grammars take megabytes that the garbage collector does not know of."""
    gc.disable()
    try:
        matcher = make_compiler(tmp_path).matcher(regex("[0-9]+"), [])
        matcher.ready.result()
        state = matcher.grammar.state
        matcher.drop()
        # The name here and the argument of the call.
        wait_until(lambda: sys.getrefcount(state) == 2, failure=lambda: gc.get_referrers(state))
    finally:
        gc.enable()
    matcher.take([5])
    assert matcher.constrained_drafts([5]) is None


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
