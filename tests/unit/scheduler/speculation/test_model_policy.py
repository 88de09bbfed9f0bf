"""What is learnt of drafts that ranks propose: rates by position, costs and reading."""

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


def learn(costs: StepCosts, shape: DecodeWork, period_ms: float, times: int = 20) -> None:
    for _ in range(times):
        costs.record_step(shape, period_ms, 0.0, was_held=False)


def gains(one: PositionAcceptance, count: int = 5) -> list[float]:
    found = [0.0] * count
    one.add_chances(found, 0, 0)
    return found


def test_rates_are_of_positions() -> None:
    """Drafts that come true only once per run are worth one, however good the first is."""
    one = PositionAcceptance(PositionRates())
    for _ in range(60):
        one.record_verification(4, 1)
    first, second, *_ = gains(one)
    assert first > 0.9
    assert second < 0.15


def test_what_was_not_reached_shows_nothing() -> None:
    """Behind the first rejected draft nobody knows what would have come."""
    common = PositionRates()
    before = list(common.by_class)
    PositionAcceptance(common).record_verification(5, 0)
    assert common.by_class[0] < before[0]
    assert common.by_class[1:] == before[1:]


def test_new_sequences_begin_with_what_all_have_shown() -> None:
    """A draft model that guesses nothing is found out once, not by each sequence again."""
    common = PositionRates()
    for _ in range(10):
        one = PositionAcceptance(common)
        for _ in range(4):
            one.record_verification(3, 0)
    assert gains(PositionAcceptance(common))[0] < 0.2


def test_a_good_text_is_good_at_all_positions() -> None:
    """A sequence whose first drafts fare better than others' is given longer runs at once."""
    common = PositionRates()
    for number in range(200):
        PositionAcceptance(common).record_verification(5, number % 5)
    one = PositionAcceptance(common)
    before = gains(one)[2]
    for _ in range(6):
        one.record_verification(1, 1)
    assert gains(one)[2] > 1.1 * before


def test_old_news_fades() -> None:
    """Before a probe a sequence's own past counts for half."""
    common = PositionRates()
    one = PositionAcceptance(common)
    for _ in range(20):
        one.record_verification(1, 0)
    low = gains(one)[0]
    for _ in range(30):
        PositionAcceptance(common).record_verification(1, 1)
    for _ in range(3):
        one.fade()
    assert gains(one)[0] > low + 0.1


def test_costs_are_kept_apart_by_method() -> None:
    """What n-grams' drafts cost says nothing of a model's; plain steps are the same."""
    costs = StepCosts()
    learn(costs, DecodeWork(4, 1, 0), 10.0)
    learn(costs, DecodeWork(4, 6, 4, "ngram"), 11.0)
    learn(costs, DecodeWork(4, 6, 4, "draft_model"), 30.0)
    ngram, model = (costs.periods_ms(4, 4, method) for method in ("ngram", "draft_model"))
    assert ngram[0] == model[0] == pytest.approx(10.0)
    assert ngram[5] == pytest.approx(11.0, rel=0.05)
    assert model[5] == pytest.approx(30.0, rel=0.05)


def test_a_measured_width_tells_of_the_others() -> None:
    """Each draft costs a forward, and so does the one more that reads the last of them."""
    costs = StepCosts()
    learn(costs, DecodeWork(1, 1, 0), 10.0)
    learn(costs, DecodeWork(1, 6, 1, "draft_model"), 22.5)
    periods = costs.periods_ms(1, 1, "draft_model")
    assert periods[1] == pytest.approx(10.5 + 2 * 2.0, rel=0.1)
    assert periods[8] == pytest.approx(10.5 + 9 * 2.0, rel=0.1)
    assert costs.draft_ms(1, "draft_model") == pytest.approx(2.0, rel=0.1)


def test_the_wait_after_a_verification_is_no_drafts_cost() -> None:
    """Where ranks are far away it is the wait that drafts cost, whatever their number."""
    costs = StepCosts()
    learn(costs, DecodeWork(1, 1, 0), 10.0)
    for number in range(20):
        costs.record_step(
            DecodeWork(1, 4, 1, "eagle"), 12.0, 20.0 if number else 0.0, was_held=False
        )
    periods = costs.periods_ms(1, 1, "eagle")
    assert periods[3] == pytest.approx(32.0, rel=0.05)
    assert periods[1] > 29.0
    assert periods[10] < 42.0


def test_pieces_follow_what_reading_takes() -> None:
    """They grow twofold at the most, shrink at once, and never hold a step up for long."""
    config = SchedulerConfig(decode_stall_ms=100.0, step_tokens_max=1_000)
    reading = ReadingCost(config)
    first = reading.tokens_max
    reading.record_step(first, 1, 1.0)
    assert reading.tokens_max == 2 * first
    for _ in range(5):
        reading.record_step(reading.tokens_max, 1, 0.01 * reading.tokens_max)
    assert reading.tokens_max == 1_000, "a step's budget of tokens holds"
    reading.record_step(1_000, 1, 200.0)
    assert reading.tokens_max == 250, "half of what may stall"
    assert ReadingCost(SchedulerConfig(step_tokens_max=16)).tokens_max == 16
    reading = ReadingCost(SchedulerConfig(decode_stall_ms=60_000.0))
    for _ in range(10):
        reading.record_step(reading.tokens_max, 1, 0.01 * reading.tokens_max)
    assert reading.tokens_max == limits.FORWARD_TOKENS_MAX, "a forward's budget holds"


def test_a_small_piece_does_not_say_how_large_one_may_be() -> None:
    """The rest of a prompt takes little time and does not make pieces grow."""
    reading = ReadingCost(SchedulerConfig())
    before = reading.tokens_max
    reading.record_step(before // 4, 1, 0.1)
    assert reading.tokens_max == before


def test_the_first_step_of_a_method_has_the_most_time() -> None:
    """It may compile kernels; n-grams' verifications of that width have not shown it."""
    timing = StepTiming(100.0)
    timing.record_step(0, 2, 10.0)
    deadlines = StepDeadlines(timing)
    ngram = StepWork(0, 0, 2, 2, 64, width=3)
    model = StepWork(0, 0, 2, 2, 64, width=3, method="draft_model")
    reading = StepWork(0, 0, 2, 2, 64, width=3, method="draft_model", read_tokens=100)
    most = deadlines.deadline_s(ngram)
    for shape, follower in ((ngram, model), (model, reading)):
        deadlines.record_step(shape)
        assert deadlines.deadline_s(shape) < most
        assert deadlines.deadline_s(follower) == most


def test_methods_are_counted_apart() -> None:
    """Rows, and drafts by position, of each method."""
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
