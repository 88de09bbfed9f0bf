"""Speculation for the running batch: which rows get drafts, how many, and the counters."""

import pytest

from services.scheduler.speculation.costs import DecodeWork
from services.scheduler.speculation.ngram.proposer import NgramProposer
from services.scheduler.speculation.sequence_drafts import (
    DecodingRow,
    DraftState,
    NgramDraftState,
)
from services.scheduler.speculation.speculator import Speculator
from shared.configuration.settings import SpeculationConfig
from shared.messages import DraftStatistics, Speculation

PERIOD = [1, 2, 3, 4, 5, 6]


def measured_speculator(
    *, tokens_max: int = 5, disable_above_sequences: int = 0, is_measured: bool = True
) -> Speculator:
    """Return a speculator on a device whose drafts cost nothing."""
    speculator = Speculator(
        SpeculationConfig(
            method="ngram", tokens_max=tokens_max, disable_above_sequences=disable_above_sequences
        )
    )
    if is_measured:
        for rows in range(1, 9):
            for _ in range(4):
                speculator.record_step(DecodeWork(rows, 1, 0), 10.0, 0.0, was_held=False)
    return speculator


def new_drafts(speculator: Speculator, tokens: list[int], tokens_max: int = 0) -> DraftState:
    found = speculator.new_draft_state(tokens, Speculation(tokens=tokens_max))
    assert found is not None
    return found


def test_server_with_speculation_off_gives_drafts_only_to_requests_naming_ngrams() -> None:
    """A server without speculation gives drafts only to requests that name n-grams."""
    off = Speculator(SpeculationConfig())
    for method in ("default", "off", "draft_model", "eagle"):
        assert off.new_draft_state([1], Speculation(method=method)) is None
    assert off.new_draft_state([1], Speculation(method="ngram")) is not None


@pytest.mark.parametrize(
    ("method", "is_allowed"),
    [("default", True), ("ngram", True), ("off", False), ("draft_model", False), ("eagle", False)],
)
def test_request_for_unconfigured_method_gets_no_draft_state(method: str, is_allowed: bool) -> None:
    """A method that the server does not have is off."""
    wish = Speculation(method=method)  # type: ignore[arg-type]
    found = measured_speculator().new_draft_state([1], wish)
    assert (found is not None) == is_allowed


@pytest.mark.parametrize(("asked", "tokens_max"), [(0, 5), (2, 2), (5, 5), (16, 5)])
def test_request_gets_smaller_of_own_and_server_draft_limit(asked: int, tokens_max: int) -> None:
    """The server's limit holds for all requests, and a request's own limit below it."""
    speculator = measured_speculator()
    row = DecodingRow(new_drafts(speculator, PERIOD * 9, tokens_max=asked), 0, 1_000)
    assert [len(drafts) for drafts in speculator.choose([row]).drafts] == [tokens_max]


def test_row_with_ngram_match_gets_its_continuation_as_drafts() -> None:
    """Rows with a match get its continuation; other rows of the plan get none."""
    speculator = measured_speculator()
    rows = [
        DecodingRow(new_drafts(speculator, PERIOD * 9), 0, 1_000),
        DecodingRow(None, 0, 1_000),
        DecodingRow(new_drafts(speculator, list(range(100))), 0, 1_000),
    ]
    planned = speculator.choose(rows)
    assert planned.drafts == [[1, 2, 3, 4, 5], [], []]
    assert planned.decode_work(3) == DecodeWork(3, 6, 1)


def test_row_without_ngram_match_is_planned_as_step_without_drafts() -> None:
    """A row without a match is planned as a step of one token that waits for no results."""
    speculator = measured_speculator()
    planned = speculator.choose([DecodingRow(new_drafts(speculator, list(range(100))), 0, 1_000)])
    assert (planned.drafts, planned.waits_for_results) == ([], False)
    assert planned.decode_work(1) == DecodeWork(1, 1, 0)
    assert speculator.choose([]).drafts == []


@pytest.mark.parametrize(("left", "drafts"), [(1, 0), (2, 1), (3, 2), (6, 5), (7, 5)])
def test_drafts_leave_room_for_one_token_before_length_limit(left: int, drafts: int) -> None:
    """A verification brings one token more than its drafts, and none exceeds the longest length."""
    speculator = measured_speculator()
    planned = speculator.choose([DecodingRow(new_drafts(speculator, PERIOD * 9), 0, left)])
    assert planned.decode_work(1).width == drafts + 1


def test_each_row_keeps_own_draft_limit_beside_row_with_more() -> None:
    """The widest row's drafts do not make others exceed their end or their request."""
    speculator = measured_speculator()
    rows = [
        DecodingRow(new_drafts(speculator, PERIOD * 9), 0, 1_000),
        DecodingRow(new_drafts(speculator, PERIOD * 9), 0, 3),
        DecodingRow(new_drafts(speculator, PERIOD * 9, tokens_max=1), 0, 1_000),
        DecodingRow(new_drafts(speculator, PERIOD * 9), 0, 1),
    ]
    assert [len(drafts) for drafts in speculator.choose(rows).drafts] == [5, 2, 1, 0]


def test_row_with_tokens_in_flight_gets_no_drafts() -> None:
    """Drafts need known tokens, also where other rows of the plan have drafts."""
    speculator = measured_speculator()
    rows = [
        DecodingRow(new_drafts(speculator, PERIOD * 9), 0, 1_000),
        DecodingRow(new_drafts(speculator, PERIOD * 9), 1, 2),
    ]
    assert speculator.choose(rows).drafts == [[1, 2, 3, 4, 5], []]


def test_plan_with_possible_drafts_waits_for_results_of_running_step() -> None:
    """A plan that may have drafts waits for the results of the running step, and only for them."""
    speculator = measured_speculator()
    tokens = PERIOD * 9
    draft_state = new_drafts(speculator, tokens)
    assert speculator.choose([DecodingRow(draft_state, 1, 1_000)]).waits_for_results
    tokens.append(1)
    planned = speculator.choose([DecodingRow(draft_state, 0, 999)])
    assert planned.drafts == [[2, 3, 4, 5, 6]]
    assert speculator.record_plan(planned), "the plan was held"
    assert not speculator.record_plan(planned)
    assert speculator.counters.totals["held_plans_total"] == 1
    assert speculator.counters.totals["drafted_steps_total"] == 2


def test_plan_does_not_wait_for_sequence_that_running_step_ends() -> None:
    """A sequence that ends with the tokens of the running step makes no plan wait."""
    speculator = measured_speculator()
    assert not speculator.choose(
        [DecodingRow(new_drafts(speculator, PERIOD * 9), 1, 2)]
    ).waits_for_results


def test_no_drafts_are_sent_above_configured_batch_size() -> None:
    """`speculation.disable_above_sequences` holds for any measurement; 0 sets no limit."""
    for disable_above_sequences, has_drafts in ((0, True), (2, False), (3, True)):
        speculator = measured_speculator(disable_above_sequences=disable_above_sequences)
        rows = [DecodingRow(new_drafts(speculator, PERIOD * 9), 0, 1_000) for _ in range(3)]
        assert bool(speculator.choose(rows).drafts) == has_drafts


def test_new_batch_size_runs_plain_steps_before_first_drafts() -> None:
    """Plain steps of a new batch size are measured before drafts are sent."""
    speculator = measured_speculator()
    rows = [DecodingRow(new_drafts(speculator, PERIOD * 9), 0, 1_000) for _ in range(9)]
    assert speculator.choose(rows).drafts == []
    for _ in range(2):
        speculator.record_step(DecodeWork(9, 1, 0), 10.0, 0.0, was_held=False)
    assert len(speculator.choose(rows).drafts) == 9


def test_new_epoch_sends_no_drafts_until_plain_steps_are_measured_again() -> None:
    """A new epoch measures plain steps again before it sends drafts; texts stay indexed."""
    speculator = measured_speculator()
    row = DecodingRow(new_drafts(speculator, PERIOD * 9), 0, 1_000)
    assert speculator.choose([row]).drafts
    speculator.begin_epoch()
    assert speculator.choose([row]).drafts == []
    for _ in range(3):
        speculator.record_step(DecodeWork(1, 1, 0), 10.0, 0.0, was_held=False)
    assert speculator.choose([row]).drafts


def test_drafts_continue_text_that_grew_while_request_waited() -> None:
    """After a wait in the queue, or a new epoch, drafts continue the current text."""
    speculator = measured_speculator()
    tokens = PERIOD * 3
    row = DecodingRow(new_drafts(speculator, tokens), 0, 1_000)
    speculator.choose([row])
    tokens += [9, 8, 7, 6, 5, 4] * 30
    for _ in range(3):
        planned = speculator.choose([row])
    assert planned.drafts == [[9, 8, 7, 6, 5]]


def unindexed_tokens(proposer: NgramProposer) -> int:
    """Return the tokens of the text that are not indexed yet."""
    return max(index.tokens_unindexed for index in proposer._indexes)


def test_each_plan_indexes_bounded_number_of_prompt_tokens() -> None:
    """A plan indexes a bounded number of prompt tokens, however many prompts wait."""
    speculator = measured_speculator()
    prompts = [new_drafts(speculator, list(range(5_000))) for _ in range(4)]
    proposers = [each.proposer for each in prompts if isinstance(each, NgramDraftState)]
    assert len(proposers) == len(prompts)
    before = [unindexed_tokens(proposer) for proposer in proposers]
    speculator.index_prompts(prompts)
    after = [unindexed_tokens(proposer) for proposer in proposers]
    assert 0 < sum(before) - sum(after) <= 512
    for _ in range(60):
        speculator.index_prompts(prompts)
    assert not any(unindexed_tokens(proposer) for proposer in proposers)


def test_row_gets_drafts_while_long_text_of_other_row_is_indexed() -> None:
    """A row with a long text is indexed in slices; another row gets drafts meanwhile."""
    speculator = measured_speculator()
    long = DecodingRow(new_drafts(speculator, list(range(20_000))), 0, 1_000)
    short = DecodingRow(new_drafts(speculator, PERIOD * 9), 0, 1_000)
    for _ in range(3):
        planned = speculator.choose([long, short])
    assert planned.drafts == [[], [1, 2, 3, 4, 5]]


def test_accepted_drafts_are_counted_by_method_position_and_sequence() -> None:
    """Results are counted in total, by method, by position and by sequence, also for ends inside a
    run."""
    speculator = measured_speculator()
    draft_state = new_drafts(speculator, PERIOD * 9)
    speculator.record_verification(draft_state, 3, 4, 4)
    speculator.record_verification(draft_state, 3, 2, 2)
    speculator.record_verification(draft_state, 4, 5, 2)
    assert (draft_state.accepted, draft_state.rejected) == (3 + 1 + 2, 0 + 2 + 2)
    assert speculator.counters.statistics() == [
        DraftStatistics(method="ngram", rows=3, proposed_at=[3, 3, 3, 1], accepted_at=[3, 2, 2, 1])
    ]
