"""Checks of the number of prompt tokens in a plan."""

from collections.abc import Iterable

from services.scheduler.speculation.model.model_drafts import UNREAD_SMALL
from shared import limits
from shared.messages import StepPlan

FORWARD_LIMITS = [24, 64, limits.FORWARD_TOKENS_MAX]
"""Limits of tokens per forward that runs use in turn; the prompts are shorter than the real
limit."""


def check_plan_sizes(plans: Iterable[StepPlan], step_tokens_max: int) -> None:
    """Check that no step and no forward reads more than its limit plus an eighth.

    A draft model always reads up to `UNREAD_SMALL` tokens at once, which is less than the real
    limit.
    """
    forward = limits.FORWARD_TOKENS_MAX
    for plan in plans:
        lengths = [chunk.length for chunk in plan.prefill_chunks]
        assert max(lengths, default=0) <= forward + forward // 8, plan
        assert sum(lengths) <= step_tokens_max + min(step_tokens_max, forward) // 8, plan
        assert all(
            len(chunk.tokens) <= max(forward, UNREAD_SMALL) for chunk in plan.draft_chunks
        ), plan
