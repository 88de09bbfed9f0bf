"""Command `lockstep bench`. Owns a command per benchmark and the output; measures nothing itself.

Contenders run in turn within one run (A B A B …), so that other load on the machine affects all of
them alike. Every figure is the median over the repeats with its range; ratios are taken repeat by
repeat.

`--json` prints one document on standard output, whose shape is stable:

    {
      "schema": "lockstep.bench/1",
      "benchmark": "overhead" | "peers" | "steps" | "step" | "prefill" | "accuracy" |
                   "gateway" | "cache" | "ranks" | "overload" | "recovery" | "start" |
                   "splits" | "speculation" | "structured",
      "machine": {"system": …, "processor": …, "cores": …, "memory_gib": …, "mlx": …, …},
      "settings": {…},                    parameters of the run
      "cases": [
        {
          "conditions": {"prompt_tokens": 64, "clients": 16},
          "series": {                     contender -> metric -> figure
            "lockstep": {
              "tokens_per_s": {"median": …, "low": …, "high": …, "values": [one per repeat]}
            }
          },
          "ratios": {"lockstep/batch_generator tokens_per_s": figure}
        }
      ],
      "notes": ["…"]
    }

A metric's name contains its unit; `ttft` is the time to first token, `itl` the time between tokens,
`p50` and `p95` are percentiles within one repeat. Metrics that could not be measured are absent. A
benchmark that ends early prints the same document of its cases so far, with a note.
"""

import functools
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from services.commands.bench.benchmarks import BENCHMARKS
from services.commands.bench.flags import common_options
from services.commands.bench.measuring import machine, noise
from services.commands.bench.measuring.report import Report, to_json, to_text
from services.commands.bench.plans import Benchmark, make_plan
from services.commands.cli.click_support import Command, Group
from shared import limits
from shared.errors import OutputLost
from shared.os import standard_streams


@click.group(cls=Group)
def bench() -> None:
    """Measure Lockstep, its parts and other servers on this machine."""


def run(benchmark: Benchmark, /, **given: Any) -> int:
    """Run one benchmark, print its report and return an exit code.

    If a signal or an error ends it early, the report has its cases so far, and a note.

    Args:
        benchmark: its entry in the table of benchmarks.
        given: option name -> value as parsed, for options that are not given their default.

    Raises:
        UsageError: when the options do not fit together.
        UnavailableError: when a measured process fails.
    """
    # Unwinds the stack, so that all child processes are stopped.
    signal.signal(signal.SIGTERM, _exit_on_signal)
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-logs-") as temporary:
        logs = Path(given["logs"] or temporary)
        logs.mkdir(parents=True, exist_ok=True)
        plan = make_plan(benchmark, given, logs)
        report = Report(
            benchmark=benchmark.name, machine=machine.describe(), columns=benchmark.columns
        )
        try:
            benchmark.measure(plan, report)
        except BaseException:
            report.cases = [case for case in report.cases if case.series]
            report.notes.append("The benchmark was ended early: not all was measured.")
            if report.cases:
                _print_if_possible(report, as_json=given["as_json"])
            raise
    _print(report, as_json=given["as_json"])
    return limits.EXIT_OK


def _print(report: Report, *, as_json: bool) -> None:
    noise.add_noise_note(report)
    standard_streams.print_line(to_json(report) if as_json else to_text(report))


def _print_if_possible(report: Report, *, as_json: bool) -> None:
    """Print a report; the error that has ended its benchmark counts, not one of standard output."""
    try:
        _print(report, as_json=as_json)
    except BrokenPipeError:
        standard_streams.discard_output()
    except OutputLost as error:
        click.echo(f"lockstep: {error}", err=True)


def _exit_on_signal(number: int, _frame: object) -> None:
    # A second signal ends this process at once.
    signal.signal(number, signal.SIG_DFL)
    sys.exit(128 + number)


for _benchmark in BENCHMARKS.values():
    bench.add_command(
        Command(
            _benchmark.name,
            params=[*common_options(_benchmark.repeats), *_benchmark.options],
            callback=functools.partial(run, _benchmark),
            help=f"Measure {_benchmark.summary}.",
            short_help=f"Measure {_benchmark.summary}.",
        )
    )
