"""Budget of prompt tokens in a step, without a scheduler."""

import pytest

from services.scheduler.batch.prompt_budget import PromptBudget
from services.scheduler.batch.step_timing import StepTiming
from shared import limits

FAR = 10**6


def _timing(costs: dict[int, float]) -> StepTiming:
    """Return step timing learnt from chunks of 1,000 tokens: position -> milliseconds per token."""
    timing = StepTiming(150.0)
    for position, token_ms in costs.items():
        timing.record_step(1_000, 0, 1_000 * token_ms, position)
    return timing


def test_step_takes_whole_prompts_until_last_one_is_cut_at_budget() -> None:
    """Whole prompts are taken while they fit; then one is cut on the grid, unless its part would be
    too short."""
    budget = PromptBudget(1_000, 0, StepTiming(150.0))

    assert budget.take(400, 0, FAR) == 400
    assert budget.take(300, 0, FAR) == 300
    assert not budget.defers(1_200, 0)
    assert budget.take(1_200, 0, FAR) == 256
    assert budget.defers(1_200, 0)


@pytest.mark.parametrize(("taken", "waits"), [(660, False), (670, True), (740, True)])
def test_prompt_that_next_step_can_take_whole_waits_when_a_third_of_budget_is_left(
    taken: int, waits: bool
) -> None:
    """Such a prompt, with an eighth more than a budget at most, is not cut to fill the last third
    of a step; a longer one is cut, as it is cut in any case."""
    budget = PromptBudget(1_000, 0, StepTiming(150.0))

    assert budget.take(taken, 0, FAR) == taken
    assert budget.defers(900, 0) is waits
    assert budget.defers(1_100, 0) is waits
    assert not budget.defers(1_200, 0)
    assert not budget.defers(200, 0)


def test_prompt_that_next_step_would_cut_too_does_not_wait() -> None:
    """A step takes no more of one prompt than a forward and an eighth, and the next one may have a
    smaller budget."""
    longest = limits.FORWARD_TOKENS_MAX * 9 // 8
    budget = PromptBudget(8_192, 0, StepTiming(150.0))
    assert [budget.take(2_100, 0, FAR) for _ in range(3)] == [2_100] * 3
    assert budget.defers(longest, 0)
    assert not budget.defers(longest + 1, 0)
    small = PromptBudget(8_192, 0, StepTiming(150.0), next_tokens=lambda _position: 1_024)
    assert [small.take(length, 0, FAR) for length in (2_200, 2_200, 2_200, 800)] == [
        *[2_200] * 3,
        800,
    ]
    assert small.defers(1_152, 0)
    assert not small.defers(1_153, 0)


def test_prompt_ending_within_an_eighth_over_budget_is_taken_whole() -> None:
    """A prompt may exceed the budget by an eighth once; further prompts share the remainder."""
    budget = PromptBudget(800, 0, StepTiming(150.0))

    assert budget.take(850, 0, FAR) == 850
    assert not budget.defers(50, 0)
    assert budget.take(50, 0, FAR) == 50
    assert budget.defers(1, 0)


def test_prompt_above_forward_limit_is_cut_and_fills_step_alone() -> None:
    """A long prompt is cut at the forward limit, and no other prompt uses the rest of the step."""
    budget = PromptBudget(4 * limits.FORWARD_TOKENS_MAX, 0, StepTiming(150.0))

    assert budget.take(3 * limits.FORWARD_TOKENS_MAX, 0, FAR) == limits.FORWARD_TOKENS_MAX
    assert budget.defers(limits.FORWARD_TOKENS_MAX, 0)


def test_next_prompt_fills_forward_of_prompt_that_stops_at_cache_boundary() -> None:
    """After a prompt that stops at a boundary, the next one takes what the grid permits of the rest
    of that forward, not of the whole step.
    """
    budget = PromptBudget(4 * limits.FORWARD_TOKENS_MAX, 0, StepTiming(150.0))

    assert budget.take(3 * limits.FORWARD_TOKENS_MAX, 0, 1_000) == 1_000
    assert budget.take(FAR, 0, FAR) == 1_024 <= limits.FORWARD_TOKENS_MAX - 1_000


def test_step_reads_fewer_tokens_at_deep_prompt_positions() -> None:
    """Beside the start of a prompt, fewer tokens are read of a prompt at a deep position."""
    budget = PromptBudget(2_000, 0, _timing({0: 0.1, 30_000: 0.2}))

    assert budget.take(500, 0, FAR) == 500
    assert budget.take(FAR, 30_000, FAR) == 720, "750 tokens, rounded down to a multiple of 256"
    assert budget.defers(FAR, 0)


def test_step_with_deep_prompt_takes_only_remaining_tokens_of_next_prompt() -> None:
    """Beside 500 tokens of a deep prompt, a step of 2,100 tokens takes only 1,600 of the next
    prompt, rounded down to the grid.
    """
    budget = PromptBudget(2_100, 30_000, _timing({0: 0.1, 30_000: 0.2}))

    assert budget.take(500, 30_000, FAR) == 500
    assert budget.take(FAR, 0, FAR) == 1_536


@pytest.mark.parametrize("tokens", [16, 17, 100, 8_192])
def test_step_takes_first_prompt_however_expensive_its_tokens_are(tokens: int) -> None:
    """The first prompt of a step is never refused, however expensive its tokens are."""
    budget = PromptBudget(tokens, 0, _timing({0: 0.001, 100_000: 100.0}))

    assert not budget.defers(FAR, 100_000)
    assert budget.take(FAR, 100_000, FAR) > 0


def test_fixed_grid_cuts_every_prompt_at_same_places_whatever_the_budget() -> None:
    """A first chunk exceeds a small budget; a later one waits for the next step instead."""
    for tokens in (40, 300, 5_000):
        budget = PromptBudget(tokens, 0, StepTiming(150.0), fixed_grid=True)
        assert not budget.defers(600, 0)
        assert budget.tokens_max(0) == 256
        assert budget.take(600, 0, FAR) == 256
        assert budget.defers(344, 256) == (tokens < 512)
    budget = PromptBudget(5_000, 256, StepTiming(150.0), fixed_grid=True)
    assert [budget.take(344, 256, FAR), budget.take(88, 512, FAR)] == [256, 88]
    assert budget.take(900, 100, FAR) == 156
