"""Flags and option types that several benchmarks share; each benchmark adds its own flags."""

import argparse
import dataclasses
import sys
from collections.abc import Iterable
from pathlib import Path

from services.commands.bench import random_model
from services.commands.bench.measuring.processes import MeasuredProcess, print_progress
from shared.errors import UsageError
from shared.model.location import local_folder


@dataclasses.dataclass(frozen=True, slots=True)
class BenchmarkOptions:
    """A parsed command line and the folder of the logs."""

    arguments: argparse.Namespace
    logs: Path
    """Folder for the logs of child processes."""
    preset: str
    """Random weights that are used when neither a model nor a preset is given."""

    @property
    def model(self) -> Path:
        """Return the folder of the model; make a preset's model on its first use.

        Raises:
            UsageError: when the folder does not exist.
            UnavailableError: when the preset's model cannot be made.
        """
        if self.arguments.model:
            return find_folder(self.arguments.model)
        # The parser has no default: argparse would not notice --model beside an equal --preset.
        preset = getattr(self.arguments, "preset", None) or self.preset
        return _find_or_make_preset(preset, self.logs)

    @property
    def settings(self) -> dict[str, str]:
        """Return the LOCKSTEP_… variables for the stack.

        Raises:
            UsageError: when a setting is not written as SECTION.KEY=VALUE.
        """
        return dict(_setting(text) for text in self.arguments.set)


def add_common(parser: argparse.ArgumentParser, repeats: int) -> None:
    """Add the flags of all benchmarks.

    Args:
        parser: the benchmark's parser.
        repeats: default of `--repeats`.
    """
    parser.add_argument("--json", action="store_true", help="print one JSON document, not tables")
    parser.add_argument(
        "--repeats",
        type=positive_int,
        default=repeats,
        help=f"measurements of each case (default {repeats})",
    )
    parser.add_argument(
        "--quick", action="store_true", help="run fewer cases and repeats, as a smoke test"
    )
    parser.add_argument(
        "--tries",
        type=positive_int,
        default=1,
        help="measure a repeat up to TRIES times while other processes use the CPU (default 1)",
    )
    parser.add_argument("--logs", metavar="FOLDER", help="keep the logs of all processes in FOLDER")


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose a model or the size of random weights."""
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--model", metavar="FOLDER", help='the model\'s folder, or "demo"')
    choice.add_argument(
        "--preset",
        choices=sorted(random_model.PRESETS),
        help="use random weights of this size, made on first use "
        "(default tiny; cache: long; splits: tiny-moe)",
    )


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the flag that changes settings of the stack."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="change a setting of the stack, for example scheduler.decode_stall_ms=50",
    )


def positive_int(text: str) -> int:
    """Parse an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def positive_ints(text: str) -> list[int]:
    """Parse comma-separated integers of at least 1."""
    return [positive_int(part) for part in text.split(",")]


def positive_milliseconds(text: str) -> list[float]:
    """Parse comma-separated durations in milliseconds."""
    values = [float(part) for part in text.split(",")]
    if min(values) <= 0.0:
        raise argparse.ArgumentTypeError("milliseconds must be more than 0")
    return values


def listed_names(text: str, kind: str, names: Iterable[str]) -> list[str]:
    """Parse comma-separated names.

    Args:
        text: the argument.
        kind: the noun for one of the names, for error messages.
        names: the names that are allowed.
    """
    given = text.split(",")
    if unknown := set(given) - set(names):
        raise argparse.ArgumentTypeError(f"there is no {kind} {min(unknown)!r}")
    return given


def find_folder(model: str) -> Path:
    """Return the absolute folder of a model on this machine.

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
        command = [sys.executable, "-m", "services.commands.bench.random_model", str(folder)]
        maker = MeasuredProcess("the model maker", [*command, preset], logs / "model.log")
        if maker.process.wait() != 0:
            raise maker.failure("failed")
        maker.stop()
    return folder


def _setting(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    section, dot, name = key.partition(".")
    if not (separator and dot and section and name):
        raise UsageError(f"--set {text}: write SECTION.KEY=VALUE.")
    return f"LOCKSTEP_{section}_{name}".upper(), value
