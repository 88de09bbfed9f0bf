"""`lockstep bench …`: the command lines of the benchmarks.

Contenders run in turn within one run (A B A B …), so that what else the machine does hits all of
them alike; every figure is the median over the repeats with its range, and ratios are taken repeat
by repeat.

`--json` prints one document on standard output, whose shape is stable:

    {
      "schema": "lockstep.bench/1",
      "benchmark": "overhead" | "peers" | "steps" | "gateway" | "cache" | "ranks" | "overload" |
                   "splits" | "speculation",
      "machine": {"system": …, "processor": …, "cores": …, "memory_gib": …, "mlx": …, …},
      "settings": {…},                    what was asked for
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

A metric's unit is in its name; `ttft` is the time to the first token, `itl` the time between
tokens, `p50` and `p95` are percentiles within one repeat. A metric that could not be had is left
out.
"""

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from services.commands.bench.benchmarks import BENCHMARKS
from services.commands.bench.flags import BenchmarkOptions, add_common
from services.commands.bench.measuring.report import Report, to_json, to_text
from services.commands.command_line import Parser
from shared import limits
from shared.errors import LockstepError
from shared.os.standard_streams import print_line

QUICK_REPEATS = 2


def run(argv: list[str]) -> int:
    """Run one benchmark; return an exit code."""
    try:
        arguments = parse(argv)
        # Unwinds, so that everything that was started is stopped.
        signal.signal(signal.SIGTERM, _end)
        report, columns = _measure(arguments)
    except LockstepError as error:
        print(f"lockstep bench: {error}", file=sys.stderr)
        return error.exit_code
    print_line(to_json(report) if arguments.json else to_text(report, columns))
    return limits.EXIT_OK


def _end(number: int, _frame: object) -> None:
    # A second one ends it in any case, whatever it has started.
    signal.signal(number, signal.SIG_DFL)
    sys.exit(128 + number)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the arguments, defaults filled in.

    Raises:
        UsageError: they cannot be understood.
    """
    parser = Parser(prog="lockstep bench", description="Measure Lockstep on this machine.")
    commands = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, row in BENCHMARKS.items():
        one = commands.add_parser(name, help=row.summary, description=row.summary)
        add_common(one, row.repeats)
        for add_arguments in row.flags:
            add_arguments(one)
    return _completed(parser.parse_args(argv))


def _completed(arguments: argparse.Namespace) -> argparse.Namespace:
    """Fill in what was not given; a smoke test has less of everything."""
    row = BENCHMARKS[arguments.benchmark]
    for name, value in (row.quick if arguments.quick else row.usual).items():
        setattr(arguments, name, getattr(arguments, name) or value)
    if arguments.quick:
        for name, most in {"repeats": QUICK_REPEATS, **row.quick_most}.items():
            setattr(arguments, name, min(getattr(arguments, name), most))
    return arguments


def _measure(arguments: argparse.Namespace) -> tuple[Report, list[str]]:
    row = BENCHMARKS[arguments.benchmark]
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-logs-") as temporary:
        logs = Path(arguments.logs or temporary)
        logs.mkdir(parents=True, exist_ok=True)
        return row.measure(BenchmarkOptions(arguments, logs, row.preset))
