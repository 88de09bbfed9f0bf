"""`lockstep bench overload`: goodput and refusals when more requests arrive than can be served.

First, as many clients as there are slots measure the peak. Then requests arrive at fixed times, at
a multiple of the rate that is served at the peak; refused requests are not repeated. Goodput counts
the tokens of complete answers. At last one small tenant's time to first token is measured alone and
beside a tenant that floods the server.
"""

import functools

import click

from services.commands.bench.flags import BenchmarkOption, number_option, numbers_option
from services.commands.bench.load.load_processes import LoadClient
from services.commands.bench.load.prompts import PromptGenerator
from services.commands.bench.measuring.noise import FOREIGN_CORES, measure_case
from services.commands.bench.measuring.plan import StackPlan
from services.commands.bench.measuring.report import Report
from services.commands.bench.measuring.stack import Stack, started_stack
from services.commands.bench.serving.overhead import check_answer
from services.commands.bench.serving.two_tenants import measure_tenants

COLUMNS = [
    "tokens_per_s",
    "served",
    "refused",
    "refused_p50_ms",
    "refused_p99_ms",
    "ttft_p50_ms",
    "ttft_p95_ms",
    "gateway_mib",
    FOREIGN_CORES,
]
PEAK, OVERLOAD = "as many as slots", "overload"
PEAK_ROUNDS = 4
"""Requests that each client sends at the peak, one after the other."""
_ARRIVALS_TIMEOUT_S = 300.0


class OverloadPlan(StackPlan, frozen=True, kw_only=True):
    """Parameters of one run of `lockstep bench overload`, from its command line."""

    factors: list[int]
    """Arrival rates, as multiples of the rate served at the peak."""
    slots: int
    """Sequences that run at once, and requests that may wait."""
    prompt_tokens: int
    new_tokens: int
    seconds: float
    """Time during which requests arrive."""


OPTIONS: list[click.Parameter] = [
    numbers_option(
        "--factors", "Arrival rates as multiples of the rate that can be served", "2,10"
    ),
    number_option("--slots", "Sequences that run at once", 8),
    number_option("--prompt-tokens", "Tokens of each prompt", 64),
    number_option("--new-tokens", "Completion length", 64),
    BenchmarkOption(
        "--seconds",
        "Time during which requests arrive",
        10,
        quick_max=3.0,
        type=float,
        metavar="S",
    ),
]
"""Options of this benchmark."""


def measure(plan: OverloadPlan, report: Report) -> None:
    """Measure tokens/s of served requests, and refusals, when more arrive than can be served.

    Each repeat first measures the stack's highest tokens/s with as many clients as slots, then
    sends requests at a multiple of that rate.

    Args:
        plan: the parameters of the benchmark.
        report: gets one case per multiple, and one of two tenants.

    Raises:
        UnavailableError: when the stack does not start, or an answer is neither complete nor a
            refusal.
    """
    prompts = PromptGenerator(plan.model)
    report.settings |= {
        "model": plan.model.name,
        "slots": plan.slots,
        "may wait": plan.slots,
        "prompt_tokens": plan.prompt_tokens,
        "new_tokens": plan.new_tokens,
        "seconds": plan.seconds,
        "repeats": plan.repeats,
        **plan.settings,
    }
    slots = {
        "LOCKSTEP_SCHEDULER_RUNNING_SEQUENCES_MAX": str(plan.slots),
        "LOCKSTEP_SCHEDULER_WAITING_REQUESTS_MAX": str(plan.slots),
        # All of this load comes from one tenant.
        "LOCKSTEP_TENANTS_SHARE": "1",
    }
    with (
        LoadClient(plan.log_folder) as client,
        started_stack(plan, report, **slots) as stack,
    ):

        def measure_pair(factor: int) -> dict[str, dict[str, float]]:
            peak = _measure_peak(plan, stack, client, prompts)
            per_second = factor * peak["tokens_per_s"] / plan.new_tokens
            arrivals = max(plan.slots, int(per_second * plan.seconds))
            answer = client.complete(
                stack,
                prompts.token_work(arrivals, 1, plan.prompt_tokens),
                plan.new_tokens,
                interval_s=1.0 / per_second,
                timeout_s=_ARRIVALS_TIMEOUT_S,
                may_refuse=True,
            )
            rate = {"tokens_per_s": answer["metrics"]["tokens_per_s"]}
            return {PEAK: peak, OVERLOAD: rate | answer["refusals"] | stack.gateway_memory()}

        # Warm-up.
        _measure_peak(plan, stack, client, prompts)
        for factor in plan.factors:
            run = functools.partial(measure_pair, factor)
            case = measure_case(plan, report, {"times": factor}, run, noted=[OVERLOAD])
            case.add_ratios(OVERLOAD, PEAK, "tokens_per_s")
    measure_tenants(plan, report, prompts, plan.slots, plan.prompt_tokens, plan.new_tokens)


def _measure_peak(
    plan: OverloadPlan, stack: Stack, client: LoadClient, prompts: PromptGenerator
) -> dict[str, float]:
    """Serve as many clients as there are slots; each sends PEAK_ROUNDS requests."""
    work = prompts.token_work(plan.slots, PEAK_ROUNDS, plan.prompt_tokens)
    answer = client.complete(stack, work, plan.new_tokens)
    tokens = plan.slots * PEAK_ROUNDS * plan.new_tokens
    metrics = check_answer(answer, tokens, plan.prompt_tokens)
    return {"tokens_per_s": metrics["tokens_per_s"], **stack.gateway_memory()}
