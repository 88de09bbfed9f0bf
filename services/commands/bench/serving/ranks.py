"""`lockstep bench ranks`: first tokens, tokens/s, time in collectives and memory of a world.

Time in collectives is the canary's: it runs the sums of one decode step, in number and size, one
after the other without computation between them. A step spends at least that time in collectives;
the time that ranks wait for each other is counted in the step's time only. A step's time is the
time between two tokens of a stream.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from msgspec import Struct

from services.commands.bench.flags import BenchmarkOptions, number_option, numbers_option
from services.commands.bench.load.load_processes import require_success, start_closed_loop_client
from services.commands.bench.load.prompts import PromptGenerator
from services.commands.bench.measuring import machine, noise
from services.commands.bench.measuring.numbers import spread
from services.commands.bench.measuring.processes import MeasuredProcess, print_progress
from services.commands.bench.measuring.report import PART, Case, Report, from_json
from services.commands.bench.measuring.stack import Stack
from services.commands.bench.serving.overhead import STACK, completions_order
from shared.canary_names import parse_decode_name
from shared.errors import UsageError

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
CHANGE = "now/before"


class RanksPlan(Struct, frozen=True, kw_only=True):
    """Parameters of one run of `lockstep bench ranks`, from its command line."""

    model: Path
    ranks: int
    prompt_tokens: list[int]
    clients: list[int]
    new_tokens: int
    repeats: int
    log_folder: Path
    tries: int = 1
    """Largest number of measurements per repeat while other processes use the machine."""
    settings: dict[str, str] = {}
    """LOCKSTEP_… variables for the stack."""


OPTIONS: list[click.Parameter] = [
    numbers_option(
        "--prompt-tokens",
        "Prompt lengths for first tokens",
        shown_default=",".join(map(str, LENGTHS)),
    ),
    numbers_option(
        "--clients",
        "Numbers of streams that decode at once",
        shown_default=",".join(map(str, CLIENTS)),
    ),
    click.Option(
        ["--compare"],
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Also print the change against an earlier run's --json document.",
    ),
    number_option("--new-tokens", "Completion length", 128),
    number_option("--ranks", "World size", 2),
]
"""Options of this benchmark."""


def make_plan(options: BenchmarkOptions) -> RanksPlan:
    """Return the ranks benchmark's parameters from the options of its command line.

    Raises:
        UsageError: when a setting is malformed or the model does not exist.
        UnavailableError: when the model of a preset cannot be made.
    """
    arguments = options.arguments
    quick = arguments.quick
    return RanksPlan(
        model=options.model,
        ranks=arguments.ranks,
        prompt_tokens=arguments.prompt_tokens or (QUICK_LENGTHS if quick else LENGTHS),
        clients=arguments.clients or (QUICK_CLIENTS if quick else CLIENTS),
        new_tokens=min(QUICK_TOKENS, arguments.new_tokens) if quick else arguments.new_tokens,
        repeats=arguments.repeats,
        log_folder=options.logs,
        tries=arguments.tries,
        settings=options.settings,
    )


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


def measure(plan: RanksPlan, before: Report | None = None) -> Report:
    """Measure first tokens per prompt length, decode per number of clients, and memory per rank.

    Args:
        plan: the parameters of the benchmark.
        before: an earlier run; each case gets the ratios of its figures to that run's.

    Raises:
        UnavailableError: when the stack does not start or answer.
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
    client = start_closed_loop_client(plan.log_folder)
    try:
        with Stack(plan.model, plan.ranks, plan.log_folder / "lockstep.log", settings) as stack:
            report.machine |= stack.describe()
            for length in plan.prompt_tokens:
                report.cases.append(_measure_first_token(plan, stack, client, prompts, length))
            for clients in plan.clients:
                report.cases.append(_measure_decode(plan, stack, client, prompts, clients))
            # Waits until the status has been renewed.
            stack.counters()
            report.cases += memory_cases(rank_statuses(stack.status()))
    finally:
        client.stop()
    noise.add_noise_note(report)
    if before is not None:
        add_changes(report, before)
    return report


def rank_statuses(status: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the objects under scheduler.ranks of a status document, in rank order; else [].

    Args:
        status: JSON body of the gateway's status endpoint.
    """
    world = status.get("scheduler") or {}
    return list(world.get("ranks") or [])


def memory_cases(ranks: Sequence[Mapping[str, Any]]) -> list[Case]:
    """Return a case per rank with its memory_mib (active memory of MLX) and weights_mib.

    Args:
        ranks: from `rank_statuses`.
    """
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
    """Return how many collective sums one decode step runs, and the slowest rank's time for them.

    Args:
        ranks: from `rank_statuses`.
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
    known = {_key(case): case for case in before.cases}
    for case in report.cases:
        earlier = known.get(_key(case))
        if earlier is None:
            continue
        then = earlier.series_of(STACK).metrics
        for metric, values in case.series_of(STACK).metrics.items():
            reference = spread(then[metric]).median if then.get(metric) else 0.0
            if metric in COLUMNS and reference:
                case.ratios[f"{metric} {CHANGE}"] = [spread(values).median / reference]
    settings = {key: (before.settings.get(key), report.settings[key]) for key in report.settings}
    changed = [f"{key} {old} to {new}" for key, (old, new) in settings.items() if old != new]
    report.notes.append(
        f"{CHANGE} compares with an earlier run: {', '.join(changed) or 'same settings'}."
    )


def _key(case: Case) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((key, str(value)) for key, value in case.conditions.items()))


def _measure_first_token(
    plan: RanksPlan, stack: Stack, client: MeasuredProcess, prompts: PromptGenerator, length: int
) -> Case:
    """Send prompts one after the other, each for one token."""
    case = Case(conditions={PART: TTFT, "prompt_tokens": length})
    for repeat in range(-1, plan.repeats):
        print_progress(
            f"{length} prompt tokens, " + (f"repeat {repeat + 1}" if repeat + 1 else "warm-up")
        )
        work: list[list[list[int] | str]] = [[prompts.token_prompt(length)]]

        def measure_once(work: list[list[list[int] | str]] = work) -> dict[str, float]:
            return _load_metrics(client, completions_order(stack.port, stack.name, work, 1))

        metrics, foreign = noise.measure_with_retries(measure_once, plan.tries)
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


def _measure_decode(
    plan: RanksPlan, stack: Stack, client: MeasuredProcess, prompts: PromptGenerator, clients: int
) -> Case:
    """Decode with this number of clients at once."""
    case = Case(conditions={PART: DECODE, "clients": clients})
    found = slowest_collectives(rank_statuses(stack.status()), clients)
    for repeat in range(-1, plan.repeats):
        print_progress(
            f"{clients} clients, " + (f"repeat {repeat + 1}" if repeat + 1 else "warm-up")
        )
        work: list[list[list[int] | str]] = [
            [prompts.token_prompt(DECODE_PROMPT_TOKENS)] for _ in range(clients)
        ]

        def measure_once(work: list[list[list[int] | str]] = work) -> dict[str, float]:
            order = completions_order(stack.port, stack.name, work, plan.new_tokens)
            return _load_metrics(client, order)

        metrics, foreign = noise.measure_with_retries(measure_once, plan.tries)
        if repeat >= 0:
            values = decode_metrics(metrics, found, is_alone=plan.ranks == 1)
            case.series_of(STACK).add(values | {noise.FOREIGN_CORES: foreign})
    return case


def _load_metrics(client: MeasuredProcess, order: Mapping[str, Any]) -> dict[str, float]:
    metrics: dict[str, float] = require_success(client.request(order))["metrics"]
    return metrics
