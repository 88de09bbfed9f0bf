"""`lockstep bench overload`: what becomes of goodput and refusals when far too much is asked for.

First as many clients as there are slots show the peak. Then requests arrive at fixed times, so many
times more than are served; whoever is refused does not come back. Goodput is the tokens of answers
that ended well.
"""

import argparse
import sys
from pathlib import Path

from msgspec import Struct

from services.commands.bench.flags import BenchmarkOptions, positive_ints
from services.commands.bench.load.prompts import PromptGenerator
from services.commands.bench.measuring import machine, noise
from services.commands.bench.measuring.processes import MeasuredProcess, print_progress
from services.commands.bench.measuring.report import Case, Report
from services.commands.bench.measuring.stack import Stack
from services.commands.bench.serving.overhead import (
    checked,
    completion_body,
    load_order,
    start_client,
)
from shared.errors import UnavailableError

SUMMARY = "goodput and how fast refusals come when far more is asked for than can be served"
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
FACTORS = [2, 10]


class OverloadPlan(Struct, frozen=True, kw_only=True):
    """What to measure."""

    model: Path
    factors: list[int]
    slots: int
    prompt_tokens: int
    new_tokens: int
    seconds: float
    repeats: int
    log_folder: Path
    tries: int = 1
    settings: dict[str, str] = {}
    """LOCKSTEP_… variables for the stack."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the benchmark its own flags."""
    parser.add_argument(
        "--factors", type=positive_ints, default=FACTORS, help="times what can be served"
    )
    parser.add_argument("--slots", type=int, default=8, help="sequences that run at once")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64, help="completion length")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long requests arrive")


def make_plan(asked: BenchmarkOptions) -> OverloadPlan:
    """Return what the command line asks for.

    Raises:
        UsageError: a setting cannot be understood, or there is no such model.
        UnavailableError: a model could not be made.
    """
    arguments = asked.arguments
    return OverloadPlan(
        model=asked.model,
        factors=arguments.factors,
        slots=arguments.slots,
        prompt_tokens=arguments.prompt_tokens,
        new_tokens=arguments.new_tokens,
        seconds=min(3.0, arguments.seconds) if arguments.quick else arguments.seconds,
        repeats=arguments.repeats,
        log_folder=asked.logs,
        tries=arguments.tries,
        settings=asked.settings,
    )


def measure(plan: OverloadPlan) -> Report:
    """Run every case.

    Raises:
        UnavailableError: the stack does not start, or answers what is neither a whole stream nor a
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
    steady = start_client(plan.log_folder)
    arrivals = _start_arrivals(plan.log_folder)
    try:
        with Stack(plan.model, 1, plan.log_folder / "lockstep.log", settings) as stack:
            report.machine |= stack.describe()
            _peak(plan, stack, steady, prompts)
            for factor in plan.factors:
                print_progress(f"{factor} times what can be served")
                report.cases.append(_case(plan, factor, stack, steady, arrivals, prompts))
    finally:
        steady.stop()
        arrivals.stop()
    noise.add_noise_note(report)
    return report


def _case(
    plan: OverloadPlan,
    factor: int,
    stack: Stack,
    steady: MeasuredProcess,
    arrivals: MeasuredProcess,
    prompts: PromptGenerator,
) -> Case:
    case = Case(conditions={"times": factor})
    for _ in range(plan.repeats):

        def pair() -> tuple[dict[str, float], dict[str, float]]:
            peak = _peak(plan, stack, steady, prompts)
            return peak, _overload(plan, factor, peak["tokens_per_s"], stack, arrivals, prompts)

        (peak, flooded), foreign = noise.measure_with_retries(pair, plan.tries)
        case.series_of(PEAK).add(peak)
        case.series_of(OVERLOAD).add(flooded | {noise.FOREIGN_CORES: foreign})
    case.add_ratio("tokens_per_s", OVERLOAD, PEAK)
    return case


def _peak(
    plan: OverloadPlan, stack: Stack, client: MeasuredProcess, prompts: PromptGenerator
) -> dict[str, float]:
    """Serve as many clients as there are slots, for about as long as the overload lasts."""
    work = [[prompts.token_prompt(plan.prompt_tokens) for _ in range(4)] for _ in range(plan.slots)]
    answer = client.request(load_order(stack.port, stack.name, work, plan.new_tokens))
    metrics = checked(answer, 4 * plan.slots * plan.new_tokens, plan.prompt_tokens)
    return {"tokens_per_s": metrics["tokens_per_s"]} | _memory(stack)


def _overload(
    plan: OverloadPlan,
    factor: int,
    tokens_per_s: float,
    stack: Stack,
    client: MeasuredProcess,
    prompts: PromptGenerator,
) -> dict[str, float]:
    per_second = factor * tokens_per_s / plan.new_tokens
    bodies = [
        completion_body(stack.name, prompts.token_prompt(plan.prompt_tokens), plan.new_tokens)
        for _ in range(max(plan.slots, int(per_second * plan.seconds)))
    ]
    answer = client.request(
        {
            "host": "127.0.0.1",
            "port": stack.port,
            "path": "/v1/completions",
            "bodies": bodies,
            "interval_s": 1.0 / per_second,
            "timeout_s": 300.0,
        }
    )
    if answer["problems"]:
        raise UnavailableError(f"Requests failed: {answer['problems'][0]}")
    metrics: dict[str, float] = answer["metrics"]
    return metrics | _memory(stack)


def _memory(stack: Stack) -> dict[str, float]:
    found = stack.resident_mib()
    return {"gateway_mib": found["gateway"]} if "gateway" in found else {}


def _start_arrivals(log_folder: Path) -> MeasuredProcess:
    return MeasuredProcess(
        "the client of arrivals",
        [sys.executable, "-m", "services.commands.bench.load.open_loop_client"],
        log_folder / "arrivals.log",
        piped=True,
    )
