"""`lockstep bench speculation`: the same requests with and without drafts, in turn.

Both run on the very same processes: a field of the request says whether it gets drafts. There is no
prefix cache, so that both compute the same. Everything is greedy, so both must write the same text.
Drafts are proposed by n-grams, or by a draft model or head that the ranks load beside the model.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from services.commands.bench.cache.testbed import TIMEOUT_S, body
from services.commands.bench.measuring import machine, noise
from services.commands.bench.measuring.processes import MeasuredProcess, print_progress
from services.commands.bench.measuring.report import Case, Report
from services.commands.bench.measuring.stack import Stack
from services.commands.bench.serving.overhead import start_client
from services.commands.bench.speculation.request_generator import RequestGenerator
from shared.errors import UnavailableError
from shared.messages import DraftStatistics
from shared.model.location import demo_folder

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
"""As the field `speculation` of a request names them."""


class SpeculationPlan(Struct, frozen=True, kw_only=True):
    """What to measure."""

    model: Path
    ranks: int
    texts: list[str]
    """Kinds of `speculation_texts`."""
    clients: list[int]
    new_tokens: int
    """Longest completion; a model may end earlier, with and without drafts at the same token."""
    rounds: int
    """RequestGenerator that each client sends, one after the other."""
    repeats: int
    log_folder: Path
    tries: int = 1
    """Measurements of one repeat while others use the machine."""
    settings: dict[str, str] = {}
    """LOCKSTEP_… variables for the stack."""
    method: str = NGRAM
    """How drafts are proposed."""
    draft_model: Path | None = None
    """Folder of the draft model or head; None for n-grams."""

    @property
    def contenders(self) -> tuple[str, str]:
        """Without drafts and with them."""
        return OFF, self.method

    @property
    def stack_settings(self) -> dict[str, str]:
        """LOCKSTEP_… variables of the stack, this benchmark's own counted in."""
        settings = {"LOCKSTEP_CACHE_ENABLED": "false"}
        if self.draft_model is not None:
            settings["LOCKSTEP_SPECULATION_METHOD"] = self.method
            settings["LOCKSTEP_SPECULATION_DRAFT_MODEL"] = str(self.draft_model)
        return {**settings, **self.settings}


def measure(plan: SpeculationPlan) -> Report:
    """Run every kind of text with every number of clients.

    Raises:
        UnavailableError: the stack does not start or answer.
    """
    is_demo = plan.model.resolve() == demo_folder().resolve()
    report = Report(
        benchmark="speculation",
        machine=machine.describe(),
        settings={
            "model": plan.model.name,
            "texts": "what the demo model has learnt" if is_demo else "what people ask for",
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
    client = start_client(plan.log_folder)
    try:
        with Stack(plan.model, plan.ranks, plan.log_folder / "lockstep.log", settings) as stack:
            report.machine |= stack.describe()
            for kind in plan.texts:
                for count in plan.clients:
                    requests = RequestGenerator(kind, count, is_demo=is_demo)
                    case = Case(conditions={"text": kind, "clients": count})
                    _measure_case(plan, stack, client, requests, case)
                    report.cases.append(case)
                    report.notes += notes(case)
    finally:
        client.stop()
    noise.add_noise_note(report)
    return report


def notes(case: Case) -> list[str]:
    """Return what a reader must know before trusting a case's ratio."""
    said = []
    where = ", ".join(f"{name} {value}" for name, value in case.conditions.items())
    for name in [name for name in case.series if name != OFF]:
        metrics = case.series_of(name).metrics
        differing = sum(metrics.get("texts_differing", []))
        if differing:
            said.append(
                f"{where}: {differing:.0f} of {sum(metrics['texts']):.0f} texts differ between "
                f"{name} and {OFF}, though nothing is left to chance."
            )
        if not metrics.get("acceptance"):
            said.append(
                f"{where}: {name} had no draft verified, so the ratio is that of looking for them."
            )
    if case.series_of(OFF).metrics.get("acceptance"):
        said.append(f"{where}: drafts were verified for requests that asked for none.")
    return said


def checked(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the load client's answer when it is one.

    Raises:
        UnavailableError: requests failed, or prompts were found in a prefix cache.
    """
    if answer["problems"]:
        raise UnavailableError(f"RequestGenerator failed: {answer['problems'][0]}")
    if answer["metrics"]["cached_tokens"]:
        raise UnavailableError("Prompts were found in a prefix cache: the work was not equal.")
    return answer


@dataclasses.dataclass(frozen=True, slots=True)
class DraftTotals:
    """Counts of drafts over all methods."""

    rows: int
    """Rows whose drafts were verified; one row is one sequence in one step."""
    accepted: int

    @classmethod
    def of(cls, statistics: Sequence[DraftStatistics]) -> "DraftTotals":
        """Return the sums over methods."""
        return cls(sum(one.rows for one in statistics), sum(one.accepted for one in statistics))


def metrics_of(
    answer: Mapping[str, Any], reference: Sequence[str], drafts: DraftTotals
) -> dict[str, float | None]:
    """Return one contender's metrics.

    Args:
        answer: of the load client.
        reference: the texts without drafts, of the same requests.
        drafts: the scheduler's counts during this contender's turn.
    """
    metrics = answer["metrics"]
    accepted, rejected = answer["drafts"]["accepted"], answer["drafts"]["rejected"]
    tokens, verified = metrics["tokens"], accepted + rejected
    pairs = zip(answer["texts"], reference, strict=True)
    return {
        "tokens_per_s": metrics["tokens_per_s"],
        "ttft_p50_ms": metrics.get("ttft_p50_ms"),
        "tokens": tokens,
        # Every step gives a request one token that was no draft.
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
        kind = case.conditions["text"]
        print_progress(
            f"{kind}, {count} clients, " + (f"repeat {repeat + 1}" if repeat + 1 else "warm")
        )
        order = plan.contenders if repeat % 2 else plan.contenders[::-1]

        def turn(order: tuple[str, ...] = order) -> dict[str, dict[str, float | None]]:
            work = [[requests.next() for _ in range(plan.rounds)] for _ in range(count)]
            answers, grown = {}, {}
            before = DraftTotals.of(stack.drafts())
            for name in order:
                load = load_order(plan, stack, requests.path, work, name)
                answers[name] = checked(client.request(load))
                after = DraftTotals.of(stack.drafts())
                grown[name] = DraftTotals(
                    after.rows - before.rows, after.accepted - before.accepted
                )
                before = after
            reference = answers[OFF]["texts"]
            return {name: metrics_of(answers[name], reference, grown[name]) for name in answers}

        if repeat < 0:
            # Also lets the server learn what drafts cost with so many requests.
            turn()
            continue
        found, foreign = noise.measure_with_retries(turn, plan.tries)
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
    """Return what the load client is told: per client its requests, all with this method."""
    return {
        "host": "127.0.0.1",
        "port": stack.port,
        "path": path,
        "clients": [
            [
                body(stack.name, plan.new_tokens, speculation={"method": method}, **fields)
                for fields in each
            ]
            for each in work
        ],
        "timeout_s": TIMEOUT_S,
    }
