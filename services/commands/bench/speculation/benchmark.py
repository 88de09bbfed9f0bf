"""`lockstep bench speculation`: the same requests with and without drafts, in turn.

Both contenders use the same processes; a field of each request turns drafts on or off. The prefix
cache is off, so that both compute the same tokens, and decoding is greedy, so that both must write
the same text. Drafts are proposed by n-grams, or by a draft model or head that the ranks load
beside the model.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from services.commands.bench.flags import names_option, number_option, numbers_option
from services.commands.bench.load.load_processes import LoadClient, request_body
from services.commands.bench.measuring.noise import Measured, measure_case
from services.commands.bench.measuring.plan import StackPlan
from services.commands.bench.measuring.report import Case, Report
from services.commands.bench.measuring.stack import Stack, started_stack
from services.commands.bench.plans import find_folder
from services.commands.bench.speculation.request_generator import KINDS, RequestGenerator
from shared.errors import UnavailableError, UsageError
from shared.messages import DraftStatistics
from shared.model.location import DEMO, demo_folder

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


class SpeculationPlan(StackPlan, frozen=True, kw_only=True):
    """Parameters of one run of `lockstep bench speculation`, from its command line."""

    texts: list[str]
    """Kinds of text, from `request_generator`."""
    clients: list[int]
    new_tokens: int
    """Longest completion; a model may end earlier, at the same token with and without drafts."""
    rounds: int
    """Requests that each client sends per repeat, one after the other."""
    method: str = NGRAM
    """Method that proposes drafts, one of METHODS."""
    draft_model: Path | None = None
    """Folder of the draft model or head; None for n-grams."""
    check: int | None = None
    """Number of requests whose texts are only compared; None: measure."""

    @property
    def is_demo(self) -> bool:
        """The model is the built-in demo model."""
        return self.model.resolve() == demo_folder().resolve()

    @property
    def contenders(self) -> tuple[str, str]:
        """Return the names of the contenders: without drafts and with drafts."""
        return OFF, self.method

    @property
    def stack_settings(self) -> dict[str, str]:
        """Return this benchmark's own LOCKSTEP_… variables for the stack."""
        settings = {"LOCKSTEP_CACHE_ENABLED": "false"}
        if self.draft_model is not None:
            settings["LOCKSTEP_SPECULATION_METHOD"] = self.method
            settings["LOCKSTEP_SPECULATION_DRAFT_MODEL"] = str(self.draft_model)
        return settings

    def describe(self) -> dict[str, str]:
        """Return name -> value of the parameters on drafts that reports show."""
        draft_model = {"draft_model": self.draft_model.name} if self.draft_model else {}
        return {"method": self.method, **draft_model}


def _find_draft_model(
    ctx: click.Context, _option: click.Parameter, draft_model: str | None
) -> Path | None:
    if (draft_model is None) != (ctx.params["method"] == NGRAM):
        raise UsageError(
            "Methods draft_model and eagle need --draft-model, and ngram does not allow it."
        )
    return find_folder(draft_model) if draft_model else None


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
        # The callback of --draft-model reads it.
        is_eager=True,
        help="Source of drafts (default ngram).",
    ),
    click.Option(
        ["--draft-model"],
        type=click.Path(),
        callback=_find_draft_model,
        metavar="FOLDER",
        help="The draft model or head of the method.",
    ),
    number_option(
        "--check", "Only compare the texts of N requests of all kinds, with and without drafts"
    ),
    names_option("--texts", KINDS, "Kinds of text"),
    numbers_option("--clients", "Numbers of concurrent clients", "1,8"),
    number_option("--new-tokens", "Longest completion", 256),
    number_option("--rounds", "Requests per client and repeat", 4, quick_max=2),
    number_option("--ranks", "World size", 1),
]
"""Options of this benchmark."""


def measure(plan: SpeculationPlan, report: Report) -> None:
    """Measure tokens/s with and without drafts for each kind of text and number of clients.

    Args:
        plan: the parameters of the benchmark.
        report: gets one case per kind and number, and reasons to distrust it as notes.

    Raises:
        UnavailableError: when the stack does not start or answer.
    """
    report.settings |= {
        "model": plan.model.name,
        "texts": "requests from the demo model's training" if plan.is_demo else "general requests",
        "new_tokens": f"at most {plan.new_tokens}",
        "rounds": plan.rounds,
        "repeats": plan.repeats,
        **plan.describe(),
        "order": f"{', '.join(plan.contenders)}, and back",
        **plan.settings,
    }
    with (
        LoadClient(plan.log_folder) as client,
        started_stack(plan, report, **plan.stack_settings) as stack,
    ):
        for kind, clients in itertools.product(plan.texts, plan.clients):
            requests = RequestGenerator(kind, clients, is_demo=plan.is_demo)
            orders = itertools.cycle([plan.contenders, plan.contenders[::-1]])
            run = functools.partial(
                _measure_contenders, plan, stack, client, requests, clients, orders
            )
            # The warm-up also lets the scheduler learn the cost of drafts for this batch size.
            conditions = {"text": kind, "clients": clients}
            case = measure_case(plan, report, conditions, run, warm_up=run)
            case.add_ratios(plan.method, OFF, "tokens_per_s", "ttft_p50_ms")
            report.notes += reliability_notes(case)


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
        differing = sum(case.values(name, "texts_differing"))
        if differing:
            texts = sum(case.values(name, "texts"))
            notes.append(
                f"{where}: {differing:.0f} of {texts:.0f} texts differ between "
                f"{name} and {OFF}, although decoding is greedy."
            )
        if not case.values(name, "acceptance"):
            notes.append(
                f"{where}: {name} had no draft verified, so the ratio shows only the search's cost."
            )
    if case.values(OFF, "acceptance"):
        notes.append(f"{where}: drafts were verified for requests with speculation off.")
    return notes


def require_equal_work(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the load client's answer unchanged if all contenders had the same work.

    Args:
        answer: result of `LoadClient.load`.

    Raises:
        UnavailableError: when prompts were found in a prefix cache.
    """
    if answer["metrics"]["cached_tokens"]:
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


def _measure_contenders(
    plan: SpeculationPlan,
    stack: Stack,
    client: LoadClient,
    requests: RequestGenerator,
    clients: int,
    orders: Iterator[tuple[str, ...]],
) -> Measured:
    work = [[requests.next() for _ in range(plan.rounds)] for _ in range(clients)]
    answers, drafts = {}, {}
    before = DraftTotals.of(stack.drafts())
    for name in next(orders):
        answers[name] = send_work(plan, stack, client, requests.path, work, name)
        after = DraftTotals.of(stack.drafts())
        drafts[name] = DraftTotals(after.rows - before.rows, after.accepted - before.accepted)
        before = after
    reference = answers[OFF]["texts"]
    return {
        name: contender_metrics(answers[name], reference, drafts[name]) for name in plan.contenders
    }


def send_work(
    plan: SpeculationPlan,
    stack: Stack,
    client: LoadClient,
    path: str,
    work: Sequence[Sequence[Mapping[str, Any]]],
    method: str,
) -> dict[str, Any]:
    """Put one load with one speculation method on the stack; return the load client's answer.

    Args:
        plan: the parameters of the benchmark.
        stack: the running stack.
        client: the load client.
        path: path of the endpoint.
        work: per client the fields of the requests that it sends one after the other.
        method: value of `speculation.method` in all requests; "off" for no drafts.

    Raises:
        UnavailableError: when requests failed or prompts were found in a prefix cache.
    """
    clients = [
        [
            request_body(stack.model, plan.new_tokens, speculation={"method": method}, **fields)
            for fields in each
        ]
        for each in work
    ]
    return require_equal_work(client.load(stack, path, clients))
