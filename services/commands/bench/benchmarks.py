"""Every benchmark in one table: its flags, its cases, and what makes its report."""

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from services.commands.bench.cache import benchmark, cache_flags
from services.commands.bench.flags import BenchmarkOptions, add_model, add_settings
from services.commands.bench.measuring.report import Report
from services.commands.bench.parts import gateway, splits, steps
from services.commands.bench.serving import overhead, overhead_command, overload, peers, ranks
from services.commands.bench.speculation import speculation_flags


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One row."""

    summary: str
    repeats: int
    flags: tuple[Callable[[argparse.ArgumentParser], None], ...]
    """What adds them to a parser, in the order of `--help`; those of all benchmarks come first."""
    measure: Callable[[BenchmarkOptions], tuple[Report, list[str]]]
    """Returns the report, and the metrics that its table shows."""
    usual: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What flags mean that are not given."""
    quick: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The same with `--quick`."""
    quick_most: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """The most of each that `--quick` does, whatever is given."""
    preset: str = "tiny"


BENCHMARKS = {
    "overhead": Benchmark(
        summary=overhead_command.SUMMARY,
        repeats=5,
        flags=(add_model, overhead_command.add_arguments, add_settings),
        measure=lambda asked: (
            overhead.measure(overhead_command.make_plan(asked)),
            overhead.COLUMNS,
        ),
        usual=overhead_command.USUAL,
        quick=overhead_command.QUICK,
    ),
    "peers": Benchmark(
        summary=peers.SUMMARY,
        repeats=5,
        flags=(add_model, overhead_command.add_arguments, add_settings, peers.add_arguments),
        measure=lambda asked: (
            peers.measure(overhead_command.make_plan(asked), asked.arguments.vllm_mlx),
            peers.COLUMNS,
        ),
        usual=overhead_command.USUAL,
        quick=overhead_command.QUICK,
    ),
    "steps": Benchmark(
        summary=steps.SUMMARY,
        repeats=5,
        flags=(steps.add_arguments,),
        measure=lambda asked: (steps.measure(steps.make_plan(asked)), steps.COLUMNS),
        quick_most={"steps": 200},
    ),
    "gateway": Benchmark(
        summary=gateway.SUMMARY,
        repeats=5,
        flags=(add_model, gateway.add_arguments),
        measure=lambda asked: (gateway.measure(gateway.make_plan(asked)), gateway.COLUMNS),
        quick_most={"tokens": 50_000},
    ),
    "cache": Benchmark(
        summary=cache_flags.SUMMARY,
        repeats=3,
        flags=(add_model, cache_flags.add_arguments, add_settings),
        measure=lambda asked: (benchmark.measure(cache_flags.make_plan(asked)), benchmark.COLUMNS),
        usual=cache_flags.USUAL,
        quick=cache_flags.QUICK,
        preset="long",
    ),
    "ranks": Benchmark(
        summary=ranks.SUMMARY,
        repeats=3,
        flags=(add_model, ranks.add_arguments, add_settings),
        measure=lambda asked: (
            ranks.measure(
                before=ranks.read_earlier_run(asked.arguments.compare), plan=ranks.make_plan(asked)
            ),
            ranks.COLUMNS,
        ),
    ),
    "overload": Benchmark(
        summary=overload.SUMMARY,
        repeats=3,
        flags=(add_model, overload.add_arguments, add_settings),
        measure=lambda asked: (overload.measure(overload.make_plan(asked)), overload.COLUMNS),
    ),
    "splits": Benchmark(
        summary=splits.SUMMARY,
        repeats=3,
        flags=(add_model, splits.add_arguments),
        measure=lambda asked: (splits.measure(splits.make_plan(asked)), splits.COLUMNS),
        preset="tiny-moe",
    ),
    "speculation": Benchmark(
        summary=speculation_flags.SUMMARY,
        repeats=5,
        flags=(speculation_flags.add_arguments, add_settings),
        measure=speculation_flags.measure,
        usual=speculation_flags.USUAL,
        quick=speculation_flags.QUICK,
        quick_most={"rounds": 2},
    ),
}
