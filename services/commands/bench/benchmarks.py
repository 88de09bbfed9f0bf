"""Table of all benchmarks with their options, defaults and measuring functions."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import click

from services.commands.bench.cache import benchmark as cache
from services.commands.bench.flags import MODEL_OPTIONS, SETTINGS_OPTION, BenchmarkOptions
from services.commands.bench.measuring.report import Report
from services.commands.bench.parts import gateway, splits, steps
from services.commands.bench.serving import overhead, overload, peers, ranks
from services.commands.bench.speculation import benchmark as speculation
from services.commands.bench.speculation import text_check


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One subcommand of `lockstep bench`: its options, their defaults and its function."""

    summary: str
    """Measured quantity, which the help text shows after the word "Measure"."""
    repeats: int
    """Default of `--repeats`."""
    options: list[click.Parameter]
    """Its own options, in the order of `--help`, after those of every benchmark."""
    measure: Callable[[BenchmarkOptions], tuple[Report, list[str]]]
    """Returns the report and the metrics that its tables show."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Option -> value when it is not given, without `--quick`."""
    quick_defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Option -> value when it is not given, with `--quick`."""
    quick_limits: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Option -> largest value with `--quick`, also when the option is given."""
    preset: str = "tiny"
    """Random weights that are used when neither a model nor a preset is given."""


def _measure_speculation(options: BenchmarkOptions) -> tuple[Report, list[str]]:
    plan = speculation.make_plan(options)
    if options.arguments.check:
        return text_check.measure(plan, options.arguments.check), text_check.COLUMNS
    return speculation.measure(plan), speculation.COLUMNS


BENCHMARKS = {
    "overhead": Benchmark(
        summary=overhead.SUMMARY,
        repeats=5,
        options=[*MODEL_OPTIONS, *overhead.OPTIONS, SETTINGS_OPTION],
        measure=lambda options: (
            overhead.measure(overhead.make_plan(options)),
            overhead.COLUMNS,
        ),
        defaults=overhead.DEFAULTS,
        quick_defaults=overhead.QUICK_DEFAULTS,
    ),
    "peers": Benchmark(
        summary=peers.SUMMARY,
        repeats=5,
        options=[*MODEL_OPTIONS, *overhead.OPTIONS, SETTINGS_OPTION, peers.VLLM_MLX_OPTION],
        measure=lambda options: (
            peers.measure(overhead.make_plan(options), options.arguments.vllm_mlx),
            peers.COLUMNS,
        ),
        defaults=overhead.DEFAULTS,
        quick_defaults=overhead.QUICK_DEFAULTS,
    ),
    "steps": Benchmark(
        summary=steps.SUMMARY,
        repeats=5,
        options=steps.OPTIONS,
        measure=lambda options: (steps.measure(steps.make_plan(options)), steps.COLUMNS),
        quick_limits={"steps": 200},
    ),
    "gateway": Benchmark(
        summary=gateway.SUMMARY,
        repeats=5,
        options=[*MODEL_OPTIONS, *gateway.OPTIONS],
        measure=lambda options: (gateway.measure(gateway.make_plan(options)), gateway.COLUMNS),
        quick_limits={"tokens": 50_000},
    ),
    "cache": Benchmark(
        summary=cache.SUMMARY,
        repeats=3,
        options=[*MODEL_OPTIONS, *cache.OPTIONS, SETTINGS_OPTION],
        measure=lambda options: (cache.measure(cache.make_plan(options)), cache.COLUMNS),
        defaults=cache.DEFAULTS,
        quick_defaults=cache.QUICK_DEFAULTS,
        preset="long",
    ),
    "ranks": Benchmark(
        summary=ranks.SUMMARY,
        repeats=3,
        options=[*MODEL_OPTIONS, *ranks.OPTIONS, SETTINGS_OPTION],
        measure=lambda options: (
            ranks.measure(
                before=ranks.read_earlier_run(options.arguments.compare),
                plan=ranks.make_plan(options),
            ),
            ranks.COLUMNS,
        ),
    ),
    "overload": Benchmark(
        summary=overload.SUMMARY,
        repeats=3,
        options=[*MODEL_OPTIONS, *overload.OPTIONS, SETTINGS_OPTION],
        measure=lambda options: (overload.measure(overload.make_plan(options)), overload.COLUMNS),
    ),
    "splits": Benchmark(
        summary=splits.SUMMARY,
        repeats=3,
        options=[*MODEL_OPTIONS, *splits.OPTIONS],
        measure=lambda options: (splits.measure(splits.make_plan(options)), splits.COLUMNS),
        preset="tiny-moe",
    ),
    "speculation": Benchmark(
        summary=speculation.SUMMARY,
        repeats=5,
        options=[*speculation.OPTIONS, SETTINGS_OPTION],
        measure=_measure_speculation,
        defaults=speculation.DEFAULTS,
        quick_defaults=speculation.DEFAULTS,
        quick_limits={"rounds": 2},
    ),
}
