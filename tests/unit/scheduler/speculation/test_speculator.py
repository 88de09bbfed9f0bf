"""Speculation for the running batch: who takes drafts, how many, and what is counted."""

from typing import Any

import pytest

from services.scheduler.speculation.costs import DecodeWork
from services.scheduler.speculation.sequence_drafts import (
    DecodingRow,
    DraftState,
    NgramDraftState,
)
from services.scheduler.speculation.speculator import Speculator
from shared.configuration.settings import SpeculationConfig
from shared.messages import DraftStatistics, Speculation

PERIOD = [1, 2, 3, 4, 5, 6]


def speculator(
    *, tokens_max: int = 5, disable_above_sequences: int = 0, is_measured: bool = True
) -> Speculator:
    """Return one on a device whose drafts cost nothing."""
    one = Speculator(
        SpeculationConfig(
            method="ngram", tokens_max=tokens_max, disable_above_sequences=disable_above_sequences
        )
    )
    if is_measured:
        for rows in range(1, 9):
            for _ in range(4):
                one.record_step(DecodeWork(rows, 1, 0), 10.0, 0.0, was_held=False)
    return one


def drafting(one: Speculator, tokens: list[int], most: int = 0) -> DraftState:
    found = one.new_draft_state(tokens, Speculation(tokens=most))
    assert found is not None
    return found


def test_a_server_without_speculation_has_no_drafts() -> None:
    """Unless a request asks for the one method that needs nothing."""
    off = Speculator(SpeculationConfig())
    for method in ("default", "off", "draft_model", "eagle"):
        assert off.new_draft_state([1], Speculation(method=method)) is None
    assert off.new_draft_state([1], Speculation(method="ngram")) is not None


@pytest.mark.parametrize(
    ("method", "takes"),
    [("default", True), ("ngram", True), ("off", False), ("draft_model", False), ("eagle", False)],
)
def test_a_request_chooses_among_what_is_set_up(method: str, takes: bool) -> None:
    """A method that the server is not set up for is off."""
    found = speculator().new_draft_state([1], Speculation(method=method))  # type: ignore[arg-type]
    assert (found is not None) == takes


@pytest.mark.parametrize(("asked", "most"), [(0, 5), (2, 2), (5, 5), (16, 5)])
def test_a_request_may_ask_for_fewer_drafts(asked: int, most: int) -> None:
    """The server's bound holds for all; below it the request's own does."""
    one = speculator()
    row = DecodingRow(drafting(one, PERIOD * 9, most=asked), 0, 1_000)
    assert [len(drafts) for drafts in one.choose([row]).drafts] == [most]


def test_drafts_are_what_followed() -> None:
    """Rows with a match get its continuation, others in the same plan none."""
    one = speculator()
    rows = [
        DecodingRow(drafting(one, PERIOD * 9), 0, 1_000),
        DecodingRow(None, 0, 1_000),
        DecodingRow(drafting(one, list(range(100))), 0, 1_000),
    ]
    planned = one.choose(rows)
    assert planned.drafts == [[1, 2, 3, 4, 5], [], []]
    assert planned.decode_work(3) == DecodeWork(3, 6, 1)


def test_nobody_gets_drafts_without_a_match() -> None:
    """A plan without drafts says so, and is as narrow as ever."""
    one = speculator()
    planned = one.choose([DecodingRow(drafting(one, list(range(100))), 0, 1_000)])
    assert (planned.drafts, planned.waits_for_results) == ([], False)
    assert planned.decode_work(1) == DecodeWork(1, 1, 0)
    assert one.choose([]).drafts == []


@pytest.mark.parametrize(("left", "drafts"), [(1, 0), (2, 1), (3, 2), (6, 5), (7, 5)])
def test_drafts_end_before_the_sequence(left: int, drafts: int) -> None:
    """A verification brings one token more than its drafts, and none past the longest length."""
    one = speculator()
    planned = one.choose([DecodingRow(drafting(one, PERIOD * 9), 0, left)])
    assert planned.decode_work(1).width == drafts + 1


def test_each_row_has_its_own_bounds() -> None:
    """The widest row's drafts are no reason for others to pass their end or their request."""
    one = speculator()
    rows = [
        DecodingRow(drafting(one, PERIOD * 9), 0, 1_000),
        DecodingRow(drafting(one, PERIOD * 9), 0, 3),
        DecodingRow(drafting(one, PERIOD * 9, most=1), 0, 1_000),
        DecodingRow(drafting(one, PERIOD * 9), 0, 1),
    ]
    assert [len(drafts) for drafts in one.choose(rows).drafts] == [5, 2, 1, 0]


def test_a_row_with_tokens_in_flight_gets_no_drafts() -> None:
    """Drafts follow known tokens, also where others in the plan have drafts."""
    one = speculator()
    rows = [
        DecodingRow(drafting(one, PERIOD * 9), 0, 1_000),
        DecodingRow(drafting(one, PERIOD * 9), 1, 2),
    ]
    assert one.choose(rows).drafts == [[1, 2, 3, 4, 5], []]


def test_tokens_in_flight_are_waited_for() -> None:
    """While tokens are unknown a plan is held, and only then: something must end the wait."""
    one = speculator()
    tokens = PERIOD * 9
    mine = drafting(one, tokens)
    assert one.choose([DecodingRow(mine, 1, 1_000)]).waits_for_results
    tokens.append(1)
    planned = one.choose([DecodingRow(mine, 0, 999)])
    assert planned.drafts == [[2, 3, 4, 5, 6]]
    assert one.record_plan(planned), "it had been held"
    assert not one.record_plan(planned)
    assert one.counters.report()["held_plans_total"] == 1
    assert one.counters.report()["drafted_steps_total"] == 2


def test_nothing_waits_for_what_could_not_be_sent() -> None:
    """A sequence that ends with the tokens in flight holds up nobody."""
    one = speculator()
    assert not one.choose([DecodingRow(drafting(one, PERIOD * 9), 1, 2)]).waits_for_results


def test_larger_batches_have_no_drafts_when_bounded() -> None:
    """`speculation.disable_above_sequences` holds whatever was measured; 0 bounds nothing."""
    for disable_above_sequences, has_drafts in ((0, True), (2, False), (3, True)):
        one = speculator(disable_above_sequences=disable_above_sequences)
        rows = [DecodingRow(drafting(one, PERIOD * 9), 0, 1_000) for _ in range(3)]
        assert bool(one.choose(rows).drafts) == has_drafts


def test_a_batch_of_another_size_is_measured_first() -> None:
    """What drafts save is told from plain steps of as many rows: those come first."""
    one = speculator()
    rows = [DecodingRow(drafting(one, PERIOD * 9), 0, 1_000) for _ in range(9)]
    assert one.choose(rows).drafts == []
    for _ in range(2):
        one.record_step(DecodeWork(9, 1, 0), 10.0, 0.0, was_held=False)
    assert len(one.choose(rows).drafts) == 9


def test_an_epoch_measures_anew_and_keeps_texts() -> None:
    """Costs are another world's; what a text repeats is still known."""
    one = speculator()
    row = DecodingRow(drafting(one, PERIOD * 9), 0, 1_000)
    assert one.choose([row]).drafts
    one.begin_epoch()
    assert one.choose([row]).drafts == []
    for _ in range(3):
        one.record_step(DecodeWork(1, 1, 0), 10.0, 0.0, was_held=False)
    assert one.choose([row]).drafts


def test_a_text_that_grew_elsewhere_is_caught_up_with() -> None:
    """After a wait in the queue, or an epoch, proposals follow the text as it is."""
    one = speculator()
    tokens = PERIOD * 3
    row = DecodingRow(drafting(one, tokens), 0, 1_000)
    one.choose([row])
    tokens += [9, 8, 7, 6, 5, 4] * 30
    for _ in range(3):
        planned = one.choose([row])
    assert planned.drafts == [[9, 8, 7, 6, 5]]


def test_prompts_are_indexed_in_slices() -> None:
    """However many prompts wait, a plan indexes a bounded part of them; decodes go first."""
    one = speculator()
    prompts = [drafting(one, list(range(5_000))) for _ in range(4)]
    proposers: list[Any] = [each.proposer for each in prompts if isinstance(each, NgramDraftState)]
    assert len(proposers) == len(prompts)
    before = [proposer.tokens_unindexed for proposer in proposers]
    one.index_prompts(prompts)
    after = [proposer.tokens_unindexed for proposer in proposers]
    assert 0 < sum(before) - sum(after) <= 512
    for _ in range(60):
        one.index_prompts(prompts)
    assert not any(proposer.tokens_unindexed for proposer in proposers)


def test_a_long_prompt_holds_up_no_other_sequence() -> None:
    """A row whose text is long is indexed by slices; one beside it is served at once."""
    one = speculator()
    long = DecodingRow(drafting(one, list(range(20_000))), 0, 1_000)
    short = DecodingRow(drafting(one, PERIOD * 9), 0, 1_000)
    for _ in range(3):
        planned = one.choose([long, short])
    assert planned.drafts == [[], [1, 2, 3, 4, 5]]


def test_what_became_of_drafts_is_counted() -> None:
    """Totals, per method, per position, and per sequence, ends inside a run included."""
    one = speculator()
    mine = drafting(one, PERIOD * 9)
    one.record_verification(mine, 3, 4, 4)
    one.record_verification(mine, 3, 2, 2)
    one.record_verification(mine, 4, 5, 2)
    assert (mine.accepted, mine.rejected) == (3 + 1 + 2, 0 + 2 + 2)
    assert one.counters.statistics() == [
        DraftStatistics(method="ngram", rows=3, proposed_at=[3, 3, 3, 1], accepted_at=[3, 2, 2, 1])
    ]
