"""Commands `lockstep status`, `restart` and `drain`. They act on a Lockstep that runs.

A restart only ends a process. `lockstep up`, launchd or systemd, whichever started it, starts the
next one, so the same command works with all of them.
"""

import socket
import sys

import click

from services.commands.cli.click_support import Command, json_option, json_text, seconds
from services.commands.cli.flags import SettingSources, settings_options
from services.commands.cli.running_config import names_one, running_config
from services.supervisor.console.console import Console
from services.supervisor.restarting import RoleRestart
from services.supervisor.status.running import find_running
from services.supervisor.status.service_queries import (
    ANSWER_DEADLINE_S,
    StatusWatch,
    ask_all,
    ask_status,
    no_answer_error,
)
from services.supervisor.status.status_table import render, render_all
from shared import limits
from shared.clock import SystemClock
from shared.configuration.settings import Config
from shared.errors import UnavailableError, UsageError
from shared.messages import OrderDrain, StatusReported
from shared.os import process_file
from shared.os.process_file import RoleProcess
from shared.os.standard_streams import exit_code_if_written, print_line

_STATUS_INTERVAL_S = 0.25


@click.command(cls=Command)
@settings_options
@json_option
@click.option("--all", "is_all", is_flag=True, help="List every Lockstep that runs here.")
def status(sources: SettingSources, *, as_json: bool, is_all: bool) -> int:
    """Show the state of a running Lockstep.

    Without flags it is the one that you run on this machine, or a list of all if there are several.
    """
    found = [] if names_one(sources) and not is_all else find_running()
    if is_all or len(found) > 1:
        if not found:
            raise UnavailableError("You run no Lockstep on this machine: start `lockstep up`.")
        summaries = ask_all(found)
        print_line(json_text(summaries) if as_json else render_all(summaries))
        return limits.EXIT_OK
    reported = ask_status(running_config(sources))
    print_line(json_text(reported) if as_json else render(reported))
    return limits.EXIT_OK


@click.command(cls=Command)
@click.argument(
    "role", metavar="ROLE", type=click.Choice(["gateway", "scheduler", "store", "rank", "ranks"])
)
@click.argument("number", metavar="[N]", type=int, required=False)
@settings_options
def restart(sources: SettingSources, *, role: str, number: int | None) -> int:
    """Restart a role without losing a stream.

    ROLE is gateway, scheduler, store, rank (with its number N), or ranks for all ranks of this
    host.
    """
    config, console = running_config(sources), Console(sys.stdout)
    if role == "rank" and number is None:
        raise UsageError(
            "The rank's number is missing: `lockstep restart rank 0`, or `lockstep restart ranks`."
        )
    if role != "rank" and number is not None:
        raise UsageError(f"Only ranks have numbers: `lockstep restart {role}`.")
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


@click.command(cls=Command)
@click.option("--off", is_flag=True, help="Accept new requests again.")
@click.option(
    "--wait",
    "wait_s",
    metavar="SECONDS",
    type=seconds,
    help="How long to wait until no request is open; 0: do not wait (default: scheduler.drain_s).",
)
@settings_options
def drain(sources: SettingSources, *, off: bool, wait_s: float | None) -> int:
    """Refuse new requests and let running ones finish."""
    config, console = running_config(sources), Console(sys.stdout)
    order = OrderDrain(is_on=not off)
    watch = StatusWatch(config, _STATUS_INTERVAL_S, identity="operator", order=order)
    try:
        status = _confirmed(config, watch, is_on=not off)
        if off:
            console.print_line("New requests are accepted again.")
            code = limits.EXIT_OK
        else:
            console.print_line("New requests are refused until `lockstep drain --off`.")
            longest_s = config.scheduler.drain_s if wait_s is None else wait_s
            code = _wait_for_ends(watch, status, longest_s, console)
    finally:
        console.show_progress("")
        watch.close()
    return exit_code_if_written(code, console.write_error)


def _confirmed(config: Config, watch: StatusWatch, *, is_on: bool) -> StatusReported:
    """Return the first status that shows that the scheduler drains, or no longer drains."""
    clock = SystemClock()
    until_s = clock.now() + ANSWER_DEADLINE_S
    latest: StatusReported | None = None
    while (left_s := until_s - clock.now()) > 0.0:
        latest = watch.poll(left_s) or latest
        if latest is not None and latest.draining == is_on:
            return latest
    if latest is None:
        raise no_answer_error(config, watch.refusal)
    raise UnavailableError(
        "The scheduler does not drain: see its log for the reason."
        if is_on
        else "The scheduler still drains because it is stopping, which cannot be cancelled."
    )


def _wait_for_ends(
    watch: StatusWatch, status: StatusReported, wait_s: float, console: Console
) -> int:
    """Wait until no request is open; return the exit code."""
    clock = SystemClock()
    until_s = clock.now() + wait_s
    while count := status.running + status.waiting:
        words = (
            f"{count} request{'s are' if count > 1 else ' is'} open "
            f"({status.running} running, {status.waiting} waiting)"
        )
        left_s = until_s - clock.now()
        if left_s <= 0.0:
            console.show_progress("")
            console.print_line(f"{words}.")
            # With a wait of 0 s, open requests are no failure.
            return limits.EXIT_UNAVAILABLE if wait_s else limits.EXIT_OK
        console.show_progress(f"Waiting: {words}")
        status = watch.poll(left_s) or status
    console.show_progress("")
    console.print_line("No request is open.")
    return limits.EXIT_OK


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
