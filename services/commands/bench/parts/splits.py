"""`lockstep bench splits`: one rank against tensor, expert and pipeline splits over several ranks.

The ranks run without a scheduler, so that only devices and links are compared. The contenders run
one after the other, because a device cannot hold all their models at once. A rank's step has three
parts: compute (its graphs alone, with collectives that return their argument), collectives (the
same number and sizes, without computation between them) and waiting, which is the rest. A metric
that ends in "_most" is the largest of all ranks; the JSON document contains every rank's.
"""

import json
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import click
from msgspec import Struct

from services.commands.bench.fake_ranks.rank_processes import (
    RankProcesses,
    default_backend,
    rank_environments,
)
from services.commands.bench.flags import BenchmarkOptions, names_option, numbers_option
from services.commands.bench.measuring import machine
from services.commands.bench.measuring.processes import print_progress
from services.commands.bench.measuring.report import PART, Case, Report
from shared.errors import UnavailableError, UsageError

SUMMARY = "one rank against tensor, expert and pipeline splits: time per step and where it goes"
SPLITTINGS = ("one", "tensor", "expert", "pipeline")
BACKENDS = ("auto", "ring", "nccl")
COLUMNS = [
    "step_ms",
    "tokens_per_s",
    "compute_ms_most",
    "collectives_ms_most",
    "waiting_ms_most",
    "collectives",
    "weights_mib_most",
]
BATCHES, PREFILLS, STEPS = [1, 8, 32], [256, 2_048], 32
QUICK_BATCHES, QUICK_PREFILLS, QUICK_STEPS = [1, 8], [256], 8
PARTS = ("compute_ms", "collectives_ms", "waiting_ms")

_PROGRAM = [sys.executable, "-m", "services.commands.bench.fake_ranks.split_rank"]


class SplitsPlan(Struct, frozen=True, kw_only=True):
    """Parameters of one run of `lockstep bench splits`, from its command line."""

    model: Path
    ranks: int
    backend: str
    splittings: list[str]
    """Contenders, from SPLITTINGS; "one" is a single rank with the whole model."""
    batches: list[int]
    """Numbers of rows that decode together."""
    prefills: list[int]
    """Lengths of prompts in tokens."""
    steps: int
    """Timed decode steps per repeat."""
    repeats: int
    log_folder: Path


OPTIONS: list[click.Parameter] = [
    click.Option(
        ["--ranks"],
        type=int,
        default=2,
        metavar="N",
        help="Ranks that share the model (default 2).",
    ),
    click.Option(
        ["--backend"],
        type=click.Choice(BACKENDS),
        default="auto",
        help="Backend of the collectives; auto: nccl with a GPU per rank if MLX is built for CUDA, "
        "else ring (default auto).",
    ),
    names_option("--splittings", SPLITTINGS, "Splits to measure"),
    numbers_option("--batches", "Numbers of rows that decode", shown_default="1,8,32"),
    numbers_option("--prefills", "Prompt lengths in tokens", shown_default="256,2048"),
    click.Option(
        ["--steps"],
        type=int,
        metavar="N",
        help=f"Decode steps per repeat (default {STEPS}).",
    ),
]
"""Options of this benchmark."""


def make_plan(options: BenchmarkOptions) -> SplitsPlan:
    """Return the splits benchmark's parameters from the options of its command line.

    Raises:
        UsageError: when --ranks is less than 2 or the model does not exist.
        UnavailableError: when the model of a preset cannot be made.
    """
    arguments = options.arguments
    if arguments.ranks < 2:
        raise UsageError(f"--ranks {arguments.ranks}: give 2 or more.")
    quick = arguments.quick
    return SplitsPlan(
        model=options.model,
        ranks=arguments.ranks,
        backend=default_backend() if arguments.backend == "auto" else arguments.backend,
        splittings=arguments.splittings or list(SPLITTINGS),
        batches=arguments.batches or (QUICK_BATCHES if quick else BATCHES),
        prefills=arguments.prefills or (QUICK_PREFILLS if quick else PREFILLS),
        steps=arguments.steps or (QUICK_STEPS if quick else STEPS),
        repeats=arguments.repeats,
        log_folder=options.logs,
    )


def measure(plan: SplitsPlan) -> Report:
    """Time decode steps and prefills of one rank and of each way to split the model over ranks.

    A contender that does not start is left out and noted in the report.

    Raises:
        UnavailableError: when no contender starts.
    """
    report = Report(
        benchmark="splits",
        machine=machine.describe(),
        settings={
            "model": plan.model.name,
            "ranks": plan.ranks,
            "backend": plan.backend,
            "steps": plan.steps,
            "repeats": plan.repeats,
        },
    )
    for batch in plan.batches:
        report.cases.append(Case(conditions={PART: "decode", "batch": batch}))
    for tokens in plan.prefills:
        report.cases.append(Case(conditions={PART: "prefill", "tokens": tokens}))
    for name in plan.splittings:
        try:
            with closing(_start_ranks(plan, name)) as world:
                _measure_contender(plan, name, report, world)
        except UnavailableError as error:
            report.notes.append(f"{name} was not measured: {_last_line(str(error))}")
    if not any(case.series for case in report.cases):
        raise UnavailableError(f"Nothing was measured. {' '.join(report.notes)}")
    for case in report.cases:
        for name in list(case.series):
            for reference in ("one", "tensor"):
                if reference in case.series and name not in ("one", reference):
                    case.add_ratio("tokens_per_s", name, reference)
    return report


def _start_ranks(plan: SplitsPlan, name: str) -> RankProcesses:
    size = 1 if name == "one" else plan.ranks
    sharding = "none" if name == "one" else name
    backend = "off" if name == "one" else plan.backend
    environments = rank_environments(
        plan.log_folder, backend, size, one_gpu_each=plan.backend == "nccl"
    )
    command = [*_PROGRAM, backend, str(plan.model), sharding]
    return RankProcesses(name, command, environments, plan.log_folder)


def _measure_contender(plan: SplitsPlan, name: str, report: Report, world: RankProcesses) -> None:
    for case in report.cases:
        conditions = case.conditions
        decodes = conditions[PART] == "decode"
        order: dict[str, Any] = {"phase": conditions[PART]}
        order |= (
            {"batch": conditions["batch"], "steps": plan.steps}
            if decodes
            else {"tokens": conditions["tokens"]}
        )
        for repeat in range(plan.repeats):
            print_progress(f"{name}: {json.dumps(order)}, {repeat + 1} of {plan.repeats}")
            case.series_of(name).add(_metrics(order, world.request(order), world.descriptions))


def _metrics(
    order: Mapping[str, Any], found: list[dict[str, Any]], descriptions: list[dict[str, Any]]
) -> dict[str, float]:
    """Return the metrics of one measurement; lists have one entry per rank."""
    step_ms = max(one["step_ms"] for one in found)
    tokens = order["batch"] if order["phase"] == "decode" else order["tokens"]
    figures = {
        "step_ms": step_ms,
        "tokens_per_s": tokens / step_ms * 1e3,
        "collectives": max(one["collectives"] for one in found),
        "weights_mib_most": max(one["weights_mib"] for one in descriptions),
    }
    for part in PARTS:
        figures[f"{part}_most"] = max(one[part] for one in found)
    for rank, one in enumerate(found):
        figures |= {f"{part}_rank_{rank}": one[part] for part in PARTS}
        figures[f"weights_mib_rank_{rank}"] = descriptions[rank]["weights_mib"]
    return figures


def _last_line(text: str) -> str:
    """Return the last line of an error's text, which is the last line of a log."""
    return text.strip().splitlines()[-1][:500]
