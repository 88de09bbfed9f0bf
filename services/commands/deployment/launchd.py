"""Jobs as LaunchDaemons of macOS (launchd.plist(5)), and commands that start and stop them. Pure.

A LaunchDaemon starts at boot, before any login.
"""

import plistlib
from collections.abc import Sequence
from typing import Any

from services.commands.deployment.jobs import FILES_MAX, Job

FOLDER = "Library/LaunchDaemons"
PREFIX = "org.lockstep."
PATTERN = f"{PREFIX}*.plist"

_PRIVATE = 0o077


def label(job: Job) -> str:
    """Return the name by which launchd knows a job, such as org.lockstep.gateway."""
    return PREFIX + job.name


def file_name(job: Job) -> str:
    """Return the name of a job's property list, such as org.lockstep.gateway.plist."""
    return f"{label(job)}.plist"


def properties(job: Job) -> dict[str, Any]:
    """Return the properties of a job by their names in launchd.plist(5)."""
    return {
        "Label": label(job),
        "ProgramArguments": list(job.command),
        "UserName": job.place.user,
        "WorkingDirectory": job.place.work_dir,
        # The process itself keeps its log there in files that rotate, which launchd cannot.
        "EnvironmentVariables": {**job.environment, "LOCKSTEP_LOG_DIRECTORY": job.place.log_dir},
        "RunAtLoad": True,
        "KeepAlive": True,
        "ThrottleInterval": job.pause_s,
        # Time until SIGKILL; the default of launchd is shorter than a drain.
        "ExitTimeOut": job.end_s,
        # Otherwise launchd slows the process down in favour of interactive programs.
        "ProcessType": "Interactive",
        "SoftResourceLimits": {"NumberOfFiles": FILES_MAX},
        "HardResourceLimits": {"NumberOfFiles": FILES_MAX},
        "Umask": _PRIVATE,
        # Until the process has opened this file itself, launchd writes to it.
        "StandardOutPath": job.log_file,
        "StandardErrorPath": job.log_file,
    }


def render(job: Job) -> str:
    """Return the content of a job's property list, as XML."""
    return plistlib.dumps(properties(job), sort_keys=False).decode()


def files(jobs: Sequence[Job]) -> dict[str, str]:
    """Return path without the leading slash -> content of each job's property list."""
    return {f"{FOLDER}/{file_name(job)}": render(job) for job in jobs}


def make_log_folder(job: Job) -> list[str]:
    """Return the command that makes the folder of a job's log, which the job's user owns."""
    place = job.place
    return ["/usr/bin/install", "-d", "-o", place.user, "-m", "0750", place.log_dir]


def stop(name: str) -> list[str]:
    """Return the command that stops and unloads a job; it fails if the job is not loaded.

    Args:
        name: label of the job, or the name of its file.
    """
    return ["/bin/launchctl", "bootout", f"system/{name.removesuffix('.plist')}"]


def start(job: Job) -> list[list[str]]:
    """Return the two commands that enable and start a job.

    The second fails while an earlier process of the job is still ending.
    """
    return [
        ["/bin/launchctl", "enable", f"system/{label(job)}"],
        ["/bin/launchctl", "bootstrap", "system", f"/{FOLDER}/{file_name(job)}"],
    ]
