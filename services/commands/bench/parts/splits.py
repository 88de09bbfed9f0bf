"""`lockstep bench splits`: one rank against all splits of a model over several ranks.

The ranks run without a scheduler, so that only devices and links are compared. The contenders run
one after the other, because a device cannot hold all their models at once. A rank's step has three
parts: compute (its graphs alone, with collectives that return their argument), collectives (the
same number and sizes, without computation between them) and waiting, which is the rest. A metric
that ends in "_most" is the largest of all ranks; the JSON document contains every rank's.

Where experts are divided, `imbalance` is the load of each layer's busiest rank over the mean of its
ranks, and `foreign_share` the part of a rank's assignments whose experts are on other ranks.
"""

import itertools
import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from services.commands.bench.fake_ranks.rank_processes import (
    RankProcesses,
    default_backend,
    rank_environments,
)
from services.commands.bench.flags import (
    BenchmarkOption,
    names_option,
    number_option,
    numbers_option,
)
from services.commands.bench.measuring.plan import BenchmarkPlan
from services.commands.bench.measuring.processes import (
    bench_program,
    last_line,
    print_progress,
)
from services.commands.bench.measuring.report import PART, Case, Report
from shared.errors import UnavailableError, UsageError
from shared.measurements.expert_balance import rank_imbalance

SPLITTINGS = ("one", "tensor", "expert", "tensor+expert", "pipeline")
BACKENDS = ("auto", "ring", "nccl")
COLUMNS = [
    "step_ms",
    "tokens_per_s",
    "compute_ms_most",
    "collectives_ms_most",
    "waiting_ms_most",
    "collectives",
    "weights_mib_most",
    "imbalance",
    "foreign_share_most",
]
PARTS = ("compute_ms", "collectives_ms", "waiting_ms")

_PROGRAM = bench_program("fake_ranks.split_rank")


class SplitsPlan(BenchmarkPlan, frozen=True, kw_only=True):
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


def _two_or_more(_ctx: click.Context, _option: click.Parameter, ranks: int) -> int:
    if ranks < 2:
        raise UsageError(f"--ranks {ranks}: give 2 or more.")
    return ranks


OPTIONS: list[click.Parameter] = [
    BenchmarkOption(
        "--ranks",
        "Ranks that share the model",
        2,
        type=int,
        callback=_two_or_more,
        metavar="N",
    ),
    click.Option(
        ["--backend"],
        type=click.Choice(BACKENDS),
        default="auto",
        callback=lambda _ctx, _option, name: default_backend() if name == "auto" else name,
        help="Backend of the collectives; auto: nccl with a GPU per rank if MLX is built for CUDA, "
        "else ring (default auto).",
    ),
    names_option("--splittings", SPLITTINGS, "Splits to measure"),
    numbers_option("--batches", "Numbers of rows that decode", "1,8,32", quick="1,8"),
    numbers_option("--prefills", "Prompt lengths in tokens", "256,2048", quick="256"),
    number_option("--steps", "Decode steps per repeat", 32, quick=8),
]
"""Options of this benchmark."""


def measure(plan: SplitsPlan, report: Report) -> None:
    """Time decode steps and prefills of one rank and of each way to split the model over ranks.

    Args:
        plan: the parameters of the benchmark.
        report: gets one case per batch and per length of prompts, and a note for each contender
            that does not start and is left out.

    Raises:
        UnavailableError: when no contender starts.
    """
    report.settings |= {
        "model": plan.model.name,
        "ranks": plan.ranks,
        "backend": plan.backend,
        "steps": plan.steps,
        "repeats": plan.repeats,
    }
    for batch in plan.batches:
        report.cases.append(Case(conditions={PART: "decode", "batch": batch}))
    for tokens in plan.prefills:
        report.cases.append(Case(conditions={PART: "prefill", "tokens": tokens}))
    for name in plan.splittings:
        try:
            with closing(_start_ranks(plan, name)) as world:
                _measure_contender(plan, name, report, world)
        except UnavailableError as error:
            report.notes.append(f"{name} was not measured: {last_line(error)}")
    if not any(case.series for case in report.cases):
        raise UnavailableError(f"Nothing was measured. {' '.join(report.notes)}")
    for case in report.cases:
        for name, reference in itertools.product(case.series, ("one", "tensor")):
            if name not in ("one", reference):
                case.add_ratios(name, reference, "tokens_per_s")


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
        order = {**case.conditions, "phase": case.conditions[PART]}
        del order[PART]
        if order["phase"] == "decode":
            order["steps"] = plan.steps
        for repeat in range(plan.repeats):
            print_progress(f"{name}: {json.dumps(order)}, {repeat + 1} of {plan.repeats}")
            case.add(name, _metrics(order, world.request(order), world.descriptions))


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
    return figures | _expert_metrics([one["assignments"] for one in found])


def _expert_metrics(assignments: list[list[list[int]]]) -> dict[str, float]:
    """Return imbalance and foreign shares; {} where no rank lacks any expert.

    Args:
        assignments: of each rank those to its own experts and to all experts, by layer.
    """
    foreign = [1.0 - sum(own) / sum(whole) if sum(whole) else 0.0 for own, whole in assignments]
    # Ranks of a pipeline have layers of their own.
    if not any(foreign) or len({len(own) for own, _ in assignments}) > 1:
        return {}
    by_layer = list(zip(*(own for own, _ in assignments), strict=True))
    shares = {f"foreign_share_rank_{rank}": share for rank, share in enumerate(foreign)}
    return {
        "imbalance": rank_imbalance(by_layer),
        "foreign_share_most": max(foreign),
        **shares,
    }
