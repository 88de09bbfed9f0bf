"""Acceptance rates, step costs, and the choice of drafts that follows from both."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.scheduler.speculation.costs import WIDTHS, DecodeWork, StepCosts
from services.scheduler.speculation.ngram.acceptance import (
    CLASSES,
    AcceptanceRates,
    SequenceAcceptance,
    class_of,
)
from services.scheduler.speculation.policy import (
    PLAIN_STEP,
    Candidate,
    DraftChoice,
    can_pay,
    choose,
    count_worth_sending,
)
from shared import limits

FREE = [10.0] * WIDTHS
EXPENSIVE = [10.0 * width for width in range(1, WIDTHS + 1)]


def acceptance(rate: float) -> SequenceAcceptance:
    """Return a sequence with the same acceptance rate for all matches."""
    sequence_acceptance = SequenceAcceptance(AcceptanceRates())
    sequence_acceptance.rates = [rate] * CLASSES
    return sequence_acceptance


def record_steps(
    costs: StepCosts, rows: int, width: int, period_ms: float, times: int = 20
) -> None:
    """Record `times` steps of one kind that took `period_ms` each."""
    for _ in range(times):
        costs.record_step(DecodeWork(rows, width, rows), period_ms, 0.0, was_held=False)


# --- acceptance -----------------------------------------------------------------------------------


def test_longer_ngram_match_never_gets_lower_acceptance_class() -> None:
    """Every match length has a class, which grows with the length."""
    classes = [class_of(matched) for matched in range(2, 100)]
    assert classes == sorted(classes)
    assert set(classes) == set(range(CLASSES))


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.75])
def test_estimated_acceptance_rate_approaches_share_of_accepted_drafts_of_its_sequence(
    share: float,
) -> None:
    """A sequence's rate approaches its own share of hits; new sequences begin near it."""
    common = AcceptanceRates()
    sequence_acceptance = SequenceAcceptance(common)
    for number in range(200):
        sequence_acceptance.record(5, number % 4 < 4 * share)
    assert abs(sequence_acceptance.rates[class_of(5)] - share) < 0.15
    assert abs(SequenceAcceptance(common).rates[class_of(5)] - share) < 0.25, (
        "new sequences begin near the common rate"
    )


def test_acceptance_rate_falls_after_own_misses_despite_hits_of_others() -> None:
    """After a few misses a sequence's rate is low although other sequences accept all drafts."""
    common = AcceptanceRates()
    for _ in range(1_000):
        common.record(3, hit=True)
    sequence_acceptance = SequenceAcceptance(common)
    assert sequence_acceptance.rates[3] > 0.9
    for _ in range(8):
        sequence_acceptance.record(7, hit=False)
    assert sequence_acceptance.rates[3] < 0.35


def test_gain_of_nth_draft_is_chance_that_first_n_are_accepted() -> None:
    """The n-th draft brings a token only when all drafts before it are right, unknown ones
    included."""
    gains = [0.0] * 4
    acceptance(0.5).add_chances(gains, 3, 0)
    assert gains == [0.5, 0.25, 0.125, 0.0625]
    acceptance(0.5).add_chances(gains, 3, 1)
    assert gains == [0.75, 0.375, 0.1875, 0.09375]


# --- costs ----------------------------------------------------------------------------------------


def test_draft_costs_are_unknown_until_plain_step_is_measured() -> None:
    """Drafts cannot be weighed before plain steps were measured."""
    costs = StepCosts()
    assert costs.periods_ms(4, 4) == [0.0] * WIDTHS
    record_steps(costs, 4, 3, 10.0)
    assert costs.periods_ms(4, 4) == [0.0] * WIDTHS


def test_step_time_is_interpolated_between_measured_draft_counts() -> None:
    """A measured width costs its measured time, and widths between lie between."""
    costs = StepCosts()
    record_steps(costs, 4, 1, 10.0)
    record_steps(costs, 4, 5, 30.0)
    periods = costs.periods_ms(4, 4)
    assert periods[0] == pytest.approx(10.0)
    assert periods[4] == pytest.approx(30.0)
    assert 10.0 < periods[2] < 30.0
    assert periods[8] > 45.0, "the cost continues with the same slope"


@example([(1, 1, 1.0, 0.0, False), (1, 2, 0.0, 0.0, False), (1, 2, 0.0, 0.0, False)])
@example([(1, 1, 0.0, 0.0, False), (1, 3, 1e4, 1e3, False), (1, 1, 5e-324, 0.0, False)])
@given(
    st.lists(
        st.tuples(
            st.integers(0, 4), st.integers(1, 17), st.floats(0, 1e4), st.floats(0, 1e3),
            st.booleans(),
        ),
        max_size=60,
    )
)  # fmt: skip
def test_predicted_step_time_never_falls_with_more_drafts(
    steps: list[tuple[int, int, float, float, bool]],
) -> None:
    """For any measurements periods grow with the number of drafts and are finite."""
    costs = StepCosts()
    for rows, width, busy_ms, idle_ms, was_held in steps:
        costs.record_step(DecodeWork(rows, width, rows), busy_ms, idle_ms, was_held=was_held)
    for rows in range(1, 8):
        periods = costs.periods_ms(rows, rows)
        assert len(periods) == limits.DRAFT_TOKENS_MAX + 1
        assert all(left <= right * (1 + 1e-9) for left, right in itertools.pairwise(periods))
        assert all(0.0 <= period < 1e9 for period in periods)


def test_idle_time_after_verification_counts_as_cost_of_verification() -> None:
    """The idle time after a step with drafts belongs to its period and not to the next one's."""
    costs = StepCosts()
    record_steps(costs, 1, 1, 10.0)
    costs.record_step(DecodeWork(1, 4, 1), 11.0, 2.0, was_held=True)
    for _ in range(20):
        costs.record_step(DecodeWork(1, 4, 1), 11.0, 2.0, was_held=False)
    costs.record_step(DecodeWork(1, 1, 1), 12.0, 2.0, was_held=False)
    costs.record_step(DecodeWork(0, 1, 0), 100.0, 0.0, was_held=False)
    assert costs.periods_ms(1, 1)[3] == pytest.approx(13.0, rel=0.05)
    assert costs.periods_ms(1, 1)[0] == pytest.approx(10.0), (
        "a step whose graph was not hidden does not count"
    )


def test_idle_time_before_plan_that_waited_counts_as_cost_of_starting_drafts() -> None:
    """The idle time before a plan that waited for results counts as a cost of switching from plain
    steps to drafts.
    """
    costs = StepCosts()
    record_steps(costs, 1, 1, 10.0)
    before = costs.switch_ms
    for _ in range(10):
        costs.record_step(DecodeWork(1, 4, 1), 11.0, 5.0, was_held=True)
        record_steps(costs, 1, 1, 10.0, times=3)
    assert costs.periods_ms(1, 1)[0] == pytest.approx(10.0)
    assert costs.switch_ms > before + 2.0


def test_extra_time_of_plain_step_after_drafts_counts_as_switching_cost() -> None:
    """The extra time of a plain step after drafts, whose graph was not built in advance, counts as
    a cost of switching."""
    costs = StepCosts()
    record_steps(costs, 1, 1, 10.0)
    before = costs.switch_ms
    for _ in range(10):
        costs.record_step(DecodeWork(1, 4, 1), 11.0, 0.5, was_held=True)
        costs.record_step(DecodeWork(1, 1, 1), 15.0, 0.0, was_held=False)
        record_steps(costs, 1, 1, 10.0, times=3)
    assert costs.switch_ms > before + 3.0


def test_measured_step_cost_rises_after_several_slow_steps_not_one() -> None:
    """One slow step of a known width changes nothing; several in a row do."""
    costs = StepCosts()
    record_steps(costs, 2, 1, 10.0)
    record_steps(costs, 2, 4, 12.0)
    record_steps(costs, 2, 4, 9_000.0, times=1)
    record_steps(costs, 2, 4, 12.0, times=1)
    assert costs.periods_ms(2, 2)[3] < 13.0
    record_steps(costs, 2, 4, 90.0, times=4)
    assert costs.periods_ms(2, 2)[3] > 80.0


def test_speculation_ends_after_repeated_slow_steps_not_after_first() -> None:
    """A kernel compiled at its first use does not end speculation; more slow steps do."""
    costs = StepCosts()
    record_steps(costs, 2, 1, 10.0)
    costs.record_step(DecodeWork(2, 4, 2), 9_000.0, 0.0, was_held=False)
    costs.record_step(DecodeWork(2, 4, 2), 9_000.0, 0.0, was_held=False)
    assert costs.periods_ms(2, 2)[3] < 20.0
    record_steps(costs, 2, 4, 90.0, times=3)
    assert costs.periods_ms(2, 2)[3] > 80.0


def test_faster_plain_steps_replace_time_of_slow_first_one() -> None:
    """Plain steps that are far faster than the first one replace its time at once."""
    costs = StepCosts()
    costs.record_step(DecodeWork(2, 1, 2), 9_000.0, 0.0, was_held=False)
    record_steps(costs, 2, 1, 10.0, times=3)
    assert costs.periods_ms(2, 2)[0] == pytest.approx(10.0)


def test_verification_faster_than_plain_step_lowers_plain_step_time() -> None:
    """More tokens never take less time, so a faster step with drafts lowers the plain step's
    time."""
    costs = StepCosts()
    record_steps(costs, 1, 1, 40.0)
    record_steps(costs, 1, 3, 12.0)
    assert costs.periods_ms(1, 1)[0] <= 12.0


def test_expensive_draft_count_is_tried_again_after_thousands_of_steps() -> None:
    """The measured cost of a width fades after thousands of steps without it."""
    costs = StepCosts()
    record_steps(costs, 2, 1, 10.0)
    record_steps(costs, 2, 4, 50.0)
    record_steps(costs, 2, 1, 10.0, times=1_000)
    assert costs.periods_ms(2, 2)[3] > 40.0
    record_steps(costs, 2, 1, 10.0, times=4_000)
    assert costs.periods_ms(2, 2)[3] < 15.0


def test_new_row_count_starts_with_costs_of_nearest_row_count() -> None:
    """A batch that has grown by one row does not try expensive drafts anew."""
    costs = StepCosts()
    record_steps(costs, 7, 1, 10.0)
    record_steps(costs, 7, 4, 50.0)
    periods = costs.periods_ms(8, 8)
    assert periods[3] / periods[0] == pytest.approx(5.0, rel=0.05)


def test_step_with_drafts_for_few_rows_has_own_measured_cost() -> None:
    """Ranks may compute few rows with drafts separately, so that cost is measured separately."""
    costs = StepCosts()
    record_steps(costs, 8, 1, 10.0)
    record_steps(costs, 8, 6, 50.0)
    assert costs.periods_ms(8, 1)[5] == pytest.approx(50.0), "no better measurement exists"
    for _ in range(20):
        costs.record_step(DecodeWork(8, 6, 1), 14.0, 0.0, was_held=False)
    assert costs.periods_ms(8, 1)[5] == pytest.approx(14.0, rel=0.05)
    assert costs.periods_ms(8, 8)[5] == pytest.approx(50.0, rel=0.05)


def test_step_with_prefill_changes_no_decode_cost() -> None:
    """The time of a prompt chunk is not the cost of a decode."""
    costs = StepCosts()
    record_steps(costs, 2, 1, 10.0)
    record_steps(costs, 0, 1, 500.0)
    assert costs.periods_ms(2, 2)[0] == pytest.approx(10.0)


# --- choice ---------------------------------------------------------------------------------------


def run_chances(rate: float, drafts: int) -> list[float]:
    """Return the chance of each run of drafts, without negligible ones."""
    return [rate**n for n in range(1, drafts + 1) if rate**n >= 0.005]


def chosen(
    rates: list[float],
    rows: int,
    periods: list[float],
    *,
    lag: int = 0,
    most: int = 16,
    switch_ms: float = 0.0,
    verified: int = 0,
) -> DraftChoice:
    candidates = [Candidate(acceptance(rate), 5, lag, most) for rate in rates]
    return choose(candidates, rows, periods, switch_ms, verified)


def test_all_allowed_drafts_are_sent_when_more_tokens_cost_nothing() -> None:
    """Where further tokens cost nothing, all allowed drafts are sent."""
    assert chosen([0.9], 1, FREE, most=5).drafts == 5


def test_no_drafts_are_sent_when_each_costs_a_step() -> None:
    """Where k drafts cost k steps none is sent, however likely they are."""
    assert chosen([0.98] * 4, 4, EXPENSIVE) == PLAIN_STEP


def test_drafts_are_not_sent_when_cost_exceeds_expected_gain() -> None:
    """Where drafts cost a little, their expected gain must be higher."""
    slightly_dear = [10.0 + 0.5 * drafts for drafts in range(WIDTHS)]
    assert chosen([0.03], 1, slightly_dear) == PLAIN_STEP
    assert 1 <= chosen([0.5], 1, slightly_dear).drafts <= 5
    assert chosen([0.95], 1, slightly_dear).drafts >= 8


@given(
    st.lists(st.floats(0.01, 0.98), min_size=1, max_size=6),
    st.integers(0, 6),
    st.floats(0.0, 2.0),
)
def test_chosen_draft_count_maximises_expected_tokens_per_millisecond(
    rates: list[float], others: int, slope: float
) -> None:
    """No other number of drafts promises more tokens per millisecond, and none is chosen that
    loses."""
    rows = len(rates) + others
    periods = [10.0 * (1.0 + slope * drafts) for drafts in range(WIDTHS)]
    gained = [
        (rows + sum(sum(run_chances(rate, k)) for rate in rates)) / periods[k]
        for k in range(WIDTHS)
    ]
    choice = chosen(rates, rows, periods)
    assert not choice.waits_for_results
    if choice.drafts:
        assert gained[choice.drafts] == pytest.approx(max(gained))
        assert gained[choice.drafts] > gained[0]
    else:
        assert max(gained) <= gained[0] * 1.031


def test_row_sends_only_drafts_whose_chance_exceeds_their_cost() -> None:
    """In a batch with drafts, a row sends only drafts whose chance exceeds their own cost."""
    expensive = [10.0, *(12.0 + 2.0 * drafts for drafts in range(1, WIDTHS))]
    choice = chosen([0.95] * 4, 4, expensive)
    assert count_worth_sending(acceptance(0.95), 5, 5, choice.chance_min) >= 3
    assert count_worth_sending(acceptance(0.03), 5, 5, choice.chance_min) == 0
    free = chosen([0.95] * 4, 4, FREE)
    assert count_worth_sending(acceptance(0.3), 5, 5, free.chance_min) == 3


def test_large_batch_sends_no_drafts_although_single_row_would() -> None:
    """Rows are padded, so one row's drafts cost time for all rows."""
    periods = [10.0 + 2.0 * drafts for drafts in range(WIDTHS)]
    assert chosen([0.95], 1, periods).drafts > 0
    assert chosen([0.95], 16, periods) == PLAIN_STEP


def test_plan_waits_for_results_only_when_drafts_gain_more_than_wait() -> None:
    """Drafts need known tokens: a plan waits when one verification gains more than the wait
    costs."""
    assert chosen([0.9], 1, FREE, lag=1, switch_ms=2.0) == DraftChoice(waits_for_results=True)
    assert chosen([0.9], 1, FREE, lag=1, switch_ms=80.0) == PLAIN_STEP
    assert chosen([0.3], 1, FREE, lag=1, switch_ms=2.0) == PLAIN_STEP


def test_plain_step_is_run_periodically_while_drafts_gain() -> None:
    """Even while drafts pay, a plain step is made now and then to keep the comparison current."""
    assert chosen([0.5], 1, FREE, most=2, verified=255).drafts
    assert chosen([0.5], 1, FREE, most=2, verified=256) == PLAIN_STEP
    assert chosen([0.9], 1, FREE, verified=256).drafts
    assert chosen([0.9], 1, FREE, verified=1_024) == PLAIN_STEP


def test_drafts_that_would_slow_decoding_even_if_accepted_are_not_computed() -> None:
    """If even fully accepted drafts would slow the decoding, no drafts are computed."""
    assert can_pay(4, 4, 5, FREE)
    assert not can_pay(4, 4, 16, EXPENSIVE)
    assert not can_pay(1, 64, 5, [10.0 + 2.0 * drafts for drafts in range(WIDTHS)])
    assert can_pay(1, 1, 5, [0.0] * WIDTHS), "unknown yet"
