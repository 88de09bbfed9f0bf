"""`lockstep bench overhead`: the whole stack over HTTP, against BatchGenerator without a server.

BatchGenerator is the ceiling: it runs on as many ranks as the stack, or on `--ceiling-ranks`. Owns
the flags, plan and load that `lockstep bench peers` shares.
"""

import contextlib
import functools
from typing import Any

import click

from services.commands.bench.fake_ranks.rank_processes import (
    RankProcesses,
    default_backend,
    rank_environments,
)
from services.commands.bench.flags import number_option, numbers_option
from services.commands.bench.load.load_processes import LoadClient
from services.commands.bench.load.prompts import PromptGenerator
from services.commands.bench.measuring.noise import measure_case
from services.commands.bench.measuring.plan import StackPlan
from services.commands.bench.measuring.processes import bench_program, print_progress
from services.commands.bench.measuring.report import Report
from services.commands.bench.measuring.stack import Stack, per_step_metrics, started_stack
from shared.errors import UnavailableError

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


class OverheadPlan(StackPlan, frozen=True, kw_only=True):
    """Parameters of one run of `lockstep bench overhead` or `peers`, from its command line."""

    clients: list[int]
    """Numbers of clients."""
    prompt_tokens: list[int]
    new_tokens: int
    rounds: int
    """Requests that each client sends one after the other; 1 for prompts above 512 tokens."""
    ceiling_ranks: int | None = None
    """Ranks of BatchGenerator; with more than one they share the model as the stack's ranks do.
    None: as many as the stack has."""

    def rounds_for(self, length: int) -> int:
        """Return the requests of each client; 1 for prompts of more than ROUNDS_TOKENS_MAX tokens.

        Args:
            length: tokens of each prompt.
        """
        return self.rounds if length <= ROUNDS_TOKENS_MAX else 1

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
    numbers_option("--clients", "Numbers of concurrent clients", "1,4,8,16", quick="1,16"),
    numbers_option("--prompt-tokens", "Prompt lengths in tokens", "64,1024", quick="64"),
    number_option("--new-tokens", "Completion length", 64),
    number_option("--rounds", "Requests per client and repeat", 3),
    number_option("--ranks", "World size", 1),
    number_option("--ceiling-ranks", "Ranks of BatchGenerator (default: the same as --ranks)"),
]
"""Options of the overhead and peers benchmarks."""


def measure(plan: OverheadPlan, report: Report) -> None:
    """Measure BatchGenerator (the ceiling) and the whole stack in turn with the same prompts.

    Args:
        plan: the parameters of the benchmark.
        report: gets one case per prompt length and number of clients.

    Raises:
        UnavailableError: when one of them does not start or answer.
    """
    prompts = PromptGenerator(plan.model)
    report.settings |= {**plan.describe(), "order": f"{CEILING}, {STACK}, and again"}
    with (
        contextlib.closing(start_ceiling(plan)) as ceiling,
        LoadClient(plan.log_folder) as client,
        started_stack(plan, report) as stack,
    ):
        facts = ceiling.descriptions[0]
        report.machine |= {f"ceiling_{key}": value for key, value in facts.items()}

        def measure_pair(length: int, clients: int, rounds: int) -> dict[str, dict[str, float]]:
            work = prompts.token_work(clients, rounds, length)
            alone = ceiling.request({"clients": work, "max_tokens": plan.new_tokens})[0]
            return {CEILING: alone, STACK: measure_stack(plan, stack, client, work, length)}

        for length in plan.prompt_tokens:
            print_progress(f"{length} prompt tokens, warming up")
            measure_pair(length, max(plan.clients), rounds=1)
            for clients in plan.clients:
                conditions = {"prompt_tokens": length, "clients": clients}
                run = functools.partial(measure_pair, length, clients, plan.rounds_for(length))
                case = measure_case(plan, report, conditions, run, noted=[STACK])
                case.add_ratios(STACK, CEILING, "tokens_per_s", "ttft_p50_ms", "itl_p50_ms")


def start_ceiling(plan: OverheadPlan) -> RankProcesses:
    """Start the processes that run BatchGenerator; return them when all have loaded the model.

    Raises:
        UnavailableError: when one of them does not start.
    """
    ranks = plan.ceiling_ranks or plan.ranks
    backend, sharding = "off", "none"
    if ranks > 1:
        backend = plan.settings.get("LOCKSTEP_WORLD_BACKEND", default_backend())
        sharding = plan.settings.get("LOCKSTEP_WORLD_SHARDING", "tensor")
    environments = rank_environments(
        plan.log_folder, backend, ranks, one_gpu_each=backend == "nccl"
    )
    command = bench_program("serving.batch_generator", backend, str(plan.model), sharding)
    return RankProcesses("the ceiling", command, environments, plan.log_folder)


def check_answer(answer: dict[str, Any], tokens: int, length: int) -> dict[str, float]:
    """Return the metrics in a load client's answer if the server did exactly the ordered work.

    The metrics are those of `load_client.measure` without cached_tokens, which must be 0.

    Args:
        answer: the load client's answer.
        tokens: expected completion tokens over all requests.
        length: expected tokens of each prompt.

    Raises:
        UnavailableError: when requests ended early, hit a prefix cache, or had prompts of another
            length.
    """
    metrics: dict[str, float] = answer["metrics"]
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


def measure_stack(
    plan: OverheadPlan,
    stack: Stack,
    client: LoadClient,
    work: list[list[list[int]]],
    length: int,
) -> dict[str, float]:
    """Run one load against the stack; return its latencies, rates and CPU times.

    Args:
        plan: the parameters of the benchmark.
        stack: the running stack.
        client: the load client.
        work: per client its prompts (token ids).
        length: tokens of each prompt.

    Returns:
        The metrics of `check_answer`; for each role, such as gateway, `<role>_cpu_us_per_token`
        (mean); and those of `per_step_metrics`.

    Raises:
        UnavailableError: when the server did not do exactly the ordered work.
    """
    before, cpu_before = stack.counters(), stack.cpu_seconds()
    answer = client.complete(stack, work, plan.new_tokens)
    cpu_after, after = stack.cpu_seconds(), stack.counters()
    metrics = check_answer(answer, sum(map(len, work)) * plan.new_tokens, length)
    for role, seconds in cpu_after.items():
        spent_us = (seconds - cpu_before.get(role, 0.0)) * 1e6
        metrics[f"{role.replace('-', '_')}_cpu_us_per_token"] = spent_us / metrics["tokens"]
    return metrics | per_step_metrics(before, after)
