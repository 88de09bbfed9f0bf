"""`lockstep bench step`: where the time of a decode step goes, against what memory allows.

A rank without a scheduler decodes rows of uneven lengths, greedily. Contenders are the same model
under other settings, each in a process of its own, and are measured in turn.

The parts of a step are those of one that runs alone, for which the host waits before it builds the
next one; of such steps the one of median length counts:

- nodes, nodes_per_layer: operations of the step's graph, in all and divided by the number of
  layers. The embedding, the head and sampling are among them. Compiled operations count as one.
- build_ms: the host builds the graph.
- encode_ms: the host hands the graph to the device. On a CPU MLX computes meanwhile.
- device_ms: from the first work that is handed over until the device has finished. It contains
  encode_ms. Where the host is slower than the device, the device idles in it.
- alone_ms: the whole step: build_ms and device_ms.
- step_ms: the mean time between the ends of two steps while one is built ahead, as requests see it.

With --drafts a step verifies drafts of each row, and the next one rejects them. Its plan says how
many are accepted, so it is built when the one before has ended: step_ms is then a mean of alone_ms.

With several ranks the model is divided as world.sharding says, and the figures are those of rank 0:
its share of the weights, and its host. Ranks wait for each other in every step.

A step must read the weights, of routed experts those that its tokens chose, and the KV of all rows,
and write the KV of new tokens: weights_mib and kv_mib, moved_mib together. limit_ms is the
time that this takes at device_gb_per_s, the speed at which the device changes a large array, which
is measured each time. step_per_limit is step_ms divided by limit_ms.
"""

import contextlib
import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from services.commands.bench.fake_ranks.rank_processes import (
    RankProcesses,
    default_backend,
    rank_environments,
)
from services.commands.bench.flags import BenchmarkOption, compare_option, numbers_option
from services.commands.bench.flags import number_option as number
from services.commands.bench.measuring.noise import Measured, measure_case
from services.commands.bench.measuring.plan import BenchmarkPlan
from services.commands.bench.measuring.processes import bench_program, print_progress
from services.commands.bench.measuring.report import Report
from services.commands.bench.measuring.row_lengths import uneven_lengths
from services.rank_worker.device.cuda import gpu_choice
from services.rank_worker.device.cuda.variables import enlarge_caches, keep_compiled_kernels
from shared.configuration.loading import load_config
from shared.errors import UnavailableError

COLUMNS = [
    "nodes",
    "nodes_per_layer",
    "build_ms",
    "encode_ms",
    "device_ms",
    "step_ms",
    "moved_mib",
    "limit_ms",
    "step_per_limit",
]
LOCKSTEP = "lockstep"
"""Name of the contender without settings of its own."""
COMPARED = ("step_ms", "nodes")
"""Metrics of the other contenders that are divided by those of LOCKSTEP."""
_KV_BITS = "LOCKSTEP_RANK_WORKER_KV_BITS"


class DecodeStepPlan(BenchmarkPlan, frozen=True, kw_only=True):
    """Parameters of one run of `lockstep bench step`, from its command line."""

    model: Path
    batches: list[int]
    """Numbers of rows that decode together."""
    context: list[int]
    """Lengths of the longest row in tokens."""
    ranks: list[int]
    """Numbers of ranks that share the model; each is a contender."""
    steps: int
    """Timed decode steps per repeat, alone and ahead each."""
    drafts: int
    """Drafts that each row verifies in a step."""
    kv_bits: str | None
    """Value of rank_worker.kv_bits for all contenders; None: that of the settings."""
    settings: dict[str, str]
    """LOCKSTEP_… variables of all contenders."""
    compare: dict[str, dict[str, str]]
    """Further contenders: name -> LOCKSTEP_… variables."""


OPTIONS: list[click.Parameter] = [
    numbers_option("--batches", "Numbers of rows that decode", "1,4,16,64", quick="1,4"),
    numbers_option("--context", "Lengths of the longest row in tokens", "1024", quick="256"),
    numbers_option("--ranks", "Numbers of ranks that share the model", "1"),
    number("--steps", "Timed steps per repeat", 32, quick=8),
    BenchmarkOption(
        "--drafts", "Drafts that each row verifies", 0, type=click.IntRange(min=0), metavar="N"
    ),
    BenchmarkOption(
        "--kv-bits", "Value of rank_worker.kv_bits", type=click.Choice(["0", "4", "8"])
    ),
    compare_option("Measure also with these settings, for example rank_worker.kv_bits=8"),
]
"""Options of this benchmark."""


def measure(plan: DecodeStepPlan, report: Report) -> None:
    """Measure decode steps of a model by batch and context, and of all contenders in turn.

    Args:
        plan: the parameters of the benchmark.
        report: gets one case per batch and context, and a note for each that does not fit.

    Raises:
        ConfigError: a setting is wrong.
        UnavailableError: a rank does not start, or nothing could be measured.
        UsageError: rows of a context cannot be uneven.
    """
    common = plan.settings | ({_KV_BITS: plan.kv_bits} if plan.kv_bits is not None else {})
    contenders = {LOCKSTEP: common, **{name: common | own for name, own in plan.compare.items()}}
    worlds = _name_worlds(contenders, plan.ranks)
    for _, settings in worlds.values():
        load_config(environment={**os.environ, **settings})
    for batch in plan.batches:
        for context in plan.context:
            uneven_lengths(batch, context)
    with contextlib.ExitStack() as started:
        ranks = {}
        for index, (name, (size, settings)) in enumerate(worlds.items()):
            print_progress(f"{name}: loading {plan.model.name}")
            rank = _start_ranks(plan, f"step-{index}", size, settings)
            ranks[name] = started.enter_context(contextlib.closing(rank))
        about = ranks[LOCKSTEP].descriptions[0]
        report.settings |= {
            "model": plan.model.name,
            "layers": about["layers"],
            "weights_mib": round(about["weights_mib"], 1),
            "device": about["device"],
            "ranks": plan.ranks,
            "steps": plan.steps,
            "drafts": plan.drafts,
            "repeats": plan.repeats,
        }
        for context in plan.context:
            for batch in plan.batches:
                _measure_case(plan, report, ranks, {"batch": batch, "context": context})
    if not report.cases:
        raise UnavailableError(f"Nothing was measured. {' '.join(report.notes)}")
    for name, rank in ranks.items():
        report.notes.append(f"{name} computes layers by: {_describe_layers(rank)}.")
    if about["kind"] == "cpu":
        report.notes.append(
            "On a CPU MLX computes while it is handed the work, so encode_ms contains most of "
            "device_ms. The limit is that of one core; matrix products use several, and caches."
        )


def _describe_layers(ranks: RankProcesses) -> str:
    """Return how ranks compute layers, as `lockstep status` says it; once, if all do alike."""
    return " / ".join(dict.fromkeys(about["layers_state"] for about in ranks.descriptions))


def _measure_case(
    plan: DecodeStepPlan,
    report: Report,
    ranks: Mapping[str, RankProcesses],
    conditions: dict[str, int],
) -> None:
    able = []
    for name, rank in ranks.items():
        # Not measured: kernels are compiled, and MLX meets the lengths of all repeats.
        found = rank.request(conditions | {"steps": plan.steps, "drafts": plan.drafts})[0]
        if "refused" in found:
            report.notes.append(f"{name} was not measured: {found['refused']}")
        else:
            able.append(name)
    if not able:
        return
    order = conditions | {"steps": plan.steps, "drafts": plan.drafts}
    run = functools.partial(_measure_all, {name: ranks[name] for name in able}, order)
    case = measure_case(plan, report, conditions, run)
    for name in able:
        if name != LOCKSTEP:
            case.add_ratios(name, LOCKSTEP, *COMPARED)


def _measure_all(ranks: Mapping[str, RankProcesses], order: Mapping[str, int]) -> Measured:
    return {name: rank.request(order)[0] for name, rank in ranks.items()}


def _name_worlds(
    contenders: Mapping[str, Mapping[str, str]], sizes: Sequence[int]
) -> dict[str, tuple[int, Mapping[str, str]]]:
    """Return the number of ranks and the settings of each contender, by name.

    The first number of ranks does not appear in the names.
    """
    worlds: dict[str, tuple[int, Mapping[str, str]]] = {}
    for size in sizes:
        for name, settings in contenders.items():
            suffix = "" if size == sizes[0] else f", {size} rank{'' if size == 1 else 's'}"
            worlds[f"{name}{suffix}"] = (size, settings)
    return worlds


def _start_ranks(
    plan: DecodeStepPlan, name: str, size: int, settings: Mapping[str, str]
) -> RankProcesses:
    """Start the processes of one contender and wait until they have loaded the model."""
    backend = "off" if size == 1 else default_backend()
    own = rank_environments(plan.log_folder, backend, size, one_gpu_each=backend == "nccl")
    environments = [{**os.environ, **settings, **variables} for variables in own]
    for variables in environments:
        if backend == "off":
            gpu_choice.show_one_gpu(variables, gpu_choice.count_gpus())
        enlarge_caches(variables)
        keep_compiled_kernels(variables)
    command = bench_program("fake_ranks.step_rank", str(plan.model), backend)
    return RankProcesses(name, command, environments, plan.log_folder)
