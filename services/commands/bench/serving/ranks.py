"""`lockstep bench ranks`: first tokens, tokens/s, parts of a step, and memory of a world.

A step's time is the time between two tokens of a stream. The parts are those of further decodes
that the ranks measure, as for `lockstep profile`. They wait for the device between the parts, so
such a step takes longer (`measured_step_ms`).
"""

import functools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from services.commands.bench.flags import number_option, numbers_option
from services.commands.bench.load.load_processes import LoadClient
from services.commands.bench.load.prompts import PromptGenerator
from services.commands.bench.measuring.noise import Measured, measure_case
from services.commands.bench.measuring.plan import StackPlan
from services.commands.bench.measuring.report import PART, Case, Report, from_json
from services.commands.bench.measuring.stack import started_stack
from services.commands.bench.serving.overhead import STACK
from services.commands.bench.serving.step_parts import (
    EXCHANGED,
    PART_TIMES,
    SHARES,
    by_rank,
    measure_steps,
    rank_metrics,
)
from shared.errors import UsageError

COLUMNS = [
    "ttft_ms",
    "prefill_tokens_per_s",
    "tokens_per_s",
    "step_ms",
    *SHARES,
    *EXCHANGED,
    "memory_mib",
    "peak_mib",
    "weights_mib",
]
COMPARED = [
    *PART_TIMES,
    *(one for one in COLUMNS if one == "measured_step_ms" or one not in SHARES),
]
"""Metrics whose change is shown: of a part its time, because a share also changes with others."""
TTFT, DECODE, MEMORY = "first token", "decode", "memory"
TABLES = "parts of a decode", "exchanges of a decode"
DECODE_PROMPT_TOKENS = 64
CHANGE = "now/before"


class RanksPlan(StackPlan, frozen=True, kw_only=True):
    """Parameters of one run of `lockstep bench ranks`, from its command line."""

    prompt_tokens: list[int]
    """Lengths of the prompts whose first token is timed."""
    clients: list[int]
    """Numbers of streams that decode at once."""
    new_tokens: int
    before: Report | None = None
    """An earlier run; each case gets the ratios of its figures to that run's."""


def read_earlier_run(file: Path | None) -> Report | None:
    """Return the report of an earlier run of `lockstep bench ranks`; without a file, None.

    Args:
        file: its `--json` document.

    Raises:
        UsageError: when the file cannot be read or belongs to another benchmark.
    """
    if file is None:
        return None
    try:
        report = from_json(file.read_bytes())
    except OSError as error:
        raise UsageError(f"Cannot read {file}: {error.strerror}.") from None
    if report.benchmark != "ranks":
        raise UsageError(f"{file} is a document of lockstep bench {report.benchmark}, not ranks.")
    return report


OPTIONS: list[click.Parameter] = [
    numbers_option(
        "--prompt-tokens", "Prompt lengths for first tokens", "1024,2048,4096", quick="256"
    ),
    numbers_option("--clients", "Numbers of streams that decode at once", "1,2,4,8", quick="1,2"),
    click.Option(
        ["--compare", "before"],
        type=click.Path(path_type=Path),
        callback=lambda _ctx, _option, file: read_earlier_run(file),
        metavar="FILE",
        help="Also print the change against an earlier run's --json document.",
    ),
    number_option("--new-tokens", "Completion length", 128, quick_max=16),
    number_option("--ranks", "World size", 2),
]
"""Options of this benchmark."""


def measure(plan: RanksPlan, report: Report) -> None:
    """Measure first tokens per prompt length, decodes per number of clients, memory per rank.

    Args:
        plan: the parameters of the benchmark.
        report: gets the cases and, with an earlier run, their changes.

    Raises:
        UnavailableError: when the stack does not start or answer.
    """
    prompts = PromptGenerator(plan.model)
    report.settings |= {
        "model": plan.model.name,
        "ranks": plan.ranks,
        "new_tokens": plan.new_tokens,
        "repeats": plan.repeats,
        **plan.settings,
    }
    with (
        LoadClient(plan.log_folder) as client,
        started_stack(plan, report, LOCKSTEP_CACHE_ENABLED="false") as stack,
    ):

        def measure_first_token(length: int) -> Measured:
            work = prompts.token_work(1, 1, length)
            ttft_ms = client.complete(stack, work, 1)["metrics"]["ttft_p50_ms"]
            return {STACK: {"ttft_ms": ttft_ms, "prefill_tokens_per_s": length / ttft_ms * 1e3}}

        def decode(clients: int) -> dict[str, float]:
            work = prompts.token_work(clients, 1, DECODE_PROMPT_TOKENS)
            found: dict[str, float] = client.complete(stack, work, plan.new_tokens)["metrics"]
            return found

        def measure_decode(clients: int) -> Measured:
            found = decode(clients)
            rate, step_ms = found["tokens_per_s"], found.get("itl_p50_ms")
            return {STACK: {"tokens_per_s": rate, "step_ms": step_ms}}

        def measure_parts(clients: int) -> Measured:
            steps = measure_steps(stack.config, clients, functools.partial(decode, clients))
            return {str(rank): one for rank, one in rank_metrics(steps).items()}

        for length in plan.prompt_tokens:
            run = functools.partial(measure_first_token, length)
            measure_case(plan, report, {PART: TTFT, "prompt_tokens": length}, run, warm_up=run)
        for clients in plan.clients:
            run = functools.partial(measure_decode, clients)
            measure_case(plan, report, {PART: DECODE, "clients": clients}, run, warm_up=run)
        # Before the measured steps, which need memory of their own.
        stack.wait_for_status()
        memory = memory_cases(stack.ranks())
        found: list[Case] = []
        for clients in plan.clients:
            run = functools.partial(measure_parts, clients)
            measure_case(plan, report, {PART: TABLES[0], "clients": clients}, run)
            found += by_rank(report.cases.pop(), TABLES, STACK)
        report.cases += [one for name in TABLES for one in found if one.conditions[PART] == name]
        report.cases += memory
    if plan.before is not None:
        add_changes(report, plan.before)


def memory_cases(ranks: Sequence[Mapping[str, Any]]) -> list[Case]:
    """Return a case per rank: memory_mib and peak_mib (active memory of MLX) and weights_mib.

    Args:
        ranks: from `Stack.ranks`.
    """
    cases = []
    for rank in ranks:
        case = Case(conditions={PART: MEMORY, "rank": rank["rank"]})
        weights = rank.get("shard_bytes")
        case.add(STACK, {"memory_mib": rank["memory_bytes"] / 2**20})
        case.add(STACK, {"peak_mib": rank["peak_bytes"] / 2**20})
        case.add(STACK, {"weights_mib": weights / 2**20 if weights else None})
        cases.append(case)
    return cases


def add_changes(report: Report, before: Report) -> None:
    """Add to each case the ratio of its median figures to those of an earlier run.

    Args:
        report: gets the ratios for cases with equal conditions, and a note on changed settings.
        before: the earlier run.
    """
    for case in report.cases:
        earlier = next((one for one in before.cases if one.conditions == case.conditions), None)
        if earlier is None:
            continue
        for metric, values in case.series[STACK].items():
            then = earlier.values(STACK, metric)
            reference = statistics.median(then) if then else 0.0
            if metric in COMPARED and reference:
                case.ratios[f"{metric} {CHANGE}"] = [statistics.median(values) / reference]
    settings = {key: (before.settings.get(key), report.settings[key]) for key in report.settings}
    changed = [f"{key} {old} to {new}" for key, (old, new) in settings.items() if old != new]
    report.notes.append(
        f"{CHANGE} compares with an earlier run: {', '.join(changed) or 'same settings'}."
    )
