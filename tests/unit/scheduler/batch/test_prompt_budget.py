"""How many tokens of which prompts a step reads, without a scheduler."""

import pytest

from services.scheduler.batch.prompt_budget import PromptBudget
from services.scheduler.batch.step_timing import StepTiming
from shared import limits

FAR = 10**6


def _timing(costs: dict[int, float]) -> StepTiming:
    """Return what has been learnt of chunks of 1,000 tokens: depth -> milliseconds of a token."""
    timing = StepTiming(150.0)
    for position, token_ms in costs.items():
        timing.record_step(1_000, 0, 1_000 * token_ms, position)
    return timing


def test_prompts_are_taken_until_nothing_is_left() -> None:
    """Whole ones while they fit; then one is cut, unless that would be a scrap."""
    budget = PromptBudget(1_000, 0, StepTiming(150.0))

    assert budget.take(400, 0, FAR) == 400
    assert budget.take(300, 0, FAR) == 300
    assert not budget.would_cut_scrap(900, 0)
    assert budget.take(900, 0, FAR) == 300
    assert budget.would_cut_scrap(900, 0)


def test_a_rest_as_short_as_a_scrap_is_taken_along() -> None:
    """An eighth more, once: further short prompts come out of what is left of it."""
    budget = PromptBudget(800, 0, StepTiming(150.0))

    assert budget.take(850, 0, FAR) == 850
    assert not budget.would_cut_scrap(50, 0)
    assert budget.take(50, 0, FAR) == 50
    assert budget.would_cut_scrap(1, 0)


def test_no_forward_is_longer_than_it_may_be() -> None:
    """A long prompt is cut there, and what is left of the step is nobody's."""
    budget = PromptBudget(4 * limits.FORWARD_TOKENS_MAX, 0, StepTiming(150.0))

    assert budget.take(3 * limits.FORWARD_TOKENS_MAX, 0, FAR) == limits.FORWARD_TOKENS_MAX
    assert budget.would_cut_scrap(limits.FORWARD_TOKENS_MAX, 0)


def test_who_stops_at_a_border_leaves_the_rest_of_a_forward() -> None:
    """No more: else all who come later would be read before the next part of a long prompt."""
    budget = PromptBudget(4 * limits.FORWARD_TOKENS_MAX, 0, StepTiming(150.0))

    assert budget.take(3 * limits.FORWARD_TOKENS_MAX, 0, 1_000) == 1_000
    assert budget.take(FAR, 0, FAR) == limits.FORWARD_TOKENS_MAX - 1_000


def test_deep_tokens_count_for_what_they_take() -> None:
    """Beside the start of a prompt less is read of one that goes on far behind."""
    budget = PromptBudget(2_000, 0, _timing({0: 0.1, 30_000: 0.2}))

    assert budget.take(500, 0, FAR) == 500
    assert budget.take(FAR, 30_000, FAR) == 750
    assert budget.would_cut_scrap(FAR, 0)


def test_shallow_tokens_count_in_full() -> None:
    """Beside a deep prompt no more tokens are read than a step may have."""
    budget = PromptBudget(2_000, 30_000, _timing({0: 0.1, 30_000: 0.2}))

    assert budget.take(500, 30_000, FAR) == 500
    assert budget.take(FAR, 0, FAR) == 1_500


@pytest.mark.parametrize("tokens", [16, 17, 100, 8_192])
def test_somebody_is_always_read(tokens: int) -> None:
    """However dear tokens are where the others go on, a whole budget is never refused to them."""
    budget = PromptBudget(tokens, 0, _timing({0: 0.001, 100_000: 100.0}))

    assert not budget.would_cut_scrap(FAR, 100_000)
    assert budget.take(FAR, 100_000, FAR) > 0
