"""Option values that a command line of `lockstep bench` gives its benchmark."""

from collections.abc import Sequence
from types import SimpleNamespace

import click

from services.commands.bench.benchmarks import BENCHMARKS
from services.commands.bench.main import with_defaults
from shared.errors import UsageError
from tests.unit.commands import command_lines


def parse(words: Sequence[str]) -> SimpleNamespace:
    """Return the values of all options, with defaults filled in.

    Args:
        words: the benchmark's name and its options.

    Raises:
        UsageError: when they are wrong.
    """
    try:
        given = command_lines.parse(["bench", *words]).options
    except click.ClickException as error:
        raise UsageError(error.format_message()) from None
    return with_defaults(BENCHMARKS[words[0]], given)
