"""`lockstep bench ranks`: what a world of ranks gives: first tokens, tokens/s, collectives, memory.

Time in collectives is the canary's: as many sums, of the same size, as the graph of a decode has,
one after the other and with nothing between them. It is the least that a step can spend there; what
ranks wait for each other besides is part of the step's time. A step's time is that between two
tokens of a stream.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from services.commands.bench.flags import BenchmarkOptions, positive_int, positive_ints
from services.commands.bench.load.prompts import PromptGenerator
from services.commands.bench.measuring import machine, noise
from services.commands.bench.measuring.numbers import spread
from services.commands.bench.measuring.processes import MeasuredProcess, print_progress
from services.commands.bench.measuring.report import PART, Case, Report, from_json
from services.commands.bench.measuring.stack import Stack
from services.commands.bench.serving.overhead import load_order, start_client
from shared.canary_names import read_decode_name
from shared.errors import UnavailableError, UsageError

COLUMNS = [
    "ttft_ms",
    "prefill_tokens_per_s",
    "tokens_per_s",
    "step_ms",
    "collectives_per_step",
    "collectives_ms_per_step",
    "collectives_share",
    "memory_mib",
    "weights_mib",
]
TTFT, DECODE, MEMORY = "first token", "decode", "memory"
LENGTHS, CLIENTS = [1_024, 2_048, 4_096], [1, 2, 4, 8]
QUICK_LENGTHS, QUICK_CLIENTS, QUICK_TOKENS = [256], [1, 2], 16
SUMMARY = "first tokens, tokens/s, time in collectives and memory of a world of ranks"
DECODE_PROMPT_TOKENS = 64
STACK = "lockstep"
CHANGE = "now/before"


class RanksPlan(Struct, frozen=True, kw_only=True):
    """What to measure."""

    model: Path
    ranks: int
    prompt_tokens: list[int]
    clients: list[int]
    new_tokens: int
    repeats: int
    log_folder: Path
    tries: int = 1
    """Measurements of one repeat while others use the machine."""
    settings: dict[str, str] = {}
    """LOCKSTEP_… variables for the stack."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the benchmark its own flags."""
    parser.add_argument("--prompt-tokens", type=positive_ints, help="(default 1024,2048,4096)")
    parser.add_argument(
        "--clients", type=positive_ints, help="that decode at once (default 1,2,4,8)"
    )
    parser.add_argument(
        "--compare", metavar="FILE", type=Path, help="an earlier run's --json: print the change"
    )
    parser.add_argument("--new-tokens", type=positive_int, default=128, help="completion length")
    parser.add_argument("--ranks", type=positive_int, default=2)


def make_plan(asked: BenchmarkOptions) -> RanksPlan:
    """Return what the command line asks for.

    Raises:
        UsageError: a setting cannot be understood, or there is no such model.
        UnavailableError: a model could not be made.
    """
    arguments = asked.arguments
    quick = arguments.quick
    return RanksPlan(
        model=asked.model,
        ranks=arguments.ranks,
        prompt_tokens=arguments.prompt_tokens or (QUICK_LENGTHS if quick else LENGTHS),
        clients=arguments.clients or (QUICK_CLIENTS if quick else CLIENTS),
        new_tokens=min(QUICK_TOKENS, arguments.new_tokens) if quick else arguments.new_tokens,
        repeats=arguments.repeats,
        log_folder=asked.logs,
        tries=arguments.tries,
        settings=asked.settings,
    )


def read_earlier_run(file: Path | None) -> Report | None:
    """Read an earlier run; None where none is asked for.

    Raises:
        UsageError: it cannot be read, or is of another benchmark.
    """
    if file is None:
        return None
    try:
        report = from_json(file.read_bytes())
    except OSError as error:
        raise UsageError(f"Cannot read {file}: {error.strerror}.") from None
    if report.benchmark != "ranks":
        raise UsageError(f"{file} is of lockstep bench {report.benchmark}, not ranks.")
    return report


def measure(plan: RanksPlan, before: Report | None = None) -> Report:
    """Run every case.

    Args:
        plan: what to measure.
        before: an earlier run, to compare with.

    Raises:
        UnavailableError: the stack does not start or answer.
    """
    prompts = PromptGenerator(plan.model)
    report = Report(
        benchmark="ranks",
        machine=machine.describe(),
        settings={
            "model": plan.model.name,
            "ranks": plan.ranks,
            "new_tokens": plan.new_tokens,
            "repeats": plan.repeats,
            **plan.settings,
        },
    )
    settings = {"LOCKSTEP_CACHE_ENABLED": "false", **plan.settings}
    client = start_client(plan.log_folder)
    try:
        with Stack(plan.model, plan.ranks, plan.log_folder / "lockstep.log", settings) as stack:
            report.machine |= stack.describe()
            for length in plan.prompt_tokens:
                report.cases.append(_first_token(plan, stack, client, prompts, length))
            for clients in plan.clients:
                report.cases.append(_decode(plan, stack, client, prompts, clients))
            stack.counters()
            report.cases += memory_cases(rank_statuses(stack.status()))
    finally:
        client.stop()
    noise.add_noise_note(report)
    if before is not None:
        add_changes(report, before)
    return report


def rank_statuses(status: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what a gateway's status says of each rank, in rank order."""
    world = status.get("scheduler") or {}
    return list(world.get("ranks") or [])


def memory_cases(ranks: Sequence[Mapping[str, Any]]) -> list[Case]:
    """Return a case per rank: what MLX has in use after the load, and how much of it is weights."""
    cases = []
    for rank in ranks:
        case = Case(conditions={PART: MEMORY, "rank": rank["rank"]})
        weights = rank.get("shard_bytes")
        case.series_of(STACK).add(
            {
                "memory_mib": rank["memory_bytes"] / 2**20,
                "weights_mib": weights / 2**20 if weights else None,
            }
        )
        cases.append(case)
    return cases


def slowest_collectives(ranks: Sequence[Mapping[str, Any]], rows: int) -> tuple[int, float] | None:
    """Return how many sums a decode has, and the milliseconds of the slowest rank for them.

    None: no rank has timed so many rows, as where there is only one.
    """
    found = [
        (positive_ints[0], finding["microseconds"] / 1e3)
        for rank in ranks
        for finding in rank.get("canary") or []
        if (positive_ints := read_decode_name(finding["name"])) is not None
        and positive_ints[1] == rows
    ]
    return max(found, key=lambda one: one[1]) if found else None


def decode_metrics(
    metrics: Mapping[str, float], found: tuple[int, float] | None, *, is_alone: bool
) -> dict[str, float | None]:
    """Return the metrics of one decode repeat.

    Args:
        metrics: of the load client.
        found: what `slowest_collectives` gave.
        is_alone: one rank computes alone: its steps have no collectives.
    """
    step_ms = metrics.get("itl_p50_ms")
    positive_int, spent_ms = (0, 0.0) if is_alone else found or (None, None)
    return {
        "tokens_per_s": metrics["tokens_per_s"],
        "step_ms": step_ms,
        "collectives_per_step": positive_int,
        "collectives_ms_per_step": spent_ms,
        "collectives_share": spent_ms / step_ms if step_ms and spent_ms is not None else None,
    }


def add_changes(report: Report, before: Report) -> None:
    """Put the change of every figure that an earlier run has too into the report's ratios."""
    known = {_key(case): case for case in before.cases}
    for case in report.cases:
        read_earlier_run = known.get(_key(case))
        if read_earlier_run is None:
            continue
        then = read_earlier_run.series_of(STACK).metrics
        for metric, values in case.series_of(STACK).metrics.items():
            reference = spread(then[metric]).median if then.get(metric) else 0.0
            if metric in COLUMNS and reference:
                case.ratios[f"{metric} {CHANGE}"] = [spread(values).median / reference]
    settings = {key: (before.settings.get(key), report.settings[key]) for key in report.settings}
    changed = [f"{key} {old} to {new}" for key, (old, new) in settings.items() if old != new]
    report.notes.append(f"{CHANGE} compares with an earlier run: {', '.join(changed) or 'as now'}.")


def _key(case: Case) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((key, str(value)) for key, value in case.conditions.items()))


def _first_token(
    plan: RanksPlan, stack: Stack, client: MeasuredProcess, prompts: PromptGenerator, length: int
) -> Case:
    """Send prompts one after the other; each asks for one token."""
    case = Case(conditions={PART: TTFT, "prompt_tokens": length})
    for repeat in range(-1, plan.repeats):
        print_progress(
            f"{length} prompt tokens, " + (f"repeat {repeat + 1}" if repeat + 1 else "warm")
        )
        work: list[list[list[int] | str]] = [[prompts.token_prompt(length)]]

        def ask(work: list[list[list[int] | str]] = work) -> dict[str, float]:
            return checked(client.request(load_order(stack.port, stack.name, work, 1)))

        metrics, foreign = noise.measure_with_retries(ask, plan.tries)
        if repeat < 0:
            continue
        ttft_ms = metrics["ttft_p50_ms"]
        case.series_of(STACK).add(
            {
                "ttft_ms": ttft_ms,
                "prefill_tokens_per_s": length / ttft_ms * 1e3,
                noise.FOREIGN_CORES: foreign,
            }
        )
    return case


def _decode(
    plan: RanksPlan, stack: Stack, client: MeasuredProcess, prompts: PromptGenerator, clients: int
) -> Case:
    """Let so many sequences decode at once."""
    case = Case(conditions={PART: DECODE, "clients": clients})
    found = slowest_collectives(rank_statuses(stack.status()), clients)
    for repeat in range(-1, plan.repeats):
        print_progress(f"{clients} clients, " + (f"repeat {repeat + 1}" if repeat + 1 else "warm"))
        work: list[list[list[int] | str]] = [
            [prompts.token_prompt(DECODE_PROMPT_TOKENS)] for _ in range(clients)
        ]

        def ask(work: list[list[list[int] | str]] = work) -> dict[str, float]:
            return checked(
                client.request(load_order(stack.port, stack.name, work, plan.new_tokens))
            )

        metrics, foreign = noise.measure_with_retries(ask, plan.tries)
        if repeat >= 0:
            values = decode_metrics(metrics, found, is_alone=plan.ranks == 1)
            case.series_of(STACK).add(values | {noise.FOREIGN_CORES: foreign})
    return case


def checked(answer: Mapping[str, Any]) -> dict[str, float]:
    """Return the load client's metrics. Raises UnavailableError when requests failed."""
    if answer["problems"]:
        raise UnavailableError(f"Requests failed: {answer['problems'][0]}")
    metrics: dict[str, float] = answer["metrics"]
    return metrics
