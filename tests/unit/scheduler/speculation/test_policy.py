"""Acceptance, costs of steps, and the choice that follows from both."""

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
DEAR = [10.0 * width for width in range(1, WIDTHS + 1)]


def acceptance(rate: float) -> SequenceAcceptance:
    """Return one whose rate is the same for all matches."""
    one = SequenceAcceptance(AcceptanceRates())
    one.rates = [rate] * CLASSES
    return one


def learn(costs: StepCosts, rows: int, width: int, period_ms: float, times: int = 20) -> None:
    """Let steps of one shape take so long."""
    for _ in range(times):
        costs.record_step(DecodeWork(rows, width, rows), period_ms, 0.0, was_held=False)


# --- acceptance ------------------------------------------------------------------------------


def test_longer_matches_are_of_higher_classes() -> None:
    """All lengths have a class, rising with the length."""
    kinds = [class_of(matched) for matched in range(2, 100)]
    assert kinds == sorted(kinds)
    assert set(kinds) == set(range(CLASSES))


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.75])
def test_rates_follow_what_comes(share: float) -> None:
    """A sequence's rate comes near its own share of hits, whatever others do."""
    common = AcceptanceRates()
    one = SequenceAcceptance(common)
    for number in range(200):
        one.record(5, number % 4 < 4 * share)
    assert abs(one.rates[class_of(5)] - share) < 0.15
    assert abs(SequenceAcceptance(common).rates[class_of(5)] - share) < 0.25, (
        "new ones begin from it"
    )


def test_a_sequence_soon_goes_by_its_own_text() -> None:
    """What others accept does not keep one going whose drafts all fail."""
    common = AcceptanceRates()
    for _ in range(1_000):
        common.record(3, hit=True)
    one = SequenceAcceptance(common)
    assert one.rates[3] > 0.9
    for _ in range(8):
        one.record(7, hit=False)
    assert one.rates[3] < 0.35


def test_gains_are_chances_of_whole_runs() -> None:
    """The n-th draft brings a token only when those before it come true, unknown ones included."""
    gains = [0.0] * 4
    acceptance(0.5).add_chances(gains, 3, 0)
    assert gains == [0.5, 0.25, 0.125, 0.0625]
    acceptance(0.5).add_chances(gains, 3, 1)
    assert gains == [0.75, 0.375, 0.1875, 0.09375]


# --- costs -----------------------------------------------------------------------------------


def test_nothing_is_known_before_a_plain_step() -> None:
    """Drafts cannot be weighed before plain steps were measured."""
    costs = StepCosts()
    assert costs.periods_ms(4, 4) == [0.0] * WIDTHS
    learn(costs, 4, 3, 10.0)
    assert costs.periods_ms(4, 4) == [0.0] * WIDTHS


def test_measured_shapes_are_believed() -> None:
    """A shape costs what its steps have taken, and those between lie between."""
    costs = StepCosts()
    learn(costs, 4, 1, 10.0)
    learn(costs, 4, 5, 30.0)
    periods = costs.periods_ms(4, 4)
    assert periods[0] == pytest.approx(10.0)
    assert periods[4] == pytest.approx(30.0)
    assert 10.0 < periods[2] < 30.0
    assert periods[8] > 45.0, "what lies beyond goes on as steeply"


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
def test_more_drafts_never_cost_less(steps: list[tuple[int, int, float, float, bool]]) -> None:
    """Whatever was measured, periods rise with drafts and are numbers."""
    costs = StepCosts()
    for rows, width, busy_ms, idle_ms, was_held in steps:
        costs.record_step(DecodeWork(rows, width, rows), busy_ms, idle_ms, was_held=was_held)
    for rows in range(1, 8):
        periods = costs.periods_ms(rows, rows)
        assert len(periods) == limits.DRAFT_TOKENS_MAX + 1
        assert all(left <= right * (1 + 1e-9) for left, right in itertools.pairwise(periods))
        assert all(0.0 <= period < 1e9 for period in periods)


def test_waiting_after_a_verification_is_its_cost() -> None:
    """The idle time after a step with drafts is part of its period, and not of the next one's."""
    costs = StepCosts()
    learn(costs, 1, 1, 10.0)
    costs.record_step(DecodeWork(1, 4, 1), 11.0, 2.0, was_held=True)
    for _ in range(20):
        costs.record_step(DecodeWork(1, 4, 1), 11.0, 2.0, was_held=False)
    costs.record_step(DecodeWork(1, 1, 1), 12.0, 2.0, was_held=False)
    costs.record_step(DecodeWork(0, 1, 0), 100.0, 0.0, was_held=False)
    assert costs.periods_ms(1, 1)[3] == pytest.approx(13.0, rel=0.05)
    assert costs.periods_ms(1, 1)[0] == pytest.approx(10.0), (
        "its graph was not hidden: no usual one"
    )


def test_waiting_before_the_first_verification_is_a_turns_cost() -> None:
    """The idle time before a plan that was held is no plain step's cost."""
    costs = StepCosts()
    learn(costs, 1, 1, 10.0)
    before = costs.switch_ms
    for _ in range(10):
        costs.record_step(DecodeWork(1, 4, 1), 11.0, 5.0, was_held=True)
        learn(costs, 1, 1, 10.0, times=3)
    assert costs.periods_ms(1, 1)[0] == pytest.approx(10.0)
    assert costs.switch_ms > before + 2.0


def test_the_graph_after_a_verification_is_a_turns_cost() -> None:
    """What a plain step takes longer when nothing hid its making is paid by the turn."""
    costs = StepCosts()
    learn(costs, 1, 1, 10.0)
    before = costs.switch_ms
    for _ in range(10):
        costs.record_step(DecodeWork(1, 4, 1), 11.0, 0.5, was_held=True)
        costs.record_step(DecodeWork(1, 1, 1), 15.0, 0.0, was_held=False)
        learn(costs, 1, 1, 10.0, times=3)
    assert costs.switch_ms > before + 3.0


def test_a_shape_well_known_survives_one_slow_step() -> None:
    """An accident of a known shape changes nothing; two in a row do."""
    costs = StepCosts()
    learn(costs, 2, 1, 10.0)
    learn(costs, 2, 4, 12.0)
    learn(costs, 2, 4, 9_000.0, times=1)
    learn(costs, 2, 4, 12.0, times=1)
    assert costs.periods_ms(2, 2)[3] < 13.0
    learn(costs, 2, 4, 90.0, times=4)
    assert costs.periods_ms(2, 2)[3] > 80.0


def test_one_slow_step_is_an_accident() -> None:
    """A kernel compiled for its first use does not end speculation; two slow steps do."""
    costs = StepCosts()
    learn(costs, 2, 1, 10.0)
    costs.record_step(DecodeWork(2, 4, 2), 9_000.0, 0.0, was_held=False)
    costs.record_step(DecodeWork(2, 4, 2), 9_000.0, 0.0, was_held=False)
    assert costs.periods_ms(2, 2)[3] < 20.0
    learn(costs, 2, 4, 90.0, times=3)
    assert costs.periods_ms(2, 2)[3] > 80.0


def test_a_first_step_that_compiled_is_forgotten() -> None:
    """Plain steps that turn out far faster are believed at once."""
    costs = StepCosts()
    costs.record_step(DecodeWork(2, 1, 2), 9_000.0, 0.0, was_held=False)
    learn(costs, 2, 1, 10.0, times=3)
    assert costs.periods_ms(2, 2)[0] == pytest.approx(10.0)


def test_a_verification_faster_than_a_plain_step_corrects_that() -> None:
    """More tokens never take less time: the plain step was measured at a bad moment."""
    costs = StepCosts()
    learn(costs, 1, 1, 40.0)
    learn(costs, 1, 3, 12.0)
    assert costs.periods_ms(1, 1)[0] <= 12.0


def test_dear_shapes_are_forgotten_after_long() -> None:
    """What was dear thousands of steps ago is tried again."""
    costs = StepCosts()
    learn(costs, 2, 1, 10.0)
    learn(costs, 2, 4, 50.0)
    learn(costs, 2, 1, 10.0, times=1_000)
    assert costs.periods_ms(2, 2)[3] > 40.0
    learn(costs, 2, 1, 10.0, times=4_000)
    assert costs.periods_ms(2, 2)[3] < 15.0


def test_other_numbers_of_rows_begin_from_the_nearest() -> None:
    """A batch that has grown by one row does not try dear drafts anew."""
    costs = StepCosts()
    learn(costs, 7, 1, 10.0)
    learn(costs, 7, 4, 50.0)
    periods = costs.periods_ms(8, 8)
    assert periods[3] / periods[0] == pytest.approx(5.0, rel=0.05)


def test_a_few_rows_with_drafts_cost_otherwise_than_all() -> None:
    """Ranks may compute few rows with drafts apart: what that costs is measured by itself."""
    costs = StepCosts()
    learn(costs, 8, 1, 10.0)
    learn(costs, 8, 6, 50.0)
    assert costs.periods_ms(8, 1)[5] == pytest.approx(50.0), "nothing better is known"
    for _ in range(20):
        costs.record_step(DecodeWork(8, 6, 1), 14.0, 0.0, was_held=False)
    assert costs.periods_ms(8, 1)[5] == pytest.approx(14.0, rel=0.05)
    assert costs.periods_ms(8, 8)[5] == pytest.approx(50.0, rel=0.05)


def test_steps_with_chunks_teach_nothing() -> None:
    """A prompt's chunk in a step is not a decode's cost."""
    costs = StepCosts()
    learn(costs, 2, 1, 10.0)
    learn(costs, 0, 1, 500.0)
    assert costs.periods_ms(2, 2)[0] == pytest.approx(10.0)


# --- choice ----------------------------------------------------------------------------------


def chances(rate: float, drafts: int) -> list[float]:
    """Return the chance of each run of drafts, those that are negligible left out."""
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


def test_free_drafts_are_all_sent() -> None:
    """Where a token more costs nothing, as many go as may."""
    assert chosen([0.9], 1, FREE, most=5).drafts == 5


def test_dear_drafts_are_not_sent() -> None:
    """Where k drafts cost k steps none goes, however likely they are."""
    assert chosen([0.98] * 4, 4, DEAR) == PLAIN_STEP


def test_unlikely_drafts_are_not_sent() -> None:
    """Where drafts cost a little, they must bring more than that."""
    slightly_dear = [10.0 + 0.5 * drafts for drafts in range(WIDTHS)]
    assert chosen([0.03], 1, slightly_dear) == PLAIN_STEP
    assert 1 <= chosen([0.5], 1, slightly_dear).drafts <= 5
    assert chosen([0.95], 1, slightly_dear).drafts >= 8


@given(
    st.lists(st.floats(0.01, 0.98), min_size=1, max_size=6),
    st.integers(0, 6),
    st.floats(0.0, 2.0),
)
def test_the_best_cut_for_all_is_chosen(rates: list[float], others: int, slope: float) -> None:
    """No other number of drafts promises more tokens per millisecond, and none that loses is."""
    rows = len(rates) + others
    periods = [10.0 * (1.0 + slope * drafts) for drafts in range(WIDTHS)]
    gained = [
        (rows + sum(sum(chances(rate, k)) for rate in rates)) / periods[k] for k in range(WIDTHS)
    ]
    choice = chosen(rates, rows, periods)
    assert not choice.waits_for_results
    if choice.drafts:
        assert gained[choice.drafts] == pytest.approx(max(gained))
        assert gained[choice.drafts] > gained[0]
    else:
        assert max(gained) <= gained[0] * 1.031


def test_unlikely_drafts_of_a_row_stay_out_where_tokens_cost() -> None:
    """In a batch that is verified, a row sends only drafts that are worth their own cost."""
    dear = [10.0, *(12.0 + 2.0 * drafts for drafts in range(1, WIDTHS))]
    choice = chosen([0.95] * 4, 4, dear)
    assert count_worth_sending(acceptance(0.95), 5, 5, choice.chance_min) >= 3
    assert count_worth_sending(acceptance(0.03), 5, 5, choice.chance_min) == 0
    free = chosen([0.95] * 4, 4, FREE)
    assert count_worth_sending(acceptance(0.3), 5, 5, free.chance_min) == 3


def test_one_likely_row_does_not_widen_a_large_batch() -> None:
    """Rows are padded: what one gains is paid by all."""
    periods = [10.0 + 2.0 * drafts for drafts in range(WIDTHS)]
    assert chosen([0.95], 1, periods).drafts > 0
    assert chosen([0.95], 16, periods) == PLAIN_STEP


def test_plans_in_flight_are_waited_for_when_that_pays() -> None:
    """Drafts follow known tokens: worth a wait when one verification pays for it."""
    assert chosen([0.9], 1, FREE, lag=1, switch_ms=2.0) == DraftChoice(waits_for_results=True)
    assert chosen([0.9], 1, FREE, lag=1, switch_ms=80.0) == PLAIN_STEP
    assert chosen([0.3], 1, FREE, lag=1, switch_ms=2.0) == PLAIN_STEP


def test_plain_steps_are_measured_now_and_then() -> None:
    """Even while drafts pay, a plain step is made, so that what is compared stays true."""
    assert chosen([0.5], 1, FREE, most=2, verified=255).drafts
    assert chosen([0.5], 1, FREE, most=2, verified=256) == PLAIN_STEP
    assert chosen([0.9], 1, FREE, verified=256).drafts
    assert chosen([0.9], 1, FREE, verified=1_024) == PLAIN_STEP


def test_hopeless_batches_need_not_look() -> None:
    """Where even drafts that are all accepted would lose, nobody spends time on them."""
    assert can_pay(4, 4, 5, FREE)
    assert not can_pay(4, 4, 16, DEAR)
    assert not can_pay(1, 64, 5, [10.0 + 2.0 * drafts for drafts in range(WIDTHS)])
    assert can_pay(1, 1, 5, [0.0] * WIDTHS), "unknown yet"
