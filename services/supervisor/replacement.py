"""Replacement of the settings of a running `lockstep up`. Owns the file that brings the new ones.

An operator's command writes the file and ends the supervisor's roles with SIGTERM. The process
stays, takes the file and starts its roles again, so launchd, systemd or a terminal notice nothing.
If the new settings turn out to be impossible at their start, the previous ones come back.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from shared import limits, log
from shared.configuration.host_share import HostShare
from shared.errors import ConfigError, LockstepError
from shared.os import private_files

_ORDER_FILE = "replacement.json"
_REFUSAL_FILE = "replacement-refused.txt"
_STOPPED = (limits.EXIT_OK, limits.EXIT_UNAVAILABLE)
"""Exit codes of a supervisor that one stop signal has ended."""
_REFUSED = (limits.EXIT_CONFIG, limits.EXIT_USAGE)


def order(folder: Path, share: HostShare, pid: int) -> None:
    """Order a running supervisor to start its roles again with another share.

    Args:
        folder: its run folder, which stays the same.
        share: roles, settings and files of this host.
        pid: its process id.

    Raises:
        ConfigError: when the folder cannot be written.
        ProcessLookupError: when the process has ended.
    """
    (folder / _REFUSAL_FILE).unlink(missing_ok=True)
    path = folder / _ORDER_FILE
    try:
        private_files.replace(path, msgspec.json.encode(share).decode())
    except OSError as error:
        raise ConfigError(f"Cannot write to {folder}: {error.strerror}.") from None
    try:
        os.kill(pid, signal.SIGTERM)
    except BaseException:
        # An ordinary stop must not take it for its order later.
        path.unlink(missing_ok=True)
        raise


def refusal(folder: Path) -> str:
    """Return why the supervisor went back to its previous settings; "" if it has not.

    Args:
        folder: its run folder.
    """
    try:
        return (folder / _REFUSAL_FILE).read_text(encoding="utf-8")
    except OSError:
        return ""


def run(share: HostShare, start: Callable[[HostShare], int]) -> int:
    """Run a supervisor, and further ones with the shares that orders bring.

    Args:
        share: the first share.
        start: runs a supervisor until it is stopped, and returns its exit code.

    Returns:
        The exit code of the last one.

    Raises:
        LockstepError: when the first share cannot be used.
    """
    previous: HostShare | None = None
    while True:
        folder = share.config.run_dir
        (folder / _ORDER_FILE).unlink(missing_ok=True)
        started_s, reason = time.monotonic(), ""
        try:
            code = start(share)
        except LockstepError as error:
            if previous is None:
                raise
            code, reason = error.exit_code, str(error)
        ordered = _take(folder) if code in _STOPPED else None
        is_new = time.monotonic() - started_s < _probation_s(share)
        if ordered is not None:
            share, previous = ordered, share
        elif previous is not None and (reason or code in _REFUSED) and is_new:
            reason = reason or "a process refuses the settings, see its message in the log"
            sentence = f"The new settings cannot be used, so the previous ones return: {reason}"
            log.report(sentence, previous.config.log, "error")
            # Without room for this file only the command that waits for it misses the reason.
            with contextlib.suppress(OSError):
                private_files.replace(folder / _REFUSAL_FILE, reason)
            share, previous = previous, None
        else:
            return code


def _take(folder: Path) -> HostShare | None:
    """Return the share that an order brings, and delete the order; None without one."""
    path = folder / _ORDER_FILE
    try:
        found = msgspec.json.decode(path.read_bytes(), type=HostShare)
        path.unlink()
    except (OSError, msgspec.MsgspecError):
        return None
    return found


def _probation_s(share: HostShare) -> float:
    """Return how long after its start a refusal is one of the new settings."""
    scheduler = share.config.scheduler
    return scheduler.init_deadline_s + scheduler.load_deadline_s
