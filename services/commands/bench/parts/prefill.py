"""`lockstep bench prefill`: times of prompts that come at once, computed together and one by one.

A rank without a scheduler gets prompts of uneven lengths that come at once, as those of several
agents do, each after tokens that are in its row already, as after an earlier turn. Contenders are
the same model under other settings, each in a process of its own, and are measured in turn.

- together_ms: all prompts in as few steps as scheduler.step_tokens_max allows.
- one_by_one_ms: each prompt in a step of its own. On a GPU two steps are queued at a time.
- together_per_one_by_one: the one divided by the other, measured in turn in one process.
- tokens_per_s: tokens of all prompts divided by together_ms.

Each is the median of the rounds of a repeat. With several ranks the figures are those of rank 0.
"""

import click

from services.commands.bench.flags import compare_option, numbers_option
from services.commands.bench.flags import number_option as number
from services.commands.bench.measuring.report import Report
from services.commands.bench.measuring.row_lengths import uneven_lengths
from services.commands.bench.parts.worlds import (
    WorldsPlan,
    check_settings,
    measure_worlds,
    started_worlds,
)
from shared import limits
from shared.errors import UsageError

COLUMNS = ["together_ms", "one_by_one_ms", "together_per_one_by_one", "tokens_per_s"]
COMPARED = ("together_ms",)
"""Metrics of the other contenders that are divided by those of the one without settings."""


class PrefillPlan(WorldsPlan, frozen=True, kw_only=True):
    """Parameters of one run of `lockstep bench prefill`, from its command line."""

    prompts: list[int]
    """Numbers of prompts that come at once."""
    tokens: list[int]
    """Tokens to compute of the longest prompt."""
    cached: list[int]
    """Tokens that the longest row has already."""
    rounds: int
    """Times that a repeat computes the prompts in each way."""


OPTIONS: list[click.Parameter] = [
    numbers_option("--prompts", "Numbers of prompts that come at once", "1,4,16", quick="1,4"),
    numbers_option("--tokens", "Tokens to compute of the longest prompt", "128,512", quick="64"),
    numbers_option(
        "--cached", "Tokens that the longest row has already", "0,1024", quick="128", least=0
    ),
    numbers_option("--ranks", "Numbers of ranks that share the model", "1"),
    number("--rounds", "Times that a repeat computes the prompts in each way", 3, quick=1),
    compare_option("Measure also with these settings, for example rank_worker.fast_path=off"),
]
"""Options of this benchmark."""


def measure(plan: PrefillPlan, report: Report) -> None:
    """Measure prompts of a model by their number and length, and of all contenders in turn.

    Args:
        plan: the parameters of the benchmark.
        report: gets one case per number and lengths, and a note for each that does not fit.

    Raises:
        ConfigError: a setting is wrong.
        UnavailableError: a rank does not start, or nothing could be measured.
        UsageError: prompts cannot be uneven, or are longer than the scheduler's chunks.
    """
    check_settings(plan)
    if max(plan.tokens) > limits.FORWARD_TOKENS_MAX:
        raise UsageError(
            f"--tokens {max(plan.tokens)} is too long: the scheduler cuts prompts into chunks of "
            f"{limits.FORWARD_TOKENS_MAX} tokens at most."
        )
    cases = [
        {"prompts": prompts, "tokens": tokens, "cached": cached}
        for cached in plan.cached
        for tokens in plan.tokens
        for prompts in plan.prompts
    ]
    for case in cases:
        for length in (case["tokens"], case["cached"]):
            if length:
                uneven_lengths(case["prompts"], length)
    with started_worlds(plan, report) as worlds:
        report.settings["rounds"] = plan.rounds
        for case in cases:
            measure_worlds(plan, report, worlds, case, {"rounds": plan.rounds}, COMPARED)
