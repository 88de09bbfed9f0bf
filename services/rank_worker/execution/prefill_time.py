"""The time of a prefill, measured before a rank is ready.

From it the scheduler sizes the first chunks of prompts. Without it they begin small and double, and
on CUDA each new size delays the step by 45 to 90 ms, as MLX prepares attention for it.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

from services.rank_worker.execution.executor import Executor
from services.rank_worker.execution.warmup import (
    infinite_logits_refused,
    made_up_prompt,
    whole_prefill,
)
from shared import limits
from shared.clock import Clock
from shared.messages import Sampling, StepPlan

LENGTHS = (64, 256, 1_024)
"""Lengths of prompts in tokens, which are run in turn."""
_TOGETHER = 2
"""Prompts of the longest of these lengths that then run at once: they share a forward."""
LONG = limits.FORWARD_TOKENS_MAX * 9 // 8
"""Length of the prompt that runs last where kernels attend to shorter ones: MLX attends to it."""
BUDGET_S = 0.5
"""The next length is run if its expected time is not longer."""
_ROOM_TOKENS = 256
"""Tokens of a row beyond the prompt, as rows of real requests have."""


class PrefillTime(NamedTuple):
    """How long a device takes for a prompt."""

    tokens: int = 0
    """Length of the prompt; 0: nothing was measured."""
    milliseconds: float = 0.0
    """From the launch of its step until the device has finished."""


NOT_TIMED = PrefillTime()


def time_prefill(
    executor: Executor, clock: Clock, tokens_max: int, all_agree: Callable[[bool], bool] = bool
) -> PrefillTime:
    """Time prompts of growing length; return the time of the longest.

    Each length is run twice, as the first run compiles kernels. Then two prompts share a forward,
    and MLX attends to a long one, as both may need kernels of their own. All ranks call this at the
    same point, also those of a device that times nothing.

    Args:
        executor: warm and without sequences, before and after.
        clock: measures durations.
        tokens_max: longest prompt on this rank; 0: none is timed on any rank.
        all_agree: tells whether a statement holds on all ranks; a collective.

    Raises:
        ConfigError: the model's logits are not finite.
    """
    found = NOT_TIMED
    steps = itertools.count(1)
    for length in LENGTHS:
        expected_s = found.milliseconds / 1e3 * length / max(1, found.tokens)
        if not all_agree(length <= tokens_max and expected_s <= BUDGET_S):
            break
        for _ in range(2):
            with infinite_logits_refused():
                found = PrefillTime(length, _run_prompts(executor, clock, length, 1, steps))
    last_runs = [
        (_TOGETHER, found.tokens, executor.shares_forwards),
        (1, LONG, executor.store.prefills_in_place and found.tokens == LENGTHS[-1]),
    ]
    for count, length, is_useful in last_runs if found.tokens else ():
        if all_agree(is_useful and count * length <= tokens_max):
            with infinite_logits_refused():
                _run_prompts(executor, clock, length, count, steps)
    executor.restart_receipts()
    return found


def _run_prompts(
    executor: Executor, clock: Clock, length: int, count: int, steps: "itertools.count[int]"
) -> float:
    """Run `count` prompts in one step and drop them; return the milliseconds of the step."""
    sampling = Sampling(seed=1, temperature=0.0)
    sequences = [
        made_up_prompt(length, executor.vocab_size, slot + 1, slot, sampling)
        for slot in range(count)
    ]
    prefill = StepPlan(
        epoch=1,
        step_id=next(steps),
        deadline_s=0.0,
        row_count=count,
        row_tokens=length + _ROOM_TOKENS,
        admitted=sequences,
        prefill_chunks=[whole_prefill(one) for one in sequences],
    )
    began_s = clock.now()
    executor.finish(executor.launch(prefill))
    milliseconds = (clock.now() - began_s) * 1e3
    drop = StepPlan(
        epoch=1,
        step_id=next(steps),
        deadline_s=0.0,
        row_count=0,
        row_tokens=0,
        dropped=[one.sequence_id for one in sequences],
    )
    executor.finish(executor.launch(drop))
    return milliseconds
