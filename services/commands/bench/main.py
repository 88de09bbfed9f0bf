"""`lockstep bench`: command line and output of the benchmarks. Measures nothing itself.

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

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from services.commands.bench.benchmarks import BENCHMARKS
from services.commands.bench.flags import BenchmarkOptions, add_common
from services.commands.bench.measuring.report import Report, to_json, to_text
from shared import limits
from shared.errors import LockstepError, UsageError
from shared.os.standard_streams import print_line

QUICK_REPEATS = 2


class Parser(argparse.ArgumentParser):
    """Argument parser that raises UsageError and prints its help through `print_line`."""

    def error(self, message: str) -> NoReturn:
        """Raise a UsageError with the message."""
        raise UsageError(f"{message[:1].upper()}{message[1:]}. See `{self.prog} --help`.")

    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse ignores errors of writing, and the exit code would be 0.
        if message and file in (None, sys.stdout):
            print_line(message.removesuffix("\n"))
        else:
            super()._print_message(message, file)


def run(argv: list[str]) -> int:
    """Run one benchmark, print its report and return an exit code."""
    try:
        arguments = parse(argv)
        # Unwinds the stack, so that all child processes are stopped.
        signal.signal(signal.SIGTERM, _exit_on_signal)
        report, columns = _measure(arguments)
    except LockstepError as error:
        print(f"lockstep bench: {error}", file=sys.stderr)
        return error.exit_code
    print_line(to_json(report) if arguments.json else to_text(report, columns))
    return limits.EXIT_OK


def _exit_on_signal(number: int, _frame: object) -> None:
    # A second signal ends this process at once.
    signal.signal(number, signal.SIG_DFL)
    sys.exit(128 + number)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the arguments with their defaults.

    Raises:
        UsageError: when the command line is wrong.
    """
    parser = Parser(
        prog="lockstep bench",
        description="Measure Lockstep, its parts and other servers on this machine.",
    )
    commands = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, benchmark in BENCHMARKS.items():
        command = commands.add_parser(
            name, help=benchmark.summary, description=f"Measure {benchmark.summary}."
        )
        add_common(command, benchmark.repeats)
        for add_arguments in benchmark.flags:
            add_arguments(command)
    return _with_defaults(parser.parse_args(argv))


def _with_defaults(arguments: argparse.Namespace) -> argparse.Namespace:
    """Fill in flags that were not given, and apply the limits of `--quick`."""
    benchmark = BENCHMARKS[arguments.benchmark]
    defaults = benchmark.quick_defaults if arguments.quick else benchmark.defaults
    for name, value in defaults.items():
        setattr(arguments, name, getattr(arguments, name) or value)
    if arguments.quick:
        for name, most in {"repeats": QUICK_REPEATS, **benchmark.quick_limits}.items():
            setattr(arguments, name, min(getattr(arguments, name), most))
    return arguments


def _measure(arguments: argparse.Namespace) -> tuple[Report, list[str]]:
    benchmark = BENCHMARKS[arguments.benchmark]
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-logs-") as temporary:
        logs = Path(arguments.logs or temporary)
        logs.mkdir(parents=True, exist_ok=True)
        return benchmark.measure(BenchmarkOptions(arguments, logs, benchmark.preset))
