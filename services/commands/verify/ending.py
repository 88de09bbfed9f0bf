"""What only happens when it is asked for: ranks that start anew, and the end of the service."""

import contextlib
import fcntl
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
"""After that a supervisor is left alone; it has failed long before."""

ROLES = ("gateway", "scheduler", "store", "rank")
LOOK_S = 0.02


def restart_ranks(config: Config, console: Console) -> None:
    """End this host's ranks, and wait until others have taken their places.

    Raises:
        UnavailableError: there is none here, or nobody starts them again.
    """
    ranks = process_file.find_processes(config.run_dir, "rank")
    if not ranks:
        raise UnavailableError(f"No rank runs here with the run folder {config.run_dir}.")
    try:
        RoleRestart(config, "rank", ranks, console).run()
    finally:
        console.show_progress("")


def shut_down(config: Config) -> TimedCheck:
    """End `lockstep up` as an operator does, and see how long everything takes to be gone."""
    supervisor = supervisor_pid(config.run_dir)
    if supervisor is None:
        detail = (
            f"no `lockstep up` runs on this host with the run folder {config.run_dir}: what "
            "launchd or systemd has started, they stop"
        )
        return TimedCheck(check=judging.SHUTDOWN, verdict="SKIP", detail=detail)
    clock = SystemClock()
    began_s = clock.now()
    left: list[str] = []
    # It may end by itself just now.
    with contextlib.suppress(ProcessLookupError):
        os.kill(supervisor, signal.SIGTERM)
    while (seconds := clock.now() - began_s) < GIVE_UP_S:
        is_over = supervisor_pid(config.run_dir) is None
        # Asked after it: what ends between the two questions has ended in time.
        left = [role for role in ROLES if process_file.find_processes(config.run_dir, role)]
        if is_over:
            return judged(seconds, left)
        time.sleep(LOOK_S)
    return judged(seconds, ["supervisor", *left])


def judged(seconds: float, left: list[str]) -> TimedCheck:
    """Judge an end.

    Args:
        seconds: from the signal to the supervisor's end.
        left: roles that still ran then.
    """
    if not left and seconds <= SHUTDOWN_S:
        return TimedCheck(
            check=judging.SHUTDOWN,
            verdict="PASS",
            detail=f"everything ended {seconds:.2f} s after SIGTERM",
        )
    detail = f"{', '.join(left)} still there" if left else "everything ended"
    return TimedCheck(
        check=judging.SHUTDOWN,
        verdict="FAIL",
        detail=f"{detail} {seconds:.1f} s after SIGTERM",
        remedy=(
            "Requests that ran were waited for (scheduler.drain_s); if none ran, look in the log "
            "for the role that ended last."
        ),
    )


def supervisor_pid(folder: Path) -> int | None:
    """Return the process that holds a run folder's lock; None when nobody does."""
    try:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.read(descriptor, 32).decode(errors="replace").strip()
        return int(text) if text.isdecimal() else None
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    return None
