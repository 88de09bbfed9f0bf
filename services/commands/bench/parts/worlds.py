"""Worlds of ranks that a benchmark runs without a scheduler, one per contender, measured in turn.

Contenders are the same model under other settings or on other numbers of ranks, each in processes
of its own.
"""

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from services.commands.bench.fake_ranks.rank_processes import (
    RankProcesses,
    default_backend,
    rank_environments,
)
from services.commands.bench.measuring.noise import Measured, measure_case
from services.commands.bench.measuring.plan import BenchmarkPlan
from services.commands.bench.measuring.processes import (
    bench_program,
    last_line,
    print_progress,
)
from services.commands.bench.measuring.report import Report
from services.rank_worker.device.cuda import gpu_choice
from services.rank_worker.device.cuda.variables import enlarge_caches, keep_compiled_kernels
from shared.configuration.loading import load_config
from shared.errors import UnavailableError

LOCKSTEP = "lockstep"
"""Name of the contender without settings of its own."""

Worlds = Mapping[str, RankProcesses]
"""Name of the contender -> its ranks."""


class WorldsPlan(BenchmarkPlan, frozen=True, kw_only=True):
    """Parameters of a benchmark of worlds, from its command line."""

    model: Path
    ranks: list[int]
    """Numbers of ranks that share the model; each is a contender."""
    settings: dict[str, str]
    """LOCKSTEP_… variables of all contenders."""
    compare: dict[str, dict[str, str]]
    """Further contenders: name -> LOCKSTEP_… variables."""


def check_settings(plan: WorldsPlan) -> None:
    """Check the settings of all contenders as a rank worker checks them.

    Raises:
        ConfigError: one is wrong.
    """
    for size, settings in _name_worlds(plan).values():
        load_config(environment={**os.environ, **settings, **_world_size(size)})


@contextlib.contextmanager
def started_worlds(plan: WorldsPlan, report: Report) -> Iterator[Worlds]:
    """Start the ranks of all contenders, which load the model, and stop them at the end.

    The report gets the model, the device and the numbers of ranks as settings, a note for each
    contender that does not start and is left out, and at the end a note on how each other one
    computes layers.

    Args:
        plan: the parameters of the benchmark.
        report: receives settings and notes.

    Raises:
        UnavailableError: the contender without settings does not start, or the report has no case
            at the end.
    """
    with contextlib.ExitStack() as started:
        worlds = {}
        for index, (name, (size, settings)) in enumerate(_name_worlds(plan).items()):
            print_progress(f"{name}: loading {plan.model.name}")
            try:
                ranks = start_ranks(plan, f"{report.benchmark}-{index}", size, settings)
            except UnavailableError as error:
                if name == LOCKSTEP:
                    raise
                report.notes.append(f"{name} was not measured: {last_line(error)}")
                continue
            worlds[name] = started.enter_context(contextlib.closing(ranks))
        about = worlds[LOCKSTEP].descriptions[0]
        report.settings |= {
            "model": plan.model.name,
            "layers": about["layers"],
            "weights_mib": round(about["weights_mib"], 1),
            "device": about["device"],
            "ranks": plan.ranks,
            "repeats": plan.repeats,
        }
        yield worlds
        if not report.cases:
            raise UnavailableError(f"Nothing was measured. {' '.join(report.notes)}")
        for name, ranks in worlds.items():
            report.notes.append(f"{name} computes layers by: {_describe_layers(ranks)}.")


def measure_worlds(
    plan: WorldsPlan,
    report: Report,
    worlds: Worlds,
    conditions: Mapping[str, int],
    order: Mapping[str, int],
    compared: Sequence[str],
) -> None:
    """Measure one case in all contenders, in turn.

    Args:
        plan: the parameters of the benchmark.
        report: gets the case, or a note on each contender that cannot measure it.
        worlds: the contenders.
        conditions: of the case.
        order: what ranks get besides the conditions.
        compared: metrics of the other contenders that are divided by those of LOCKSTEP.
    """
    whole = {**conditions, **order}
    able = {}
    for name, ranks in worlds.items():
        # Not measured: kernels are compiled, and MLX meets the lengths of all repeats.
        found = ranks.request(whole)[0]
        if "refused" in found:
            report.notes.append(f"{name} was not measured: {found['refused']}")
        else:
            able[name] = ranks
    if not able:
        return
    case = measure_case(plan, report, conditions, functools.partial(_measure_all, able, whole))
    for name in able:
        if name != LOCKSTEP:
            case.add_ratios(name, LOCKSTEP, *compared)


def _world_size(size: int) -> dict[str, str]:
    return {"LOCKSTEP_WORLD_SIZE": str(size)}


def _measure_all(worlds: Worlds, order: Mapping[str, int]) -> Measured:
    return {name: ranks.request(order)[0] for name, ranks in worlds.items()}


def _describe_layers(ranks: RankProcesses) -> str:
    """Return how ranks compute layers, as `lockstep status` says it; once, if all do alike."""
    return " / ".join(dict.fromkeys(about["layers_state"] for about in ranks.descriptions))


def _name_worlds(plan: WorldsPlan) -> dict[str, tuple[int, Mapping[str, str]]]:
    """Return the number of ranks and the settings of each contender, by name.

    The first number of ranks does not appear in the names.
    """
    contenders = {LOCKSTEP: plan.settings}
    contenders |= {name: plan.settings | own for name, own in plan.compare.items()}
    worlds: dict[str, tuple[int, Mapping[str, str]]] = {}
    for size in plan.ranks:
        for name, settings in contenders.items():
            plural = "" if size == 1 else "s"
            suffix = "" if size == plan.ranks[0] else f", {size} rank{plural}"
            worlds[f"{name}{suffix}"] = (size, settings)
    return worlds


def start_ranks(
    plan: WorldsPlan,
    name: str,
    size: int,
    settings: Mapping[str, str],
    program: str = "fake_ranks.step_rank",
) -> RankProcesses:
    """Start the processes of one contender and wait until they have loaded the model.

    Args:
        plan: says which model.
        name: of the contender, for log files.
        size: number of ranks.
        settings: LOCKSTEP_… variables, and others of the processes.
        program: module of the processes; its arguments are the model and the backend.

    Raises:
        UnavailableError: a rank does not start.
    """
    backend = "off" if size == 1 else default_backend()
    own = rank_environments(plan.log_folder, backend, size, one_gpu_each=backend == "nccl")
    environments = [
        {**os.environ, **settings, **_world_size(size), **variables} for variables in own
    ]
    for variables in environments:
        if backend == "off":
            gpu_choice.show_one_gpu(variables, gpu_choice.count_gpus())
        enlarge_caches(variables)
        keep_compiled_kernels(variables)
    command = bench_program(program, str(plan.model), backend)
    return RankProcesses(name, command, environments, plan.log_folder)
