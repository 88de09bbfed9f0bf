"""Command `lockstep bench`. Owns a command per benchmark and the output; measures nothing itself.

Contenders run in turn within one run (A B A B …), so that other load on the machine affects all of
them alike. Every figure is the median over the repeats with its range; ratios are taken repeat by
repeat.

`--json` prints one document on standard output, whose shape is stable:

    {
      "schema": "lockstep.bench/1",
      "benchmark": "overhead" | "peers" | "steps" | "gateway" | "cache" | "ranks" | "overload" |
                   "splits" | "speculation",
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
`p50` and `p95` are percentiles within one repeat. Metrics that could not be measured are absent.
"""

import functools
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from services.commands.bench.benchmarks import BENCHMARKS, Benchmark
from services.commands.bench.flags import BenchmarkOptions, common_options
from services.commands.bench.measuring.report import to_json, to_text
from services.commands.cli.click_support import Command, Group
from shared import limits
from shared.errors import UsageError
from shared.os.standard_streams import print_line

QUICK_REPEATS = 2


@click.group(cls=Group)
def bench() -> None:
    """Measure Lockstep, its parts and other servers on this machine."""


def run(benchmark: Benchmark, /, **given: Any) -> int:
    """Run one benchmark, print its report and return an exit code.

    Args:
        benchmark: its entry in the table of benchmarks.
        given: option name -> value as parsed, for options that are not given their default.

    Raises:
        UsageError: when the options do not fit together.
        UnavailableError: when a measured process fails.
    """
    arguments = with_defaults(benchmark, given)
    # Unwinds the stack, so that all child processes are stopped.
    signal.signal(signal.SIGTERM, _exit_on_signal)
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-logs-") as temporary:
        logs = Path(arguments.logs or temporary)
        logs.mkdir(parents=True, exist_ok=True)
        report, columns = benchmark.measure(BenchmarkOptions(arguments, logs, benchmark.preset))
    print_line(to_json(report) if arguments.as_json else to_text(report, columns))
    return limits.EXIT_OK


def with_defaults(benchmark: Benchmark, given: Mapping[str, Any]) -> SimpleNamespace:
    """Return option values with the defaults filled in and the limits of `--quick` applied.

    Args:
        benchmark: its entry in the table of benchmarks.
        given: option name -> value as parsed.

    Raises:
        UsageError: when both --model and --preset are given.
    """
    arguments = SimpleNamespace(**given)
    if given.get("model") and given.get("preset"):
        raise UsageError("--model is not allowed together with --preset: both choose the weights.")
    defaults = benchmark.quick_defaults if arguments.quick else benchmark.defaults
    for name, value in defaults.items():
        setattr(arguments, name, getattr(arguments, name) or value)
    if arguments.quick:
        for name, most in {"repeats": QUICK_REPEATS, **benchmark.quick_limits}.items():
            setattr(arguments, name, min(getattr(arguments, name), most))
    return arguments


def _exit_on_signal(number: int, _frame: object) -> None:
    # A second signal ends this process at once.
    signal.signal(number, signal.SIG_DFL)
    sys.exit(128 + number)


for _name, _benchmark in BENCHMARKS.items():
    bench.add_command(
        Command(
            _name,
            params=[*common_options(_benchmark.repeats), *_benchmark.options],
            callback=functools.partial(run, _benchmark),
            help=f"Measure {_benchmark.summary}.",
            short_help=f"Measure {_benchmark.summary}.",
        )
    )
