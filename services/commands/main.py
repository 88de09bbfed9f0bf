"""Console script `lockstep`. Owns the table of commands and exit codes; imports only what runs.

An error that an operator can act on is one sentence on standard error and an exit code. A traceback
is a bug in Lockstep.
"""

import os
import sys
from collections.abc import Sequence
from importlib import metadata

import click

from services.commands.cli import click_support
from shared import limits
from shared.errors import LockstepError
from shared.os import standard_streams
from shared.os.standard_streams import print_line

COMMANDS: dict[str, tuple[str, str]] = {
    "up": ("services.commands.roles:up", "Start everything on this machine and keep it running."),
    "gateway": ("services.commands.roles:gateway", "Run one gateway: HTTP and text."),
    "scheduler": (
        "services.commands.roles:scheduler",
        "Run the scheduler: queue, batch membership, step plans.",
    ),
    "rank-worker": (
        "services.commands.roles:rank_worker",
        "Run one rank worker: one device's share of the model.",
    ),
    "cache-store": (
        "services.commands.roles:cache_store",
        "Run the cache store of this host: KV blocks on its SSD.",
    ),
    "status": (
        "services.commands.lifecycle.status:status",
        "Show the state of a running Lockstep.",
    ),
    "restart": (
        "services.commands.lifecycle.restart:restart",
        "Restart a role without losing a stream.",
    ),
    "drain": (
        "services.commands.lifecycle.drain:drain",
        "Refuse new requests and let running ones finish.",
    ),
    "logs": ("services.commands.lifecycle.logs:logs", "Show the log files of this host."),
    "profile": (
        "services.commands.lifecycle.profile:profile",
        "Show where the time of a step goes, by part and rank.",
    ),
    "trace": (
        "services.commands.lifecycle.trace:trace",
        "Record what every rank does, for Perfetto's viewer.",
    ),
    "launch": (
        "services.commands.launch.command:launch",
        "Print or run a client's configuration for a running Lockstep.",
    ),
    "verify": (
        "services.commands.verify.command:verify",
        "Check that a running Lockstep works in every part.",
    ),
    "doctor": ("services.commands.doctor.command:doctor", "Check hosts, cables and settings."),
    "plan": (
        "services.commands.planning.command:plan",
        "Show how a model fits into memory, before it is loaded.",
    ),
    "cache": (
        "services.commands.cache.command:cache",
        "List, check or delete stored KV blocks.",
    ),
    "keys": (
        "services.commands.keys.host_keys:keys_group",
        "Make this host's key pair and allow the keys of other hosts.",
    ),
    "api-key": (
        "services.commands.keys.api_key:api_key",
        "Make, list and remove API keys of clients.",
    ),
    "hostfile": (
        "services.commands.deployment.hostfile:write_hostfile",
        "Write MLX's hostfile for the ranks of an inventory.",
    ),
    "launchd": (
        "services.commands.deployment.command:launchd_group",
        "Run Lockstep from boot on macOS, as LaunchDaemons.",
    ),
    "systemd": (
        "services.commands.deployment.command:systemd_group",
        "Run Lockstep from boot on Linux, as units.",
    ),
    "bench": (
        "services.commands.bench.main:bench",
        "Measure overhead, peers, steps, gateway, cache, speculation or ranks.",
    ),
    "completion": (
        "services.commands.cli.completion:completion",
        "Print a shell's completion script.",
    ),
}
"""Name -> (where the command is defined, its summary)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    Args:
        argv: the words after the program's name; None: those of this process.
    """
    standard_streams.replace_closed()
    arguments = list(sys.argv[1:] if argv is None else argv)
    code = limits.EXIT_OK
    try:
        code = click_support.run(
            lockstep, arguments, os.environ.get(click_support.COMPLETION_VARIABLE)
        )
        standard_streams.flush()
    except LockstepError as error:
        click.echo(f"lockstep: {error}", err=True)
        return error.exit_code
    except KeyboardInterrupt:
        return limits.EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has ended (`lockstep status | head -1`).
        standard_streams.discard_output()
    return code


def _show_version(context: click.Context, _option: click.Parameter, is_asked: bool) -> None:
    if not is_asked or context.resilient_parsing:
        return
    try:
        version = metadata.version("lockstep")
    except metadata.PackageNotFoundError:
        version = "(not installed)"
    print_line(f"lockstep {version}")
    context.exit()


@click.group(
    cls=click_support.Group,
    lazy=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
def lockstep() -> None:
    """Serve one large language model from many machines as if it were one."""


if __name__ == "__main__":
    sys.exit(main())
