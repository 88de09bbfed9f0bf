"""`lockstep bench overhead`: the whole stack over HTTP, against BatchGenerator without a server.

BatchGenerator is the ceiling: it runs on as many ranks as the stack, or on `--ceiling-ranks`. Owns
the flags, plan and load that `lockstep bench peers` shares.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from msgspec import Struct

from services.commands.bench.fake_ranks.rank_processes import (
    RankProcesses,
    default_backend,
    rank_environments,
)
from services.commands.bench.flags import BenchmarkOptions, number_option, numbers_option
from services.commands.bench.load.load_processes import (
    COMPLETIONS,
    closed_loop_order,
    request_body,
    require_success,
    start_closed_loop_client,
)
from services.commands.bench.load.prompts import PromptGenerator
from services.commands.bench.measuring import machine, noise
from services.commands.bench.measuring.processes import MeasuredProcess, print_progress
from services.commands.bench.measuring.report import Case, Report
from services.commands.bench.measuring.stack import Stack, per_step_metrics
from shared.errors import UnavailableError

SUMMARY = "the whole stack over HTTP against mlx_lm's BatchGenerator"
DEFAULTS = {"clients": [1, 4, 8, 16], "prompt_tokens": [64, 1_024]}
QUICK_DEFAULTS = {"clients": [1, 16], "prompt_tokens": [64]}
COLUMNS = [
    "tokens_per_s",
    "ttft_p50_ms",
    "ttft_p95_ms",
    "itl_p50_ms",
    "itl_p95_ms",
    "process_cpu_us_per_token",
    "gateway_cpu_us_per_token",
    "scheduler_cpu_us_per_token",
    "rank_worker_cpu_us_per_token",
    "client_cpu_us_per_token",
    "scheduler_cpu_us_per_step",
    "step_busy_us_per_step",
    "step_idle_us_per_step",
]
ROUNDS_TOKENS_MAX = 512
"""Longest prompt that clients send in several rounds; longer ones take long enough once."""

CEILING, STACK = "batch_generator", "lockstep"


class OverheadPlan(Struct, frozen=True, kw_only=True):
    """Parameters of one run of `lockstep bench overhead` or `peers`, from its command line."""

    model: Path
    ranks: int
    concurrencies: list[int]
    """Numbers of clients."""
    prompt_tokens: list[int]
    new_tokens: int
    repeats: int
    rounds: int
    """Requests that each client sends one after the other; 1 for prompts above 512 tokens."""
    log_folder: Path
    tries: int = 1
    """Largest number of measurements per repeat while other processes use the machine."""
    settings: dict[str, str] = {}
    """LOCKSTEP_… variables for the stack."""
    ceiling_ranks: int = 1
    """Ranks of BatchGenerator; with more than one they share the model as the stack's ranks do."""

    def describe(self) -> dict[str, Any]:
        """Return name -> value of the parameters that the reports of both benchmarks show."""
        return {
            "model": self.model.name,
            "new_tokens": self.new_tokens,
            "repeats": self.repeats,
            "rounds": f"{self.rounds}, 1 above {ROUNDS_TOKENS_MAX} prompt tokens",
            **self.settings,
        }


OPTIONS: list[click.Parameter] = [
    numbers_option("--clients", "Numbers of concurrent clients", shown_default="1,4,8,16"),
    numbers_option("--prompt-tokens", "Prompt lengths in tokens", shown_default="64,1024"),
    number_option("--new-tokens", "Completion length", 64),
    number_option("--rounds", "Requests per client and repeat", 3),
    number_option("--ranks", "World size", 1),
    number_option("--ceiling-ranks", "Ranks of BatchGenerator (default: the same as --ranks)"),
]
"""Options of the overhead and peers benchmarks."""


def make_plan(options: BenchmarkOptions) -> OverheadPlan:
    """Return the parameters of overhead or peers from the options of the command line.

    Raises:
        UsageError: when a setting is malformed or the model does not exist.
        UnavailableError: when the model of a preset cannot be made.
    """
    arguments = options.arguments
    return OverheadPlan(
        model=options.model,
        ranks=arguments.ranks,
        concurrencies=arguments.clients,
        prompt_tokens=arguments.prompt_tokens,
        new_tokens=arguments.new_tokens,
        repeats=arguments.repeats,
        rounds=arguments.rounds,
        log_folder=options.logs,
        tries=arguments.tries,
        settings=options.settings,
        ceiling_ranks=arguments.ceiling_ranks or arguments.ranks,
    )


def measure(plan: OverheadPlan) -> Report:
    """Measure BatchGenerator (the ceiling) and the whole stack in turn with the same prompts.

    A case is a prompt length and a number of clients.

    Raises:
        UnavailableError: when one of them does not start or answer.
    """
    prompts = PromptGenerator(plan.model)
    report = Report(
        benchmark="overhead",
        machine=machine.describe(),
        settings={
            **plan.describe(),
            "order": f"{CEILING}, {STACK}, and again",
        },
    )
    ceiling = start_ceiling(plan)
    client = start_closed_loop_client(plan.log_folder)
    try:
        facts = ceiling.descriptions[0]
        report.machine |= {f"ceiling_{key}": value for key, value in facts.items()}
        with Stack(
            plan.model, plan.ranks, plan.log_folder / "lockstep.log", plan.settings
        ) as stack:
            report.machine |= stack.describe()
            for length in plan.prompt_tokens:
                print_progress(f"{length} prompt tokens, warming up")
                work = [[prompts.token_prompt(length)] for _ in range(max(plan.concurrencies))]
                ceiling.request({"clients": work, "max_tokens": plan.new_tokens})
                measure_stack(plan, stack, client, work, length)
                for concurrency in plan.concurrencies:
                    print_progress(f"{length} prompt tokens, {concurrency} clients")
                    report.cases.append(
                        _measure_case(
                            plan,
                            length,
                            concurrency,
                            prompts=prompts,
                            ceiling=ceiling,
                            client=client,
                            stack=stack,
                        )
                    )
    finally:
        client.stop()
        ceiling.close()
    noise.add_noise_note(report)
    return report


def start_ceiling(plan: OverheadPlan) -> RankProcesses:
    """Start the processes that run BatchGenerator; return them when all have loaded the model.

    Raises:
        UnavailableError: when one of them does not start.
    """
    backend, sharding = "off", "none"
    if plan.ceiling_ranks > 1:
        backend = plan.settings.get("LOCKSTEP_WORLD_BACKEND", default_backend())
        sharding = plan.settings.get("LOCKSTEP_WORLD_SHARDING", "tensor")
    environments = rank_environments(
        plan.log_folder, backend, plan.ceiling_ranks, one_gpu_each=backend == "nccl"
    )
    command = [
        sys.executable,
        "-m",
        "services.commands.bench.serving.batch_generator",
        backend,
        str(plan.model),
        sharding,
    ]
    return RankProcesses("the ceiling", command, environments, plan.log_folder)


def rounds_for(plan: OverheadPlan, length: int) -> int:
    """Return how many requests each client sends one after the other: 1 for long prompts.

    Args:
        plan: the parameters of the benchmark.
        length: tokens of each prompt; above ROUNDS_TOKENS_MAX it is long.
    """
    return plan.rounds if length <= ROUNDS_TOKENS_MAX else 1


def completions_order(
    port: int, model: str, work: Sequence[Sequence[list[int] | str]], new_tokens: int
) -> dict[str, Any]:
    """Return the JSON object that orders one load of completions from the closed-loop client.

    Args:
        port: the server's port on this machine.
        model: name of the model at the server.
        work: per client the prompts (token ids or text) that it sends one after the other.
        new_tokens: completion length of every prompt.
    """
    clients = [
        [request_body(model, new_tokens, prompt=prompt) for prompt in prompts] for prompts in work
    ]
    return closed_loop_order(port, COMPLETIONS, clients)


def check_answer(answer: dict[str, Any], tokens: int, length: int) -> dict[str, float]:
    """Return the metrics in a load client's answer if the server did exactly the ordered work.

    The metrics are those of `closed_loop_client.summarize` without cached_tokens, which must be 0.

    Args:
        answer: the load client's answer.
        tokens: expected completion tokens over all requests.
        length: expected tokens of each prompt.

    Raises:
        UnavailableError: when requests failed, ended early, hit a prefix cache, or had prompts of
            another length.
    """
    metrics: dict[str, float] = require_success(answer)["metrics"]
    if metrics["tokens"] != tokens:
        raise UnavailableError(
            f"{metrics['tokens']:.0f} tokens arrived instead of {tokens}: the model ends its "
            "completions early, so the work is not equal. Use --preset: models of presets never "
            "end early."
        )
    if answer["prompt_tokens"] != [length]:
        raise UnavailableError(
            f"The server counted {answer['prompt_tokens']} tokens in prompts of {length} tokens."
        )
    if metrics.pop("cached_tokens"):
        raise UnavailableError("Prompts were found in a prefix cache: the work was not equal.")
    return metrics


def _measure_case(
    plan: OverheadPlan,
    length: int,
    concurrency: int,
    *,
    prompts: PromptGenerator,
    ceiling: RankProcesses,
    client: MeasuredProcess,
    stack: Stack,
) -> Case:
    case = Case(conditions={"prompt_tokens": length, "clients": concurrency})
    rounds = rounds_for(plan, length)
    for _ in range(plan.repeats):
        work = [[prompts.token_prompt(length) for _ in range(rounds)] for _ in range(concurrency)]
        order = {"clients": work, "max_tokens": plan.new_tokens}

        def measure_pair(
            order: dict[str, Any] = order, work: list[list[list[int]]] = work
        ) -> tuple[dict[str, float], dict[str, float]]:
            return ceiling.request(order)[0], measure_stack(plan, stack, client, work, length)

        (alone, whole), foreign = noise.measure_with_retries(measure_pair, plan.tries)
        case.series_of(CEILING).add(alone)
        case.series_of(STACK).add(whole | {noise.FOREIGN_CORES: foreign})
    case.add_ratio("tokens_per_s", STACK, CEILING)
    case.add_ratio("ttft_p50_ms", STACK, CEILING)
    case.add_ratio("itl_p50_ms", STACK, CEILING)
    return case


def measure_stack(
    plan: OverheadPlan,
    stack: Stack,
    client: MeasuredProcess,
    work: list[list[list[int]]],
    length: int,
) -> dict[str, float]:
    """Run one load against the stack; return its latencies, rates and CPU times.

    Args:
        plan: the parameters of the benchmark.
        stack: the running stack.
        client: the closed-loop load client.
        work: per client its prompts (token ids).
        length: tokens of each prompt.

    Returns:
        The metrics of `check_answer`; for each role, such as gateway, `<role>_cpu_us_per_token`
        (mean); and those of `per_step_metrics`.

    Raises:
        UnavailableError: when the server did not do exactly the ordered work.
    """
    before, cpu_before = stack.counters(), stack.cpu_seconds()
    answer = client.request(completions_order(stack.port, stack.name, work, plan.new_tokens))
    cpu_after, after = stack.cpu_seconds(), stack.counters()
    metrics = check_answer(answer, sum(map(len, work)) * plan.new_tokens, length)
    for role, seconds in cpu_after.items():
        spent_us = (seconds - cpu_before.get(role, 0.0)) * 1e6
        metrics[f"{role.replace('-', '_')}_cpu_us_per_token"] = spent_us / metrics["tokens"]
    return metrics | per_step_metrics(before, after)
