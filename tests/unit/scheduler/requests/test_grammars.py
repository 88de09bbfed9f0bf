"""Requests with grammars: the ranks get each with its admission, and a failed one ends alone."""

import msgspec

from shared import limits
from shared.messages import (
    Grammar,
    GrammarCompiled,
    GrammarFailure,
    RequestFailed,
    RequestFinished,
    StepFinished,
)
from tests.unit.scheduler.support.in_memory_world import completion
from tests.unit.scheduler.support.rank_failures import lose_rank, restart_ranks
from tests.unit.scheduler.support.world_factory import MakeWorld

GRAMMAR = Grammar(text="start: /a+/", end_ids=[2], begin_ids=[7])


def test_admission_carries_the_grammar_of_its_request_and_of_no_other(
    make_world: MakeWorld,
) -> None:
    """The text is sent once, in the plan that admits the sequence."""
    world = make_world(ranks=2)
    world.submit("one", [1, 2, 3], 6, grammar=GRAMMAR)
    world.submit("two", [4, 5, 6], 6)
    world.settle()
    admitted = {tuple(one.tokens): one.grammar for plan in world.plans for one in plan.admitted}
    assert admitted == {(1, 2, 3): GRAMMAR, (4, 5, 6): None}


def test_grammars_that_one_plan_cannot_carry_are_admitted_by_several(
    make_world: MakeWorld,
) -> None:
    """A step plan stays far below the longest message, whose loss would end the world."""
    world = make_world(ranks=2)
    text = "start: /a/" + " " * (limits.GRAMMAR_CHARS_MAX - 10)
    grammar = Grammar(text=text, end_ids=[2])
    for number in range(12):
        world.submit(f"r{number}", [1, 2, 3 + number], 2, grammar=grammar)
    world.settle()
    chars = [
        sum(len(one.grammar.text) for one in plan.admitted if one.grammar is not None)
        for plan in world.plans
    ]
    assert sum(chars) == 12 * limits.GRAMMAR_CHARS_MAX
    assert max(chars) <= limits.PLAN_GRAMMAR_CHARS_MAX
    assert all(f"r{number}" in world.tokens for number in range(12))


def test_admission_names_the_tenant_so_that_ranks_can_let_tenants_take_turns(
    make_world: MakeWorld,
) -> None:
    """A rank compiles grammars of tenants in turn, and knows of none but by the plan."""
    world = make_world(ranks=2)
    world.submit("one", [1, 2, 3], 6, grammar=GRAMMAR, tenant="a")
    world.submit("two", [4, 5, 6], 6, grammar=GRAMMAR, tenant="b")
    world.settle()
    admitted = {tuple(one.tokens): one.tenant for plan in world.plans for one in plan.admitted}
    assert admitted == {(1, 2, 3): "a", (4, 5, 6): "b"}


def test_sequence_admitted_again_after_a_lost_rank_brings_its_grammar_and_tokens(
    make_world: MakeWorld,
) -> None:
    """The ranks of the next epoch can rebuild the matcher from the plan alone."""
    world = make_world(ranks=2)
    world.submit("one", [1, 2, 3], 12, grammar=GRAMMAR)
    for _ in range(5):
        world.step()
    lose_rank(world)
    restart_ranks(world)
    world.settle()
    last = [one for plan in world.plans for one in plan.admitted][-1]
    assert last.grammar == GRAMMAR
    assert len(last.tokens) > last.prompt_tokens == 3
    assert world.tokens["one"] == completion([1, 2, 3], 12)


def test_request_whose_grammar_fails_ends_with_the_cause_and_without_the_step_s_tokens(
    make_world: MakeWorld,
) -> None:
    """Its neighbour goes on; tokens that were drawn without a mask do not reach the client."""
    world = make_world(ranks=2)
    world.submit("one", [1, 2, 3], 10, grammar=GRAMMAR)
    world.submit("two", [4, 5, 6], 10)

    def fail_after_3_tokens(receipt: StepFinished) -> StepFinished:
        if len(world.tokens["one"]) < 3 or receipt.rank:
            return receipt
        failure = GrammarFailure(sequence_id=1, detail="It allows nothing.")
        return msgspec.structs.replace(receipt, grammar_failures=[failure])

    world.change_receipt = fail_after_3_tokens
    world.settle()
    end = world.ends["one"]
    assert isinstance(end, RequestFailed)
    assert (end.cause, end.detail) == ("grammar", "It allows nothing.")
    assert world.tokens["one"] == completion([1, 2, 3], 3)
    assert isinstance(world.ends["two"], RequestFinished)
    assert world.tokens["two"] == completion([4, 5, 6], 10)


def test_failure_reported_again_for_a_sequence_that_has_ended_is_ignored(
    make_world: MakeWorld,
) -> None:
    """The step that was in flight at the failure reports it too."""
    world = make_world()
    world.submit("one", [1, 2, 3], 10, grammar=GRAMMAR)
    failure = GrammarFailure(sequence_id=1, detail="It allows nothing.")
    world.change_receipt = lambda receipt: msgspec.structs.replace(
        receipt, grammar_failures=[failure]
    )
    world.settle()
    assert isinstance(world.ends["one"], RequestFailed)
    assert world.tokens["one"] == []


def test_first_token_waits_until_all_ranks_have_compiled_its_grammar_and_no_other_request_waits(
    make_world: MakeWorld,
) -> None:
    """The prompt is computed up to its last chunk meanwhile, and a neighbour gets its tokens."""
    world = make_world(ranks=2, step_tokens_max=16)
    seconds = {0: 0.5, 1: 1.0}
    world.compile_answer = lambda report: (seconds[report.rank], report)
    world.submit("one", list(range(1, 41)), 6, grammar=GRAMMAR)
    world.submit("two", [4, 5, 6], 6)
    began_s = world.now_s
    while "two" not in world.ends:
        assert world.step()
    assert world.now_s - began_s < 0.5
    assert world.tokens["one"] == []
    chunks = [chunk for plan in world.plans for chunk in plan.prefill_chunks]
    lengths = [chunk.length for chunk in chunks if chunk.sequence_id == 1]
    assert 0 < sum(lengths) < 40
    plans = len(world.plans)
    while world.now_s - began_s < 0.99:
        assert world.step()
    assert len(world.plans) <= plans + 1, "nothing is planned while the grammar is compiled"
    assert world.tokens["one"] == []
    world.settle()
    assert world.tokens["one"] == completion(list(range(1, 41)), 6)


def test_request_whose_grammar_a_rank_cannot_compile_fails_with_its_reason(
    make_world: MakeWorld,
) -> None:
    """The other rank's later report is ignored."""
    world = make_world(ranks=2)

    def refuse(report: GrammarCompiled) -> tuple[float, GrammarCompiled]:
        failure = "It is too large." if report.rank else ""
        return 0.1 * (1 - report.rank), msgspec.structs.replace(report, failure=failure)

    world.compile_answer = refuse
    world.submit("one", [1, 2, 3], 6, grammar=GRAMMAR)
    world.settle()
    end = world.ends["one"]
    assert isinstance(end, RequestFailed)
    assert (end.cause, end.detail) == ("grammar", "It is too large.")


def test_request_whose_grammar_is_not_compiled_in_time_fails_and_names_the_grammar(
    make_world: MakeWorld,
) -> None:
    """The bound is one of time, counted by the scheduler; the epoch goes on."""
    world = make_world(ranks=2)
    world.compile_answer = lambda report: (0.0 if report.rank else 1e6, report)
    world.submit("one", [1, 2, 3], 6, grammar=GRAMMAR)
    for _ in range(5):
        world.step()
    world.advance(limits.GRAMMAR_COMPILE_MAX_S + 1.0)
    end = world.ends["one"]
    assert isinstance(end, RequestFailed)
    assert end.cause == "grammar_deadline", "the client may try again: its grammar is not at fault"
    assert "grammar" in end.detail
    assert "ranks that compiled it: [1]" in end.detail
    world.submit("two", [4, 5, 6], 6)
    for _ in range(10):
        world.step()
    assert world.tokens["two"] == completion([4, 5, 6], 6)


def test_ranks_of_the_next_epoch_compile_a_grammar_again(make_world: MakeWorld) -> None:
    """A report of an earlier epoch does not count."""
    world = make_world(ranks=2)
    world.compile_answer = lambda report: (0.2 if report.rank else 0.0, report)
    world.submit("one", [1, 2, 3], 6, grammar=GRAMMAR)
    for _ in range(3):
        world.step()
    assert world.tokens["one"] == []
    lose_rank(world)
    restart_ranks(world)
    world.settle()
    assert world.tokens["one"] == completion([1, 2, 3], 6)
    admissions = [one for plan in world.plans for one in plan.admitted]
    assert [one.grammar for one in admissions] == [GRAMMAR, GRAMMAR]
