"""Command lines of `lockstep`, parsed only or run in this process."""

import contextlib
import dataclasses
import io
from collections.abc import Sequence
from typing import Any

import click
import pytest

from services.commands import main
from services.commands.cli.flags import SettingSources, overrides


@dataclasses.dataclass(frozen=True)
class ParsedCommand:
    """Command that a command line names, with its options."""

    command: str
    options: dict[str, Any]

    @property
    def overrides(self) -> dict[str, Any]:
        """Settings that the flags override."""
        return overrides(self.options)

    @property
    def sources(self) -> SettingSources:
        """Where the settings come from."""
        return SettingSources.of(self.options)


def parse(words: Sequence[str]) -> ParsedCommand:
    """Parse the words after `lockstep` without running the command.

    Raises:
        click.ClickException: when they are wrong.
    """
    context = main.lockstep.make_context("lockstep", list(words))
    name = ""
    while isinstance(context.command, click.Group):
        rest = [*context._protected_args, *context.args]
        if not rest:
            # Documents also name a group without one of its commands.
            break
        found, command, rest = context.command.resolve_command(context, rest)
        assert command is not None
        name = name or str(found)
        context = command.make_context(found, rest, parent=context)
    return ParsedCommand(name, context.params)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Run a command; return its exit code, standard output and standard error."""
    code = main.main(words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run_merged(*words: str) -> tuple[int, str]:
    """Run a command; return its exit code and both outputs as one text."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = main.main(words)
    return code, output.getvalue()
