"""`lockstep bench speculation`: the same requests with and without drafts, in turn.

Both contenders use the same processes; a field of each request turns drafts on or off. The prefix
cache is off, so that both compute the same tokens, and decoding is greedy, so that both must write
the same text. Drafts are proposed by n-grams, or by a draft model or head that the ranks load
beside the model.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from msgspec import Struct

from services.commands.bench.flags import (
    BenchmarkOptions,
    find_folder,
    names_option,
    number_option,
    numbers_option,
)
from services.commands.bench.load.load_processes import (
    closed_loop_order,
    request_body,
    require_success,
    start_closed_loop_client,
)
from services.commands.bench.measuring import machine, noise
from services.commands.bench.measuring.processes import MeasuredProcess, print_progress
from services.commands.bench.measuring.report import Case, Report
from services.commands.bench.measuring.stack import Stack
from services.commands.bench.speculation.request_generator import KINDS, RequestGenerator
from shared.errors import UnavailableError, UsageError
from shared.messages import DraftStatistics
from shared.model.location import DEMO, demo_folder

SUMMARY = "tokens/s with and without drafts, on text that repeats itself and on text that does not"
DEFAULTS = {"texts": list(KINDS)}
COLUMNS = [
    "tokens_per_s",
    "ttft_p50_ms",
    "tokens_per_step",
    "accepted_per_draft_run",
    "acceptance",
    "texts_differing",
]
OFF, NGRAM = "off", "ngram"
METHODS = (NGRAM, "draft_model", "eagle")
"""Values of `speculation.method` in a request."""


class SpeculationPlan(Struct, frozen=True, kw_only=True):
    """Parameters of one run of `lockstep bench speculation`, from its command line."""

    model: Path
    ranks: int
    texts: list[str]
    """Kinds of text, from `request_generator`."""
    clients: list[int]
    new_tokens: int
    """Longest completion; a model may end earlier, at the same token with and without drafts."""
    rounds: int
    """Requests that each client sends per repeat, one after the other."""
    repeats: int
    log_folder: Path
    tries: int = 1
    """Largest number of measurements per repeat while other processes use the machine."""
    settings: dict[str, str] = {}
    """LOCKSTEP_… variables for the stack."""
    method: str = NGRAM
    """Method that proposes drafts, one of METHODS."""
    draft_model: Path | None = None
    """Folder of the draft model or head; None for n-grams."""

    @property
    def contenders(self) -> tuple[str, str]:
        """Return the names of the contenders: without drafts and with drafts."""
        return OFF, self.method

    @property
    def stack_settings(self) -> dict[str, str]:
        """Return the stack's LOCKSTEP_… variables: this benchmark's own, then those of the plan."""
        settings = {"LOCKSTEP_CACHE_ENABLED": "false"}
        if self.draft_model is not None:
            settings["LOCKSTEP_SPECULATION_METHOD"] = self.method
            settings["LOCKSTEP_SPECULATION_DRAFT_MODEL"] = str(self.draft_model)
        return {**settings, **self.settings}


OPTIONS: list[click.Parameter] = [
    click.Option(
        ["--model"],
        type=click.Path(),
        default=DEMO,
        metavar="FOLDER",
        help="A trained model's folder (default demo); random weights do not write such texts.",
    ),
    click.Option(
        ["--method"],
        type=click.Choice(METHODS),
        default=NGRAM,
        help="Source of drafts (default ngram).",
    ),
    click.Option(
        ["--draft-model"],
        type=click.Path(),
        metavar="FOLDER",
        help="The draft model or head of the method.",
    ),
    number_option(
        "--check", "Only compare the texts of N requests of all kinds, with and without drafts"
    ),
    names_option("--texts", KINDS, "Kinds of text"),
    numbers_option("--clients", "Numbers of concurrent clients", "1,8"),
    number_option("--new-tokens", "Longest completion", 256),
    number_option("--rounds", "Requests per client and repeat", 4),
    number_option("--ranks", "World size", 1),
]
"""Options of this benchmark."""


def make_plan(options: BenchmarkOptions) -> SpeculationPlan:
    """Return the speculation benchmark's parameters from the options of its command line.

    Raises:
        UsageError: when a setting is malformed, a folder does not exist, or --draft-model does not
            fit the method.
    """
    arguments = options.arguments
    if (arguments.draft_model is None) != (arguments.method == NGRAM):
        raise UsageError(
            "Methods draft_model and eagle need --draft-model, and ngram does not allow it."
        )
    draft_model = find_folder(arguments.draft_model) if arguments.draft_model else None
    return SpeculationPlan(
        model=options.model,
        method=arguments.method,
        draft_model=draft_model,
        ranks=arguments.ranks,
        texts=arguments.texts,
        clients=arguments.clients,
        new_tokens=arguments.new_tokens,
        rounds=arguments.rounds,
        repeats=arguments.repeats,
        log_folder=options.logs,
        tries=arguments.tries,
        settings=options.settings,
    )


def measure(plan: SpeculationPlan) -> Report:
    """Measure tokens/s with and without drafts for each kind of text and number of clients.

    Raises:
        UnavailableError: when the stack does not start or answer.
    """
    is_demo = plan.model.resolve() == demo_folder().resolve()
    report = Report(
        benchmark="speculation",
        machine=machine.describe(),
        settings={
            "model": plan.model.name,
            "texts": "requests from the demo model's training" if is_demo else "general requests",
            "new_tokens": f"at most {plan.new_tokens}",
            "rounds": plan.rounds,
            "repeats": plan.repeats,
            "method": plan.method,
            **({"draft_model": plan.draft_model.name} if plan.draft_model else {}),
            "order": f"{', '.join(plan.contenders)}, and back",
            **plan.settings,
        },
    )
    settings = plan.stack_settings
    client = start_closed_loop_client(plan.log_folder)
    try:
        with Stack(plan.model, plan.ranks, plan.log_folder / "lockstep.log", settings) as stack:
            report.machine |= stack.describe()
            for kind in plan.texts:
                for count in plan.clients:
                    requests = RequestGenerator(kind, count, is_demo=is_demo)
                    case = Case(conditions={"text": kind, "clients": count})
                    _measure_case(plan, stack, client, requests, case)
                    report.cases.append(case)
                    report.notes += reliability_notes(case)
    finally:
        client.stop()
    noise.add_noise_note(report)
    return report


def reliability_notes(case: Case) -> list[str]:
    """Return the reasons to distrust a case's ratios, if any.

    These are texts that differ with and without drafts, a contender whose drafts were never
    verified, and drafts that were verified although the request turned them off.

    Args:
        case: the repeats of both contenders.
    """
    notes = []
    where = ", ".join(f"{name} {value}" for name, value in case.conditions.items())
    for name in [name for name in case.series if name != OFF]:
        metrics = case.series_of(name).metrics
        differing = sum(metrics.get("texts_differing", []))
        if differing:
            notes.append(
                f"{where}: {differing:.0f} of {sum(metrics['texts']):.0f} texts differ between "
                f"{name} and {OFF}, although decoding is greedy."
            )
        if not metrics.get("acceptance"):
            notes.append(
                f"{where}: {name} had no draft verified, so the ratio shows only the search's cost."
            )
    if case.series_of(OFF).metrics.get("acceptance"):
        notes.append(f"{where}: drafts were verified for requests with speculation off.")
    return notes


def require_equal_work(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the load client's answer unchanged if all contenders had the same work.

    Args:
        answer: JSON object of the closed-loop client.

    Raises:
        UnavailableError: when requests failed or prompts were found in a prefix cache.
    """
    if require_success(answer)["metrics"]["cached_tokens"]:
        raise UnavailableError("Prompts were found in a prefix cache: the work was not equal.")
    return answer


@dataclasses.dataclass(frozen=True, slots=True)
class DraftTotals:
    """Counts of rows whose drafts were verified and of accepted drafts, over all methods."""

    rows: int
    """Rows whose drafts were verified; one row is one sequence in one step."""
    accepted: int
    """Accepted drafts."""

    @classmethod
    def of(cls, statistics: Sequence[DraftStatistics]) -> "DraftTotals":
        """Return the sums over the statistics of all drafting methods."""
        return cls(sum(one.rows for one in statistics), sum(one.accepted for one in statistics))


def contender_metrics(
    answer: Mapping[str, Any], reference: Sequence[str], drafts: DraftTotals
) -> dict[str, float | None]:
    """Return one contender's metrics of one repeat.

    Args:
        answer: the load client's answer.
        reference: the texts of the same requests without drafts.
        drafts: the scheduler's counts while this contender ran.

    Returns:
        tokens_per_s; ttft_p50_ms (median); tokens and texts (totals); tokens_per_step of one
        request (mean); accepted_per_draft_run (mean accepted drafts per row with drafts);
        acceptance (share of verified drafts that were accepted); texts_differing (number of texts
        that differ from the reference). None: nothing to divide by.
    """
    metrics = answer["metrics"]
    accepted, rejected = answer["drafts"]["accepted"], answer["drafts"]["rejected"]
    tokens, verified = metrics["tokens"], accepted + rejected
    pairs = zip(answer["texts"], reference, strict=True)
    return {
        "tokens_per_s": metrics["tokens_per_s"],
        "ttft_p50_ms": metrics.get("ttft_p50_ms"),
        "tokens": tokens,
        # Every step gives a request exactly one token that was not a draft.
        "tokens_per_step": tokens / (tokens - accepted) if tokens > accepted else None,
        "accepted_per_draft_run": drafts.accepted / drafts.rows if drafts.rows else None,
        "acceptance": accepted / verified if verified else None,
        "texts": len(answer["texts"]),
        "texts_differing": sum(text != other for text, other in pairs),
    }


def _measure_case(
    plan: SpeculationPlan,
    stack: Stack,
    client: MeasuredProcess,
    requests: RequestGenerator,
    case: Case,
) -> None:
    count = int(case.conditions["clients"])
    for repeat in range(-1, plan.repeats):
        step = f"repeat {repeat + 1}" if repeat >= 0 else "warm-up"
        print_progress(f"{case.conditions['text']}, {count} clients, {step}")
        order = plan.contenders if repeat % 2 else plan.contenders[::-1]

        def measure_all(order: tuple[str, ...] = order) -> dict[str, dict[str, float | None]]:
            work = [[requests.next() for _ in range(plan.rounds)] for _ in range(count)]
            answers, drafts = {}, {}
            before = DraftTotals.of(stack.drafts())
            for name in order:
                load = load_order(plan, stack, requests.path, work, name)
                answers[name] = require_equal_work(client.request(load))
                after = DraftTotals.of(stack.drafts())
                drafts[name] = DraftTotals(
                    after.rows - before.rows, after.accepted - before.accepted
                )
                before = after
            reference = answers[OFF]["texts"]
            return {
                name: contender_metrics(answers[name], reference, drafts[name]) for name in answers
            }

        if repeat < 0:
            # The warm-up also lets the scheduler learn the cost of drafts for this batch size.
            measure_all()
            continue
        found, foreign = noise.measure_with_retries(measure_all, plan.tries)
        for name in plan.contenders:
            case.series_of(name).add(found[name] | {noise.FOREIGN_CORES: foreign})
    for metric in ("tokens_per_s", "ttft_p50_ms"):
        case.add_ratio(metric, plan.method, OFF)


def load_order(
    plan: SpeculationPlan,
    stack: Stack,
    path: str,
    work: Sequence[Sequence[Mapping[str, Any]]],
    method: str,
) -> dict[str, Any]:
    """Return the JSON object that orders one load, with one speculation method, from the client.

    Args:
        plan: the parameters of the benchmark.
        stack: the running stack.
        path: path of the endpoint.
        work: per client the fields of the requests that it sends one after the other.
        method: value of `speculation.method` in all requests; "off" for no drafts.
    """
    clients = [
        [
            request_body(stack.name, plan.new_tokens, speculation={"method": method}, **fields)
            for fields in each
        ]
        for each in work
    ]
    return closed_loop_order(stack.port, path, clients)
