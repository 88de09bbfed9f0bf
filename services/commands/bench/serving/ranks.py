"""`lockstep bench ranks`: first tokens, tokens/s, time in collectives and memory of a world.

Time in collectives is the canary's: it runs the sums of one decode step, in number and size, one
after the other without computation between them. A step spends at least that time in collectives;
the time that ranks wait for each other is counted in the step's time only. A step's time is the
time between two tokens of a stream.
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
from shared.errors import UsageError
from shared.measurements.canary_names import parse_decode_name

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
    """Measure first tokens per prompt length, decode per number of clients, and memory per rank.

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
            metrics = client.complete(stack, prompts.token_work(1, 1, length), 1)["metrics"]
            ttft_ms = metrics["ttft_p50_ms"]
            return {STACK: {"ttft_ms": ttft_ms, "prefill_tokens_per_s": length / ttft_ms * 1e3}}

        def measure_decode(clients: int, collectives: tuple[int, float] | None) -> Measured:
            work = prompts.token_work(clients, 1, DECODE_PROMPT_TOKENS)
            metrics = client.complete(stack, work, plan.new_tokens)["metrics"]
            return {STACK: decode_metrics(metrics, collectives, is_alone=plan.ranks == 1)}

        for length in plan.prompt_tokens:
            run = functools.partial(measure_first_token, length)
            conditions = {PART: TTFT, "prompt_tokens": length}
            measure_case(plan, report, conditions, run, warm_up=run)
        for clients in plan.clients:
            found = slowest_collectives(stack.ranks(), clients)
            run = functools.partial(measure_decode, clients, found)
            measure_case(plan, report, {PART: DECODE, "clients": clients}, run, warm_up=run)
        stack.wait_for_status()
        report.cases += memory_cases(stack.ranks())
    if plan.before is not None:
        add_changes(report, plan.before)


def memory_cases(ranks: Sequence[Mapping[str, Any]]) -> list[Case]:
    """Return a case per rank with its memory_mib (active memory of MLX) and weights_mib.

    Args:
        ranks: from `Stack.ranks`.
    """
    cases = []
    for rank in ranks:
        case = Case(conditions={PART: MEMORY, "rank": rank["rank"]})
        weights = rank.get("shard_bytes")
        case.add(STACK, {"memory_mib": rank["memory_bytes"] / 2**20})
        case.add(STACK, {"weights_mib": weights / 2**20 if weights else None})
        cases.append(case)
    return cases


def slowest_collectives(ranks: Sequence[Mapping[str, Any]], rows: int) -> tuple[int, float] | None:
    """Return how many collective sums one decode step runs, and the slowest rank's time for them.

    Args:
        ranks: from `Stack.ranks`.
        rows: sequences in the decode step.

    Returns:
        (number of sums, milliseconds of all of them) as the ranks' canaries timed them; None when
        no rank's canary has timed this number of rows, as in a world of one rank.
    """
    found = [
        (counts[0], finding["microseconds"] / 1e3)
        for rank in ranks
        for finding in rank.get("canary") or []
        if (counts := parse_decode_name(finding["name"])) is not None and counts[1] == rows
    ]
    return max(found, key=lambda one: one[1]) if found else None


def decode_metrics(
    metrics: Mapping[str, float], found: tuple[int, float] | None, *, is_alone: bool
) -> dict[str, float | None]:
    """Return the metrics of one decode repeat.

    Args:
        metrics: the load client's metrics.
        found: number and milliseconds of collectives, from `slowest_collectives`.
        is_alone: the world has one rank, whose steps have no collectives.

    Returns:
        tokens_per_s over all clients; step_ms: median time between two tokens of a stream;
        collectives_per_step: their number; collectives_ms_per_step: their milliseconds on the
        slowest rank; collectives_share: their part of step_ms. None: unknown.
    """
    step_ms = metrics.get("itl_p50_ms")
    count, spent_ms = (0, 0.0) if is_alone else found or (None, None)
    return {
        "tokens_per_s": metrics["tokens_per_s"],
        "step_ms": step_ms,
        "collectives_per_step": count,
        "collectives_ms_per_step": spent_ms,
        "collectives_share": spent_ms / step_ms if step_ms and spent_ms is not None else None,
    }


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
            if metric in COLUMNS and reference:
                case.ratios[f"{metric} {CHANGE}"] = [statistics.median(values) / reference]
    settings = {key: (before.settings.get(key), report.settings[key]) for key in report.settings}
    changed = [f"{key} {old} to {new}" for key, (old, new) in settings.items() if old != new]
    report.notes.append(
        f"{CHANGE} compares with an earlier run: {', '.join(changed) or 'same settings'}."
    )
