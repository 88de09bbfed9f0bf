"""`lockstep bench overload`: goodput and refusals when more requests arrive than can be served.

First, as many clients as there are slots measure the peak. Then requests arrive at fixed times, at
a multiple of the rate that is served at the peak; refused requests are not repeated. Goodput counts
the tokens of complete answers.
"""

from pathlib import Path

import click
from msgspec import Struct

from services.commands.bench.flags import BenchmarkOptions, numbers_option
from services.commands.bench.load.load_processes import (
    COMPLETIONS,
    request_body,
    require_success,
    start_closed_loop_client,
    start_open_loop_client,
)
from services.commands.bench.load.prompts import PromptGenerator
from services.commands.bench.measuring import machine, noise
from services.commands.bench.measuring.processes import MeasuredProcess, print_progress
from services.commands.bench.measuring.report import Case, Report
from services.commands.bench.measuring.stack import Stack
from services.commands.bench.serving.overhead import check_answer, completions_order

SUMMARY = "goodput and time to refusal when far more requests arrive than can be served"
COLUMNS = [
    "tokens_per_s",
    "served",
    "refused",
    "refused_p50_ms",
    "refused_p99_ms",
    "gateway_mib",
    noise.FOREIGN_CORES,
]
PEAK, OVERLOAD = "as many as slots", "overload"
_ARRIVALS_TIMEOUT_S = 300.0


class OverloadPlan(Struct, frozen=True, kw_only=True):
    """Parameters of one run of `lockstep bench overload`, from its command line."""

    model: Path
    factors: list[int]
    """Arrival rates, as multiples of the rate served at the peak."""
    slots: int
    """Sequences that run at once, and requests that may wait."""
    prompt_tokens: int
    new_tokens: int
    seconds: float
    """Time during which requests arrive."""
    repeats: int
    log_folder: Path
    tries: int = 1
    """Largest number of measurements per repeat while other processes use the machine."""
    settings: dict[str, str] = {}
    """LOCKSTEP_… variables for the stack."""


OPTIONS: list[click.Parameter] = [
    numbers_option(
        "--factors", "Arrival rates as multiples of the rate that can be served", "2,10"
    ),
    click.Option(
        ["--slots"],
        type=int,
        default=8,
        metavar="N",
        help="Sequences that run at once (default 8).",
    ),
    click.Option(
        ["--prompt-tokens"],
        type=int,
        default=64,
        metavar="N",
        help="Tokens of each prompt (default 64).",
    ),
    click.Option(
        ["--new-tokens"],
        type=int,
        default=64,
        metavar="N",
        help="Completion length (default 64).",
    ),
    click.Option(
        ["--seconds"],
        type=float,
        default=10.0,
        metavar="S",
        help="Time during which requests arrive (default 10).",
    ),
]
"""Options of this benchmark."""


def make_plan(options: BenchmarkOptions) -> OverloadPlan:
    """Return the overload benchmark's parameters from the options of its command line.

    Raises:
        UsageError: when a setting is malformed or the model does not exist.
        UnavailableError: when the model of a preset cannot be made.
    """
    arguments = options.arguments
    return OverloadPlan(
        model=options.model,
        factors=arguments.factors,
        slots=arguments.slots,
        prompt_tokens=arguments.prompt_tokens,
        new_tokens=arguments.new_tokens,
        seconds=min(3.0, arguments.seconds) if arguments.quick else arguments.seconds,
        repeats=arguments.repeats,
        log_folder=options.logs,
        tries=arguments.tries,
        settings=options.settings,
    )


def measure(plan: OverloadPlan) -> Report:
    """Measure tokens/s of served requests, and refusals, when more arrive than can be served.

    Each repeat first measures the stack's highest tokens/s with as many clients as slots, then
    sends requests at a multiple of that rate; there is one case per multiple.

    Raises:
        UnavailableError: when the stack does not start, or an answer is neither complete nor a
            refusal.
    """
    prompts = PromptGenerator(plan.model)
    settings = {
        "LOCKSTEP_SCHEDULER_RUNNING_SEQUENCES_MAX": str(plan.slots),
        "LOCKSTEP_SCHEDULER_WAITING_REQUESTS_MAX": str(plan.slots),
        **plan.settings,
    }
    report = Report(
        benchmark="overload",
        machine=machine.describe(),
        settings={
            "model": plan.model.name,
            "slots": plan.slots,
            "may wait": plan.slots,
            "prompt_tokens": plan.prompt_tokens,
            "new_tokens": plan.new_tokens,
            "seconds": plan.seconds,
            "repeats": plan.repeats,
            **plan.settings,
        },
    )
    steady = start_closed_loop_client(plan.log_folder)
    arrivals = start_open_loop_client(plan.log_folder)
    try:
        with Stack(plan.model, 1, plan.log_folder / "lockstep.log", settings) as stack:
            report.machine |= stack.describe()
            # Warm-up.
            _measure_peak(plan, stack, steady, prompts)
            for factor in plan.factors:
                print_progress(f"arrivals at {factor} times the rate that can be served")
                report.cases.append(_measure_case(plan, factor, stack, steady, arrivals, prompts))
    finally:
        steady.stop()
        arrivals.stop()
    noise.add_noise_note(report)
    return report


def _measure_case(
    plan: OverloadPlan,
    factor: int,
    stack: Stack,
    steady: MeasuredProcess,
    arrivals: MeasuredProcess,
    prompts: PromptGenerator,
) -> Case:
    case = Case(conditions={"times": factor})
    for _ in range(plan.repeats):

        def measure_pair() -> tuple[dict[str, float], dict[str, float]]:
            peak = _measure_peak(plan, stack, steady, prompts)
            rate = peak["tokens_per_s"]
            return peak, _measure_overload(plan, factor, rate, stack, arrivals, prompts)

        (peak, overloaded), foreign = noise.measure_with_retries(measure_pair, plan.tries)
        case.series_of(PEAK).add(peak)
        case.series_of(OVERLOAD).add(overloaded | {noise.FOREIGN_CORES: foreign})
    case.add_ratio("tokens_per_s", OVERLOAD, PEAK)
    return case


def _measure_peak(
    plan: OverloadPlan, stack: Stack, client: MeasuredProcess, prompts: PromptGenerator
) -> dict[str, float]:
    """Serve as many clients as there are slots; each sends four requests."""
    work = [[prompts.token_prompt(plan.prompt_tokens) for _ in range(4)] for _ in range(plan.slots)]
    answer = client.request(completions_order(stack.port, stack.name, work, plan.new_tokens))
    metrics = check_answer(answer, 4 * plan.slots * plan.new_tokens, plan.prompt_tokens)
    return {"tokens_per_s": metrics["tokens_per_s"]} | _gateway_memory(stack)


def _measure_overload(
    plan: OverloadPlan,
    factor: int,
    tokens_per_s: float,
    stack: Stack,
    client: MeasuredProcess,
    prompts: PromptGenerator,
) -> dict[str, float]:
    per_second = factor * tokens_per_s / plan.new_tokens
    bodies = [
        request_body(stack.name, plan.new_tokens, prompt=prompts.token_prompt(plan.prompt_tokens))
        for _ in range(max(plan.slots, int(per_second * plan.seconds)))
    ]
    answer = client.request(
        {
            "host": "127.0.0.1",
            "port": stack.port,
            "path": COMPLETIONS,
            "bodies": bodies,
            "interval_s": 1.0 / per_second,
            "timeout_s": _ARRIVALS_TIMEOUT_S,
        }
    )
    metrics: dict[str, float] = require_success(answer)["metrics"]
    return metrics | _gateway_memory(stack)


def _gateway_memory(stack: Stack) -> dict[str, float]:
    found = stack.resident_mib()
    return {"gateway_mib": found["gateway"]} if "gateway" in found else {}
