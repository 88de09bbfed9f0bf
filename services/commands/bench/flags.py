"""What the command lines of the benchmarks have in common: flags, how they are read, what is asked.

Those of one benchmark alone stand beside it.
"""

import argparse
import dataclasses
from collections.abc import Iterable
from pathlib import Path

from services.commands.bench import random_model
from services.commands.bench.models import model_folder
from shared.errors import UsageError


@dataclasses.dataclass(frozen=True, slots=True)
class BenchmarkOptions:
    """A command line, and where what is started writes its log."""

    arguments: argparse.Namespace
    logs: Path
    preset: str
    """Weights of a benchmark that is told neither a model nor a preset."""

    @property
    def model(self) -> Path:
        """The folder of the model; random weights are made on first use.

        Raises:
            UsageError: there is no such folder.
            UnavailableError: it could not be made.
        """
        # No default in the parser: argparse overlooks a conflict with a value equal to the default.
        preset = getattr(self.arguments, "preset", None) or self.preset
        return model_folder.find_or_make(self.arguments.model, preset, self.logs)

    @property
    def settings(self) -> dict[str, str]:
        """LOCKSTEP_… variables for the stack.

        Raises:
            UsageError: one is not written as SECTION.KEY=VALUE.
        """
        return dict(_setting(text) for text in self.arguments.set)


def add_common(parser: argparse.ArgumentParser, repeats: int) -> None:
    """Give a benchmark the flags that all of them have."""
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--repeats", type=positive_int, default=repeats)
    parser.add_argument(
        "--quick", action="store_true", help="fewer cases and repeats: a smoke test"
    )
    parser.add_argument(
        "--tries",
        type=positive_int,
        default=1,
        help="measure a repeat up to so often while other processes use the machine (default 1)",
    )
    parser.add_argument("--logs", metavar="FOLDER", help="keep the processes' logs there")


def add_model(parser: argparse.ArgumentParser) -> None:
    """Let the user choose a model, or the size of one with random weights."""
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--model", metavar="FOLDER", help='a model\'s folder, or "demo"')
    choice.add_argument(
        "--preset",
        choices=sorted(random_model.PRESETS),
        help="random weights, made on first use (default tiny; cache: long; splits: tiny-moe)",
    )


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Let the user change settings of the stack."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="a setting for the stack, for example scheduler.decode_stall_ms=50",
    )


def positive_int(text: str) -> int:
    """Read a number of things."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not 1 or more")
    return value


def positive_ints(text: str) -> list[int]:
    """Read comma-separated numbers of things."""
    return [positive_int(part) for part in text.split(",")]


def positive_milliseconds(text: str) -> list[float]:
    """Read comma-separated times."""
    values = [float(part) for part in text.split(",")]
    if min(values) <= 0.0:
        raise argparse.ArgumentTypeError("milliseconds must be more than 0")
    return values


def listed_names(text: str, what: str, names: Iterable[str]) -> list[str]:
    """Read comma-separated names, each one of `names`."""
    given = text.split(",")
    if unknown := set(given) - set(names):
        raise argparse.ArgumentTypeError(f"there is no {what} {min(unknown)!r}")
    return given


def _setting(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    section, dot, name = key.partition(".")
    if not (separator and dot and section and name):
        raise UsageError(f"--set {text}: write SECTION.KEY=VALUE.")
    return f"LOCKSTEP_{section}_{name}".upper(), value
