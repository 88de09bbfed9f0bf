"""Command `lockstep restart`. It acts on a Lockstep that runs.

A restart only ends a process. `lockstep up`, launchd or systemd, whichever started it, starts the
next one, so the same command works with all of them.
"""

import socket
import sys

import click

from services.commands.cli.click_support import Command
from services.commands.cli.flags import SettingSources, settings_options
from services.commands.cli.running_config import running_config
from services.commands.lifecycle import world
from services.commands.lifecycle.drain import wait_option
from services.supervisor.console.console import Console
from services.supervisor.restarting import RoleRestart
from services.supervisor.status.service_queries import ask_status
from shared import limits
from shared.configuration.settings import Config
from shared.errors import UnavailableError, UsageError
from shared.os import process_file
from shared.os.process_file import RoleProcess
from shared.os.standard_streams import exit_code_if_written


@click.command(cls=Command)
@click.argument(
    "role",
    metavar="ROLE",
    type=click.Choice(["gateway", "scheduler", "store", "rank", "ranks", "world"]),
)
@click.argument("number", metavar="[N]", type=int, required=False)
@wait_option("world: how long to wait until no request is open; 0: do not wait")
@settings_options
def restart(sources: SettingSources, *, role: str, number: int | None, wait_s: float | None) -> int:
    """Restart a role without losing a stream.

    ROLE is gateway, scheduler, store, rank (with its number N), ranks for all ranks of this host,
    or world: all roles of this host, after a drain and with the settings of this command line (as
    for `lockstep up`; flags alone change settings of the running one).
    """
    if role == "world" and number is None:
        return world.restart_world(sources, wait_s)
    if wait_s is not None:
        raise UsageError("--wait is for `lockstep restart world`, which drains first.")
    if role == "rank" and number is None:
        raise UsageError(
            "The rank's number is missing: `lockstep restart rank 0`, or `lockstep restart ranks`."
        )
    if role != "rank" and number is not None:
        raise UsageError(f"Only ranks have numbers: `lockstep restart {role}`.")
    config, console = running_config(sources), Console(sys.stdout)
    targets = _targets(config, role, number)
    if not targets:
        raise UnavailableError(
            f"No {role if number is None else f'rank {number}'} runs with the run folder "
            f"{config.run_dir}: start Lockstep with `lockstep up`, or give the --config or --port "
            "that it was started with."
        )
    # Ranks of a world end together. Gateways are restarted in turn, so that one always answers.
    groups = [targets] if role == "ranks" else [[target] for target in targets]
    kind = "rank" if role == "ranks" else role
    try:
        are_clean = [RoleRestart(config, kind, group, console).run() for group in groups]
    finally:
        console.show_progress("")
    code = limits.EXIT_OK if all(are_clean) else limits.EXIT_UNAVAILABLE
    return exit_code_if_written(code, console.write_error)


def _targets(config: Config, role: str, number: int | None) -> list[RoleProcess]:
    """Return the processes to end."""
    if number is None:
        return process_file.find_processes(config.run_dir, "rank" if role == "ranks" else role)
    named = process_file.find_processes(config.run_dir, f"rank-{number}")
    unnumbered = process_file.find_processes(config.run_dir, "rank")
    if named or not unnumbered:
        return named
    # These were started without a number; the scheduler has assigned one to each.
    for rank in ask_status(config).ranks:
        if rank.rank == number and rank.host and rank.host != socket.gethostname():
            raise UnavailableError(f"Rank {number} runs on {rank.host}: restart it there.")
        if rank.rank == number:
            return [holder for holder in unnumbered if holder.pid == rank.pid]
    return []
