"""Command `lockstep completion`. Owns the scripts that teach a shell to complete `lockstep`."""

import click
from click.shell_completion import get_completion_class

from services.commands.cli.click_support import COMPLETION_VARIABLE, PROGRAM, Command
from shared import limits
from shared.os.standard_streams import print_line


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> int:
    """Print the completion script of a shell.

    For bash, add `eval "$(lockstep completion bash)"` to ~/.bashrc; for zsh, add the same with zsh
    to ~/.zshrc. For fish, write the output to ~/.config/fish/completions/lockstep.fish.
    """
    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(context.find_root().command, {}, PROGRAM, COMPLETION_VARIABLE).source()
    print_line(script.strip("\n"))
    return limits.EXIT_OK
