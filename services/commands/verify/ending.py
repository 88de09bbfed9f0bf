"""Checks that end processes, on request only: restart of the ranks, shutdown of the service."""

import contextlib
import os
import signal
import time
from pathlib import Path

from services.commands.verify import judging
from services.commands.verify.judging import SHUTDOWN_S, TimedCheck
from services.supervisor.console.console import Console
from services.supervisor.restarting import RoleRestart
from shared.clock import SystemClock
from shared.configuration.settings import Config
from shared.errors import UnavailableError
from shared.os import process_file

GIVE_UP_S = 60.0
"""Time limit of the wait for the supervisor's end; the check fails much earlier."""

ROLES = ("gateway", "scheduler", "store", "rank")
"""Names of the process files of all roles but the supervisor."""
POLL_S = 0.02


def restart_ranks(config: Config, console: Console) -> None:
    """Restart this host's ranks and wait until the new ones are ready.

    Raises:
        UnavailableError: when no rank runs here, or the ranks are not started again.
    """
    ranks = process_file.find_processes(config.run_dir, "rank")
    if not ranks:
        raise UnavailableError(f"No rank runs here with the run folder {config.run_dir}.")
    try:
        RoleRestart(config, "rank", ranks, console).run()
    finally:
        console.show_progress("")


def shut_down(config: Config) -> TimedCheck:
    """Send SIGTERM to `lockstep up` and judge how long it and all roles of this host take to end.

    Without a `lockstep up` on this host the result is SKIP.
    """
    supervisor = supervisor_pid(config.run_dir)
    if supervisor is None:
        detail = (
            f"no `lockstep up` runs on this host with the run folder {config.run_dir}: stop jobs "
            "with launchd or systemd"
        )
        return judging.skipped(judging.SHUTDOWN, detail)
    clock = SystemClock()
    began_s = clock.now()
    left: list[str] = []
    # It may have ended since.
    with contextlib.suppress(ProcessLookupError):
        os.kill(supervisor, signal.SIGTERM)
    while (seconds := clock.now() - began_s) < GIVE_UP_S:
        is_over = supervisor_pid(config.run_dir) is None
        # Roles are listed after the supervisor, so a role that ends in between is not counted.
        left = [role for role in ROLES if process_file.find_processes(config.run_dir, role)]
        if is_over:
            return judge_shutdown(seconds, left)
        time.sleep(POLL_S)
    return judge_shutdown(seconds, ["supervisor", *left])


def judge_shutdown(seconds: float, left: list[str]) -> TimedCheck:
    """Judge a shutdown: everything must have ended within SHUTDOWN_S.

    Args:
        seconds: seconds from SIGTERM to the supervisor's end.
        left: roles that still ran then.
    """
    if not left and seconds <= SHUTDOWN_S:
        return judging.passed(judging.SHUTDOWN, f"everything ended {seconds:.2f} s after SIGTERM")
    detail = f"{', '.join(left)} still there" if left else "everything ended"
    return judging.failed(
        judging.SHUTDOWN,
        f"{detail} {seconds:.1f} s after SIGTERM",
        "Running requests may finish first (scheduler.drain_s); if no request ran, look in the "
        "log for the role that ended last.",
    )


def supervisor_pid(folder: Path) -> int | None:
    """Return the process id of the `lockstep up` that runs with a run folder.

    Args:
        folder: the run folder.

    Returns:
        The id, or None.
    """
    found = process_file.find_processes(folder, process_file.SUPERVISOR)
    return found[0].pid if found else None
