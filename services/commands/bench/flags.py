"""Options that several benchmarks share. Owns their types; each benchmark has its own options."""

import dataclasses
import sys
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace

import click
from click.shell_completion import CompletionItem

from services.commands.bench import random_model
from services.commands.bench.measuring.processes import MeasuredProcess, print_progress
from shared.errors import UsageError
from shared.model.location import local_folder


@dataclasses.dataclass(frozen=True, slots=True)
class BenchmarkOptions:
    """Input of one benchmark run: its parsed options, the folder for logs and a default model."""

    arguments: SimpleNamespace
    """Value of every option, by name."""
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
        preset = getattr(self.arguments, "preset", None) or self.preset
        return _find_or_make_preset(preset, self.logs)

    @property
    def settings(self) -> dict[str, str]:
        """Return variable LOCKSTEP_SECTION_KEY -> value for each `--set SECTION.KEY=VALUE`.

        Raises:
            UsageError: when a setting is not written as SECTION.KEY=VALUE.
        """
        return dict(_setting(text) for text in self.arguments.set)


def positive_int(text: str) -> int:
    """Parse an integer of 1 or more.

    Raises:
        click.BadParameter: when the text is no such number.
    """
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise click.BadParameter(f"{text!r} is not an integer of 1 or more.")
    return number


def positive_ints(text: str) -> list[int]:
    """Parse comma-separated integers of 1 or more.

    Raises:
        click.BadParameter: when one of them is wrong.
    """
    return [positive_int(part) for part in text.split(",")]


def positive_milliseconds(text: str) -> list[float]:
    """Parse comma-separated durations in milliseconds.

    Raises:
        click.BadParameter: when one of them is not a number above 0.
    """
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [0.0]
    if min(values) <= 0.0:
        raise click.BadParameter(f"{text!r} is not a list of milliseconds above 0.")
    return values


def number_option(name: str, summary: str, default: int | None = None) -> click.Option:
    """Return an option whose value is an integer of 1 or more; its help names the default.

    Args:
        name: the option, with dashes.
        summary: its help, without a full stop.
        default: its value when it is not given.
    """
    return click.Option(
        [name], type=positive_int, default=default, metavar="N", help=_help(summary, default)
    )


def numbers_option(
    name: str, summary: str, default: str | None = None, *, shown_default: str | None = None
) -> click.Option:
    """Return an option whose value is a list of comma-separated integers of 1 or more.

    Args:
        name: the option, with dashes.
        summary: its help, without a full stop.
        default: its default, as on a command line.
        shown_default: default that the help names and that the benchmark fills in itself.
    """
    return click.Option(
        [name],
        type=positive_ints,
        default=default,
        metavar="N,...",
        help=_help(f"{summary}, comma-separated", default or shown_default),
    )


def names_option(name: str, names: Collection[str], summary: str) -> click.Option:
    """Return an option whose value is a list of comma-separated names, which shells complete.

    Args:
        name: the option, with dashes.
        names: all names that the list may contain; the help shows them as the default.
        summary: its help, without a full stop.
    """

    def parse(text: str) -> list[str]:
        given = text.split(",")
        if unknown := set(given) - set(names):
            raise click.BadParameter(f"{min(unknown)!r} is not one of {', '.join(names)}.")
        return given

    def complete(_ctx: object, _param: object, incomplete: str) -> list[CompletionItem]:
        before, comma, last = incomplete.rpartition(",")
        return [CompletionItem(before + comma + one) for one in names if one.startswith(last)]

    return click.Option(
        [name],
        type=parse,
        metavar="NAME,...",
        help=_help(f"{summary}, comma-separated", ",".join(names)),
        shell_complete=complete,
    )


def common_options(repeats: int) -> list[click.Parameter]:
    """Return the options that every benchmark has: --json, --repeats, --quick, --tries, --logs.

    Args:
        repeats: default of `--repeats`.
    """
    return [
        click.Option(
            ["--json", "as_json"], is_flag=True, help="Print one JSON document, not tables."
        ),
        number_option("--repeats", "Measurements of each case", repeats),
        click.Option(
            ["--quick"], is_flag=True, help="Run fewer cases and repeats, as a smoke test."
        ),
        number_option(
            "--tries", "Measure a repeat up to N times while other processes use the CPU", 1
        ),
        click.Option(
            ["--logs"],
            type=click.Path(),
            metavar="FOLDER",
            help="Keep the logs of all processes in FOLDER.",
        ),
    ]


MODEL_OPTIONS: list[click.Parameter] = [
    click.Option(
        ["--model"], type=click.Path(), metavar="FOLDER", help='The model\'s folder, or "demo".'
    ),
    click.Option(
        ["--preset"],
        type=click.Choice(sorted(random_model.PRESETS)),
        help="Use random weights of this size, made on first use "
        "(default tiny; cache: long; splits: tiny-moe).",
    ),
]
"""Options that choose a model or the size of random weights; they exclude each other."""

SETTINGS_OPTION = click.Option(
    ["--set"],
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Change a setting of the stack, for example scheduler.decode_stall_ms=50.",
)


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


def _help(summary: str, default: object) -> str:
    return f"{summary}." if default is None else f"{summary} (default {default})."
