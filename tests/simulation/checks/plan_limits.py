"""How much of prompts a plan may hold."""

from collections.abc import Iterable

from services.scheduler.speculation.model.model_drafts import UNREAD_SMALL
from shared import limits
from shared.messages import StepPlan

FORWARDS = [24, 64, limits.FORWARD_TOKENS_MAX]
"""Tokens of a forward that runs are tried with, in turn: the real limit is longer than their
prompts."""


def check_sizes(plans: Iterable[StepPlan], step_tokens_max: int) -> None:
    """Fail where a step or one of its forwards reads more than it may, and an eighth.

    A draft model always reads what is `UNREAD_SMALL` at once: that is less than the real limit.
    """
    forward = limits.FORWARD_TOKENS_MAX
    for plan in plans:
        lengths = [chunk.length for chunk in plan.prefill_chunks]
        assert max(lengths, default=0) <= forward + forward // 8, plan
        assert sum(lengths) <= step_tokens_max + min(step_tokens_max, forward) // 8, plan
        assert all(
            len(chunk.tokens) <= max(forward, UNREAD_SMALL) for chunk in plan.draft_chunks
        ), plan
