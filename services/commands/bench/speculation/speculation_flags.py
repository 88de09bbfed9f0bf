"""The flags of `lockstep bench speculation`."""

import argparse

from services.commands.bench.flags import (
    BenchmarkOptions,
    listed_names,
    positive_int,
    positive_ints,
)
from services.commands.bench.measuring.report import Report
from services.commands.bench.speculation import benchmark, request_generator, text_check
from services.commands.bench.speculation.benchmark import SpeculationPlan
from shared.errors import UsageError
from shared.model.location import DEMO, local_folder

SUMMARY = "tokens/s with and without drafts, on text that repeats itself and on text that not"
USUAL = QUICK = {"texts": list(request_generator.KINDS)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the benchmark its own flags."""
    parser.add_argument(
        "--model",
        metavar="FOLDER",
        default=DEMO,
        help="a trained model's folder (default demo): random weights write no such texts",
    )
    parser.add_argument("--method", choices=benchmark.METHODS, default=benchmark.NGRAM)
    parser.add_argument("--draft-model", metavar="FOLDER", help="a draft model or head to compare")
    text = "only compare the texts of so many requests of all kinds, with drafts and without"
    parser.add_argument("--check", type=positive_int, metavar="N", help=text)
    kinds = ",".join(request_generator.KINDS)
    parser.add_argument("--texts", type=_texts, help=f"comma-separated (default {kinds})")
    parser.add_argument("--clients", type=positive_ints, default=[1, 8], help="comma-separated")
    parser.add_argument("--new-tokens", type=positive_int, default=256, help="longest completion")
    parser.add_argument(
        "--rounds", type=positive_int, default=4, help="requests per client and repeat"
    )
    parser.add_argument("--ranks", type=positive_int, default=1)


def make_plan(asked: BenchmarkOptions) -> SpeculationPlan:
    """Return what the command line asks for.

    Raises:
        UsageError: a setting cannot be understood, a folder is not there, or a method has not got
            the draft model that it needs.
    """
    arguments = asked.arguments
    if (arguments.draft_model is None) != (arguments.method == benchmark.NGRAM):
        raise UsageError("--draft-model: methods draft_model and eagle need it, ngram has none.")
    draft = local_folder(arguments.draft_model) if arguments.draft_model else None
    if arguments.draft_model and draft is None:
        raise UsageError(f"{arguments.draft_model} is no folder: benchmarks need the files here.")
    return SpeculationPlan(
        model=asked.model,
        method=arguments.method,
        draft_model=draft.resolve() if draft else None,
        ranks=arguments.ranks,
        texts=arguments.texts,
        clients=arguments.clients,
        new_tokens=arguments.new_tokens,
        rounds=arguments.rounds,
        repeats=arguments.repeats,
        log_folder=asked.logs,
        tries=arguments.tries,
        settings=asked.settings,
    )


def measure(asked: BenchmarkOptions) -> tuple[Report, list[str]]:
    """Measure, or compare texts where that is what is asked for; return the report's columns too.

    Raises:
        UsageError: the command line asks for what there is not.
        UnavailableError: the stack does not start or answer.
    """
    plan = make_plan(asked)
    if asked.arguments.check:
        return text_check.measure(plan, asked.arguments.check), text_check.COLUMNS
    return benchmark.measure(plan), benchmark.COLUMNS


def _texts(text: str) -> list[str]:
    return listed_names(text, "text", request_generator.KINDS)
