"""Command line built on click. Owns command classes, help, errors; knows no command of Lockstep."""

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
import msgspec
from click.shell_completion import CompletionItem, shell_complete

from shared import limits
from shared.errors import UsageError
from shared.os.standard_streams import print_line

PROGRAM = "lockstep"
COMPLETION_VARIABLE = "_LOCKSTEP_COMPLETE"
"""Set by a shell's completion script: what the shell wants to know, for example `bash_complete`."""

FIRST_GROUP = "Options"


class GroupedOption(click.Option):
    """Option that `--help` lists under a heading, its `help_group`, with others of that group."""

    def __init__(self, *args: Any, help_group: str = FIRST_GROUP, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.help_group = help_group


class Command(click.Command):
    """Command whose `--help` groups its options by heading, and fails if it cannot be written."""

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        """Return the option `--help`, made to fail if the help cannot be written."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.callback = _show_help
        return option

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, each under the heading of its `GroupedOption`, then subcommands."""
        groups: dict[str, list[tuple[str, str]]] = {FIRST_GROUP: []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and not isinstance(parameter, click.Argument):
                heading = getattr(parameter, "help_group", FIRST_GROUP)
                groups.setdefault(heading, []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)
        if isinstance(self, click.Group):
            self.format_commands(ctx, formatter)


class Group(Command, click.Group):
    """Command with subcommands; the module of a lazy one is imported only when it is called."""

    command_class = Command
    group_class = type

    def __init__(
        self, *args: Any, lazy: Mapping[str, tuple[str, str]] | None = None, **attributes: Any
    ) -> None:
        """Store the lazy commands without importing them.

        Args:
            args: as for click.Group.
            lazy: name -> (`module:attribute` of the command, its summary).
            attributes: as for click.Group.
        """
        attributes.setdefault("no_args_is_help", False)
        attributes.setdefault("subcommand_metavar", "COMMAND [ARGS]...")
        super().__init__(*args, **attributes)
        self._lazy = dict(lazy or {})

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - the base passes it
        """Return the names of all subcommands, lazy ones last, in the order of their definition."""
        return [*self.commands, *self._lazy]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, imported if it is lazy; None if no command has this name."""
        if cmd_name not in self._lazy:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = self._lazy[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(
        self,
        ctx: click.Context,  # noqa: ARG002 - the base passes it
        formatter: click.HelpFormatter,
    ) -> None:
        """Write names and summaries of all subcommands, without importing lazy ones."""
        with formatter.section("Commands"):
            formatter.write_dl(list(self._summaries().items()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the subcommands and options that begin with `incomplete`.

        Lazy subcommands are not imported.
        """
        found = [
            CompletionItem(name, help=summary)
            for name, summary in self._summaries().items()
            if name.startswith(incomplete)
        ]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def _summaries(self) -> dict[str, str]:
        loaded = {name: one.get_short_help_str(100) for name, one in self.commands.items()}
        return {**loaded, **{name: summary for name, (_, summary) in self._lazy.items()}}


def seconds(text: str) -> float:
    """Read an option's value as a number of seconds.

    Raises:
        click.BadParameter: when it is not a finite number, 0 or more.
    """
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0.0 <= number < math.inf:
        raise click.BadParameter(f"{text!r} is not a number of seconds, 0 or more.")
    return number


def json_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command's function so that it has the flag `--json`, passed as `as_json`."""
    add = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
    return add(function)


def json_text(value: Any) -> str:
    """Return a value as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(value)).decode()


def run(root: click.Group, arguments: Sequence[str], completion: str | None = None) -> int:
    """Run the command that a command line names.

    Args:
        root: the command of the console script, with all subcommands.
        arguments: the words after the program's name.
        completion: value of COMPLETION_VARIABLE; a request for completions runs no command.

    Returns:
        An exit code.

    Raises:
        UsageError: when the command line is wrong.
    """
    if completion:
        return shell_complete(root, {}, PROGRAM, COMPLETION_VARIABLE, completion)
    try:
        with root.make_context(PROGRAM, list(arguments)) as context:
            code: int | None = root.invoke(context)
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.ClickException as error:
        raise UsageError(_sentence(error)) from None
    return code or limits.EXIT_OK


def _sentence(error: click.ClickException) -> str:
    """Return a mistake on the command line as one line, with the command that explains more."""
    text = " ".join(error.format_message().split())
    if text[-1] not in ".?!":
        text += "."
    context = error.ctx if isinstance(error, click.UsageError) else None
    return f"{text} See `{context.command_path if context else PROGRAM} --help`."


def _show_help(context: click.Context, _option: click.Parameter, is_asked: bool) -> None:
    if is_asked and not context.resilient_parsing:
        print_line(context.get_help())
        context.exit()
