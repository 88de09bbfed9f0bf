"""Measurements of drafts that ranks propose: rates by position, costs and reading."""

import pytest

from services.scheduler.batch.plan_builder import StepWork
from services.scheduler.batch.step_deadlines import StepDeadlines
from services.scheduler.batch.step_timing import StepTiming
from services.scheduler.speculation.costs import DecodeWork, StepCosts
from services.scheduler.speculation.counters import DraftCounters
from services.scheduler.speculation.model.reading_cost import ReadingCost
from services.scheduler.speculation.position_rates import PositionAcceptance, PositionRates
from shared import limits
from shared.configuration.settings import SchedulerConfig


def record_steps(costs: StepCosts, work: DecodeWork, period_ms: float, times: int = 20) -> None:
    """Record `times` steps of one kind that took `period_ms` each."""
    for _ in range(times):
        costs.record_step(work, period_ms, 0.0, was_held=False)


def position_gains(one: PositionAcceptance, count: int = 5) -> list[float]:
    """Return the expected tokens of each draft position."""
    found = [0.0] * count
    one.add_chances(found, 0, 0)
    return found


def test_draft_acceptance_rates_are_separate_for_each_position() -> None:
    """When only the first draft of each run is right, the second has a low chance."""
    one = PositionAcceptance(PositionRates())
    for _ in range(60):
        one.record_verification(4, 1)
    first, second, *_ = position_gains(one)
    assert first > 0.9
    assert second < 0.15


def test_acceptance_rates_of_positions_after_rejected_draft_stay_unchanged() -> None:
    """Behind the first rejected draft, no rate changes."""
    common = PositionRates()
    before = list(common.by_class)
    PositionAcceptance(common).record_verification(5, 0)
    assert common.by_class[0] < before[0]
    assert common.by_class[1:] == before[1:]


def test_new_sequence_starts_with_acceptance_rates_of_earlier_sequences() -> None:
    """A draft model that guesses nothing is detected once and not by each sequence again."""
    common = PositionRates()
    for _ in range(10):
        one = PositionAcceptance(common)
        for _ in range(4):
            one.record_verification(3, 0)
    assert position_gains(PositionAcceptance(common))[0] < 0.2


def test_accepted_first_drafts_raise_expected_acceptance_of_later_positions() -> None:
    """A sequence whose first drafts are better than others' gets longer runs at once."""
    common = PositionRates()
    for number in range(200):
        PositionAcceptance(common).record_verification(5, number % 5)
    one = PositionAcceptance(common)
    before = position_gains(one)[2]
    for _ in range(6):
        one.record_verification(1, 1)
    assert position_gains(one)[2] > 1.1 * before


def test_fading_moves_acceptance_rate_of_sequence_towards_common_rate() -> None:
    """Each fade, as before a trial of drafts, moves a sequence's acceptance rate towards the common
    rate."""
    common = PositionRates()
    one = PositionAcceptance(common)
    for _ in range(20):
        one.record_verification(1, 0)
    low = position_gains(one)[0]
    for _ in range(30):
        PositionAcceptance(common).record_verification(1, 1)
    for _ in range(3):
        one.fade()
    assert position_gains(one)[0] > low + 0.1


def test_step_costs_of_draft_methods_are_measured_separately() -> None:
    """The cost of n-gram drafts says nothing about a model's; plain steps are shared."""
    costs = StepCosts()
    record_steps(costs, DecodeWork(4, 1, 0), 10.0)
    record_steps(costs, DecodeWork(4, 6, 4, "ngram"), 11.0)
    record_steps(costs, DecodeWork(4, 6, 4, "draft_model"), 30.0)
    ngram, model = (costs.periods_ms(4, 4, method) for method in ("ngram", "draft_model"))
    assert ngram[0] == model[0] == pytest.approx(10.0)
    assert ngram[5] == pytest.approx(11.0, rel=0.05)
    assert model[5] == pytest.approx(30.0, rel=0.05)


def test_measured_cost_of_one_draft_count_predicts_other_counts() -> None:
    """Each draft costs a forward, and so does the one that reads the last draft."""
    costs = StepCosts()
    record_steps(costs, DecodeWork(1, 1, 0), 10.0)
    record_steps(costs, DecodeWork(1, 6, 1, "draft_model"), 22.5)
    periods = costs.periods_ms(1, 1, "draft_model")
    assert periods[1] == pytest.approx(10.5 + 2 * 2.0, rel=0.1)
    assert periods[8] == pytest.approx(10.5 + 9 * 2.0, rel=0.1)
    assert costs.draft_ms(1, "draft_model") == pytest.approx(2.0, rel=0.1)


def test_idle_time_after_verification_is_added_once_for_any_draft_count() -> None:
    """With distant ranks the wait is added once to the time of a step with any number of drafts."""
    costs = StepCosts()
    record_steps(costs, DecodeWork(1, 1, 0), 10.0)
    for number in range(20):
        costs.record_step(
            DecodeWork(1, 4, 1, "eagle"), 12.0, 20.0 if number else 0.0, was_held=False
        )
    periods = costs.periods_ms(1, 1, "eagle")
    assert periods[3] == pytest.approx(32.0, rel=0.05)
    assert periods[1] > 29.0
    assert periods[10] < 42.0


def test_draft_row_chunks_grow_twofold_at_most_within_stall_limit() -> None:
    """Chunks of a draft row at most double, shrink at once, and stay within the stall limit."""
    config = SchedulerConfig(decode_stall_ms=100.0, step_tokens_max=1_000)
    reading = ReadingCost(config)
    first = reading.tokens_max
    reading.record_step(first, 1, 1.0)
    assert reading.tokens_max == 2 * first
    for _ in range(5):
        reading.record_step(reading.tokens_max, 1, 0.01 * reading.tokens_max)
    assert reading.tokens_max == 1_000, "a step's budget of tokens holds"
    reading.record_step(1_000, 1, 200.0)
    assert reading.tokens_max == 250, "half of the allowed stall"
    assert ReadingCost(SchedulerConfig(step_tokens_max=16)).tokens_max == 16
    reading = ReadingCost(SchedulerConfig(decode_stall_ms=60_000.0))
    for _ in range(10):
        reading.record_step(reading.tokens_max, 1, 0.01 * reading.tokens_max)
    assert reading.tokens_max == limits.FORWARD_TOKENS_MAX, "a forward's budget holds"


def test_short_last_chunk_of_prompt_does_not_enlarge_next_chunk() -> None:
    """The short rest of a prompt takes little time and does not make chunks grow."""
    reading = ReadingCost(SchedulerConfig())
    before = reading.tokens_max
    reading.record_step(before // 4, 1, 0.1)
    assert reading.tokens_max == before


def test_first_step_of_each_draft_method_gets_longest_deadline() -> None:
    """It may compile kernels that n-gram verifications of that width have not compiled."""
    timing = StepTiming(100.0)
    timing.record_step(0, 2, 10.0)
    deadlines = StepDeadlines(timing, SchedulerConfig())
    ngram = StepWork(0, 0, 2, 2, 64, width=3)
    model = StepWork(0, 0, 2, 2, 64, width=3, method="draft_model")
    reading = StepWork(0, 0, 2, 2, 64, width=3, method="draft_model", read_tokens=100)
    most = deadlines.deadline_s(ngram)
    for work, follower in ((ngram, model), (model, reading)):
        deadlines.record_step(work)
        assert deadlines.deadline_s(work) < most
        assert deadlines.deadline_s(follower) == most


def test_drafts_are_counted_separately_by_method_and_position() -> None:
    """Rows, and drafts by position, are counted for each method."""
    counters = DraftCounters()
    counters.verified("ngram", 2, 2)
    counters.verified("eagle", 3, 1)
    eagle, ngram = counters.statistics()
    assert (eagle.method, ngram.method) == ("eagle", "ngram")
    assert (eagle.rows, ngram.rows) == (1, 1)
    assert (eagle.proposed, ngram.proposed) == (3, 2)
    assert (eagle.accepted, ngram.accepted) == (1, 2)
    assert (eagle.proposed_at, eagle.accepted_at) == ([1, 1, 1], [1, 0, 0])
    assert (ngram.proposed_at, ngram.accepted_at) == ([1, 1], [1, 1])
