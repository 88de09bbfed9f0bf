"""Command lines as `lockstep` parses them, without running anything."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import click

from services.commands.cli.flags import SettingSources, overrides
from services.commands.main import lockstep


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
    """Parse the words after `lockstep`. Raises: click.ClickException: when they are wrong."""
    context = lockstep.make_context("lockstep", list(words))
    name = ""
    while isinstance(context.command, click.Group):
        rest = [*context._protected_args, *context.args]
        if not rest:
            # A group without a command, as documents name it.
            break
        found, command, rest = context.command.resolve_command(context, rest)
        assert command is not None
        name = name or str(found)
        context = command.make_context(found, rest, parent=context)
    return ParsedCommand(name, context.params)
