"""Option values that a command line of `lockstep bench` gives its benchmark."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from services.commands.bench.benchmarks import BENCHMARKS
from services.commands.bench.plans import make_plan
from shared.errors import UsageError
from tests.unit.commands import command_lines


def plan_of(logs: Path, *words: str) -> Any:
    """Return the plan that a command line gives its benchmark.

    Args:
        logs: folder for logs.
        words: the benchmark's name and its options.

    Raises:
        UsageError: when they are wrong or do not fit together.
    """
    return make_plan(BENCHMARKS[words[0]], vars(parse(words)), logs)


def parse(words: Sequence[str]) -> SimpleNamespace:
    """Return the values of all options, with defaults filled in.

    Args:
        words: the benchmark's name and its options.

    Raises:
        UsageError: when they are wrong.
    """
    try:
        return SimpleNamespace(**command_lines.parse(["bench", *words]).options)
    except click.ClickException as error:
        raise UsageError(error.format_message()) from None
