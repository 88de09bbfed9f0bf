"""`lockstep restart ROLE` and `lockstep drain`: an operator's orders to a Lockstep that runs.

A restart only ends a process. Whoever keeps it running (`lockstep up`, launchd, systemd) starts the
next one, so that the same command serves everywhere.
"""

import socket

from services.supervisor.console.console import Console
from services.supervisor.restarting import RoleRestart
from services.supervisor.status.service_queries import (
    ANSWER_DEADLINE_S,
    StatusWatch,
    ask_status,
    no_answer_error,
)
from shared import limits
from shared.clock import SystemClock
from shared.configuration.settings import Config
from shared.errors import UnavailableError, UsageError
from shared.messages import OrderDrain, StatusReported
from shared.os import process_file
from shared.os.process_file import RoleProcess

_STATUS_INTERVAL_S = 0.25


def restart(config: Config, role: str, number: int | None, console: Console) -> int:
    """End a role's process and wait until another has taken its place; return the exit code.

    Args:
        config: says where the processes run, and how long they may take.
        role: `gateway`, `scheduler`, `store`, `rank`, or `ranks` for all of this host.
        number: which rank, for the role `rank`.
        console: hears what happens.

    Raises:
        UsageError: `number` is missing, or stands where none belongs.
        UnavailableError: nobody runs as this role here, or nobody starts it again, or it does not
            become ready.
    """
    if role == "rank" and number is None:
        raise UsageError("Say which rank: `lockstep restart rank 0`, or `lockstep restart ranks`.")
    if role != "rank" and number is not None:
        raise UsageError(f"Only ranks have numbers: `lockstep restart {role}`.")
    targets = _targets(config, role, number)
    if not targets:
        raise UnavailableError(
            f"No {role if number is None else f'rank {number}'} runs with the run folder "
            f"{config.run_dir}: start Lockstep with `lockstep up`, or give the --config or --port "
            "that it was started with."
        )
    # Ranks live and die together; several gateways take turns, so that one of them answers.
    groups = [targets] if role == "ranks" else [[target] for target in targets]
    kind = "rank" if role == "ranks" else role
    try:
        are_clean = [RoleRestart(config, kind, group, console).run() for group in groups]
    finally:
        console.progress("")
    return limits.EXIT_OK if all(are_clean) else limits.EXIT_UNAVAILABLE


def drain(config: Config, *, is_on: bool, wait_s: float | None, console: Console) -> int:
    """Have the scheduler take no new requests, or take them again; return the exit code.

    Args:
        config: says where the scheduler listens.
        is_on: False takes an earlier order back.
        wait_s: how long to wait until no request is open; None: `scheduler.drain_s`.
        console: hears what happens.

    Raises:
        UnavailableError: the scheduler does not answer, or is stopping for good.
    """
    wait_s = config.scheduler.drain_s if wait_s is None else wait_s
    order = OrderDrain(is_on=is_on)
    watch = StatusWatch(config, _STATUS_INTERVAL_S, identity="operator", order=order)
    try:
        status = _confirmed(config, watch, is_on=is_on)
        if not is_on:
            console.say("New requests are taken again.")
            return limits.EXIT_OK
        console.say("New requests are refused until `lockstep drain --off`.")
        return _wait_for_ends(watch, status, wait_s, console)
    finally:
        console.progress("")
        watch.close()


def _confirmed(config: Config, watch: StatusWatch, *, is_on: bool) -> StatusReported:
    """Return the first status that shows the order obeyed."""
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
        "The scheduler does not drain although it was told to: see its log."
        if is_on
        else "The scheduler still drains: it was told to stop, which cannot be taken back."
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
            console.progress("")
            console.say(f"{words}.")
            # Who did not want to wait has got what was asked for.
            return limits.EXIT_UNAVAILABLE if wait_s else limits.EXIT_OK
        console.progress(f"Waiting: {words}")
        status = watch.poll(left_s) or status
    console.progress("")
    console.say("No request is open.")
    return limits.EXIT_OK


def _targets(config: Config, role: str, number: int | None) -> list[RoleProcess]:
    """Return the processes that are to end."""
    if number is None:
        return process_file.find_processes(config.run_dir, "rank" if role == "ranks" else role)
    named = process_file.find_processes(config.run_dir, f"rank-{number}")
    anybody = process_file.find_processes(config.run_dir, "rank")
    if named or not anybody:
        return named
    # They were started as any rank; the scheduler has given them their numbers.
    for rank in ask_status(config).ranks:
        if rank.rank == number and rank.host and rank.host != socket.gethostname():
            raise UnavailableError(f"Rank {number} runs on {rank.host}: restart it there.")
        if rank.rank == number:
            return [holder for holder in anybody if holder.pid == rank.pid]
    return []
