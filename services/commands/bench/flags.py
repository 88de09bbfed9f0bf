"""Options that several benchmarks share. Owns their types; each benchmark has its own options."""

from collections.abc import Collection
from typing import Any

import click
from click.shell_completion import CompletionItem

from services.commands.bench import random_model
from shared.errors import UsageError

QUICK_REPEATS = 2


class BenchmarkOption(click.Option):
    """Option that may have another default and a largest value when `--quick` is given."""

    def __init__(
        self,
        name: str,
        summary: str,
        default: Any = None,
        *,
        quick: Any = None,
        quick_max: float | None = None,
        **attributes: Any,
    ) -> None:
        """Define the option; its help is the summary and the default.

        Args:
            name: the option, with dashes.
            summary: its help, without a full stop.
            default: value when it is not given; None: no default.
            quick: value when only `--quick` is given; None: `default`.
            quick_max: largest value with `--quick`, also when the option is given; None: no limit.
            attributes: further arguments of click.Option.
        """
        shown = "" if default is None else f" (default {default})"
        super().__init__([name], default=default, help=f"{summary}{shown}.", **attributes)
        self.quick = quick
        self.quick_max = quick_max

    def get_default(self, ctx: click.Context, call: bool = True) -> Any:
        """Return the default, which depends on `--quick`; the argument `call` is click's."""
        if self.quick is not None and ctx.params.get("quick"):
            return self.quick
        return super().get_default(ctx, call)

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        """Return the value as click converts it, but with `--quick` `quick_max` at most."""
        converted = super().process_value(ctx, value)
        if self.quick_max is None or not ctx.params.get("quick"):
            return converted
        return min(converted, self.quick_max)


def whole_number(text: str, least: int = 1) -> int:
    """Parse an integer of `least` or more.

    Raises:
        click.BadParameter: when the text is no such number.
    """
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise click.BadParameter(f"{text!r} is not an integer of {least} or more.")
    return number


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


def number_option(
    name: str, summary: str, default: int | None = None, **quick: int
) -> BenchmarkOption:
    """Return an option whose value is an integer of 1 or more.

    Args:
        name: the option, with dashes.
        summary: its help, without a full stop.
        default: its value when it is not given.
        quick: `quick` and `quick_max` of BenchmarkOption.
    """
    return BenchmarkOption(name, summary, default, type=whole_number, metavar="N", **quick)


def numbers_option(
    name: str, summary: str, default: str, quick: str | None = None, least: int = 1
) -> BenchmarkOption:
    """Return an option whose value is a list of comma-separated integers of `least` or more.

    Args:
        name: the option, with dashes.
        summary: its help, without a full stop.
        default: its default, as on a command line.
        quick: its default with `--quick`, as on a command line; None: `default`.
        least: smallest value.
    """

    def parse(text: str) -> list[int]:
        return [whole_number(part, least) for part in text.split(",")]

    listed = f"{summary}, comma-separated"
    return BenchmarkOption(name, listed, default, quick=quick, type=parse, metavar="N,...")


def names_option(name: str, names: Collection[str], summary: str) -> BenchmarkOption:
    """Return an option whose value is a list of comma-separated names, which shells complete.

    Args:
        name: the option, with dashes.
        names: all names that the list may contain, which are also the default.
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

    return BenchmarkOption(
        name,
        f"{summary}, comma-separated",
        ",".join(names),
        type=parse,
        metavar="NAME,...",
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
        number_option("--repeats", "Measurements of each case", repeats, quick_max=QUICK_REPEATS),
        # Eager, because the values of other options depend on it.
        click.Option(
            ["--quick"],
            is_flag=True,
            is_eager=True,
            help="Run fewer cases and repeats, as a smoke test.",
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
        "(default tiny; cache: long; splits: tiny-moe; structured: tiny-150k).",
    ),
]
"""Options that choose a model or the size of random weights; they exclude each other."""


def _setting(text: str) -> tuple[str, str]:
    """Return the environment variable of a setting and its value."""
    key, separator, value = text.partition("=")
    section, dot, name = key.partition(".")
    if not (separator and dot and section and name):
        raise UsageError(f"{text}: write SECTION.KEY=VALUE.")
    return f"LOCKSTEP_{section}_{name}".upper(), value


SETTINGS_OPTION = click.Option(
    ["--set", "settings"],
    multiple=True,
    type=_setting,
    callback=lambda _ctx, _option, pairs: dict(pairs),
    metavar="SECTION.KEY=VALUE",
    help="Change a setting of the stack, for example scheduler.decode_stall_ms=50.",
)
"""Becomes the variables of the stack's environment, LOCKSTEP_SECTION_KEY -> value."""


def compare_option(summary: str) -> click.Option:
    """Return the option `--compare`: each adds a contender that has settings of its own.

    Its value maps the option as given -> the variables of that contender's environment.

    Args:
        summary: its help, without a full stop.
    """
    return click.Option(
        ["--compare"],
        multiple=True,
        callback=lambda _ctx, _option, given: {
            text: dict(map(_setting, text.split(","))) for text in given
        },
        metavar="SECTION.KEY=VALUE,...",
        help=f"{summary}; repeatable.",
    )
