"""`lockstep bench overhead`: the whole stack over HTTP against BatchGenerator alone, in turn.

BatchGenerator runs on as many ranks as the stack, or on fewer if asked to.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from services.commands.bench.fake_ranks.rank_processes import (
    RankProcesses,
    default_backend,
    rank_environments,
)
from services.commands.bench.load.prompts import PromptGenerator
from services.commands.bench.measuring import machine, noise
from services.commands.bench.measuring.processes import MeasuredProcess, print_progress
from services.commands.bench.measuring.report import Case, Report
from services.commands.bench.measuring.stack import Stack, per_step_metrics
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
"""Clients send longer prompts once: they take long enough."""

CEILING, STACK = "batch_generator", "lockstep"


class OverheadPlan(Struct, frozen=True, kw_only=True):
    """What to measure."""

    model: Path
    ranks: int
    concurrencies: list[int]
    prompt_tokens: list[int]
    new_tokens: int
    repeats: int
    rounds: int
    """Requests that each client sends, one after the other; one for prompts above 512 tokens."""
    log_folder: Path
    tries: int = 1
    """Measurements of one repeat while others use the machine."""
    settings: dict[str, str] = {}
    """LOCKSTEP_… variables for the stack."""
    ceiling_ranks: int = 1
    """Ranks that BatchGenerator runs on; more than one share the model as the stack's do."""

    def describe(self) -> dict[str, Any]:
        """Return the settings that a report shows whoever was measured."""
        return {
            "model": self.model.name,
            "new_tokens": self.new_tokens,
            "repeats": self.repeats,
            "rounds": f"{self.rounds}, 1 above {ROUNDS_TOKENS_MAX} prompt tokens",
            **self.settings,
        }


def measure(plan: OverheadPlan) -> Report:
    """Run ceiling and stack in turn for every case.

    Raises:
        UnavailableError: one of them does not start or answer.
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
    client = start_client(plan.log_folder)
    try:
        report.machine |= {f"ceiling_{key}": value for key, value in ceiling.about[0].items()}
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
                        _case(
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
    """Start the processes that run BatchGenerator.

    Raises:
        UnavailableError: one of them does not start.
    """
    backend, sharding = "off", "none"
    if plan.ceiling_ranks > 1:
        backend = plan.settings.get("LOCKSTEP_WORLD_BACKEND", default_backend())
        sharding = plan.settings.get("LOCKSTEP_WORLD_SHARDING", "tensor")
    variables = rank_environments(
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
    return RankProcesses("the ceiling", command, variables, plan.log_folder)


def start_client(log_folder: Path) -> MeasuredProcess:
    """Start the process that makes the load."""
    return MeasuredProcess(
        "the load client",
        [sys.executable, "-m", "services.commands.bench.load.closed_loop_client"],
        log_folder / "client.log",
        piped=True,
    )


def rounds_for(plan: OverheadPlan, length: int) -> int:
    """Return how many requests each client sends, one after the other."""
    return plan.rounds if length <= ROUNDS_TOKENS_MAX else 1


def completion_body(model: str, prompt: list[int] | str, new_tokens: int) -> dict[str, Any]:
    """Return the body of a greedy streamed completion that every contender understands."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": new_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def load_order(
    port: int, model: str, work: Sequence[Sequence[list[int] | str]], new_tokens: int
) -> dict[str, Any]:
    """Return what the load client is told: per client its prompts, one after the other."""
    return {
        "host": "127.0.0.1",
        "port": port,
        "path": "/v1/completions",
        "clients": [
            [completion_body(model, prompt, new_tokens) for prompt in each] for each in work
        ],
        "timeout_s": 900.0,
    }


def checked(answer: dict[str, Any], tokens: int, length: int) -> dict[str, float]:
    """Return a client's metrics when the answer is what was asked for.

    Raises:
        UnavailableError: requests failed, ended early, or had another prompt length.
    """
    if answer["problems"]:
        raise UnavailableError(f"Requests failed: {answer['problems'][0]}")
    metrics: dict[str, float] = answer["metrics"]
    if metrics["tokens"] != tokens:
        raise UnavailableError(
            f"{metrics['tokens']:.0f} tokens came instead of {tokens}: the model ends its "
            "completions early, so the work is not equal. Use --preset: those models never end."
        )
    if answer["prompt_tokens"] != [length]:
        raise UnavailableError(f"Prompts of {length} tokens counted as {answer['prompt_tokens']}.")
    if metrics.pop("cached_tokens"):
        raise UnavailableError("Prompts were found in a prefix cache: the work was not equal.")
    return metrics


def _case(
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

        def pair(
            order: dict[str, Any] = order, work: list[list[list[int]]] = work
        ) -> tuple[dict[str, float], dict[str, float]]:
            return ceiling.request(order)[0], measure_stack(plan, stack, client, work, length)

        (alone, whole), foreign = noise.measure_with_retries(pair, plan.tries)
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
    """Run one load against the stack; return the client's metrics and what the processes cost."""
    before, cpu_before = stack.counters(), stack.cpu_seconds()
    answer = client.request(load_order(stack.port, stack.name, work, plan.new_tokens))
    cpu_after, after = stack.cpu_seconds(), stack.counters()
    metrics = checked(answer, sum(map(len, work)) * plan.new_tokens, length)
    for role, seconds in cpu_after.items():
        spent_us = (seconds - cpu_before.get(role, 0.0)) * 1e6
        metrics[f"{role.replace('-', '_')}_cpu_us_per_token"] = spent_us / metrics["tokens"]
    return metrics | per_step_metrics(before, after)
