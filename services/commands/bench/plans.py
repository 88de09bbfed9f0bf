"""Making of plans from command lines. Owns the lookup of models."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from services.commands.bench import random_model
from services.commands.bench.measuring.plan import BenchmarkPlan
from services.commands.bench.measuring.processes import (
    MeasuredProcess,
    bench_program,
    print_progress,
)
from services.commands.bench.measuring.report import Report
from shared.errors import UsageError
from shared.model.location import local_folder


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One subcommand of `lockstep bench`: its options, parameters and function."""

    name: str
    summary: str
    """Measured quantity, which the help text shows after the word "Measure"."""
    repeats: int
    """Default of `--repeats`."""
    options: list[click.Parameter]
    """Its own options, in the order of `--help`, after those of every benchmark."""
    plan: type[BenchmarkPlan]
    """Type of its parameters; each field has the name of an option."""
    measure: Callable[[Any, Report], None]
    """Measures as a plan of type `plan` says; adds settings, cases and notes to the report."""
    columns: list[str]
    """Metrics that the tables show, in order."""
    preset: str = "tiny"
    """Random weights that are used when neither a model nor a preset is given."""


def make_plan(benchmark: Benchmark, given: Mapping[str, Any], logs: Path) -> BenchmarkPlan:
    """Return a benchmark's parameters from the options of its command line.

    Args:
        benchmark: its entry in the table of benchmarks.
        given: option -> value; options that are not given have their defaults.
        logs: folder for the logs of child processes.

    Raises:
        UsageError: when options do not fit together or a model's folder does not exist.
        UnavailableError: when the model of a preset cannot be made.
    """
    values = {**given, "log_folder": logs}
    if values.get("model") and values.get("preset"):
        raise UsageError("--model is not allowed together with --preset: both choose the weights.")
    if values.get("model"):
        values["model"] = find_folder(values["model"])
    elif "preset" in values:
        values["model"] = _find_or_make_preset(values["preset"] or benchmark.preset, logs)
    fields = benchmark.plan.__struct_fields__
    return benchmark.plan(**{field: values[field] for field in fields if field in values})


def find_folder(model: str) -> Path:
    """Return the absolute path of a model's folder on this machine.

    Args:
        model: a folder, or "demo".

    Raises:
        UsageError: when the folder does not exist.
    """
    folder = local_folder(model)
    if folder is None:
        raise UsageError(f"{model} is not a folder: benchmarks need the model's files locally.")
    return folder.resolve()


def _find_or_make_preset(preset: str, logs: Path) -> Path:
    folder = random_model.preset_folder(preset)
    if not folder.is_dir():
        print_progress(f"making a model with random weights in {folder}")
        # A process of its own, so that MLX frees its device memory before the measurement.
        command = bench_program("random_model", str(folder), preset)
        with MeasuredProcess("the model maker", command, logs / "model.log") as maker:
            if maker.process.wait() != 0:
                raise maker.failure("failed")
    return folder
