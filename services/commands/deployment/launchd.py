"""Jobs as LaunchDaemons of macOS (launchd.plist(5)), and the calls that start and end them. Pure.

A LaunchDaemon starts at boot, before anybody logs in.
"""

import plistlib
from collections.abc import Sequence
from typing import Any

from services.commands.deployment.jobs import FILES_MAX, Job

FOLDER = "Library/LaunchDaemons"
PREFIX = "org.lockstep."
PATTERN = f"{PREFIX}*.plist"
ROTATION_FILE = "etc/newsyslog.d/lockstep.conf"

_PRIVATE = 0o077


def label(job: Job) -> str:
    """Return what launchd calls a job."""
    return PREFIX + job.name


def file_name(job: Job) -> str:
    """Return the name of its file."""
    return f"{label(job)}.plist"


def properties(job: Job) -> dict[str, Any]:
    """Return what its file says."""
    return {
        "Label": label(job),
        "ProgramArguments": list(job.command),
        "UserName": job.place.user,
        "WorkingDirectory": job.place.work_dir,
        "EnvironmentVariables": dict(job.environment),
        "RunAtLoad": True,
        "KeepAlive": True,
        "ThrottleInterval": job.pause_s,
        # launchd sends SIGKILL then; its own default is shorter than a drain.
        "ExitTimeOut": job.end_s,
        # Not held back in favour of what somebody does at the screen.
        "ProcessType": "Interactive",
        "SoftResourceLimits": {"NumberOfFiles": FILES_MAX},
        "HardResourceLimits": {"NumberOfFiles": FILES_MAX},
        "Umask": _PRIVATE,
        "StandardOutPath": job.log_file,
        "StandardErrorPath": job.log_file,
    }


def render(job: Job) -> str:
    """Return its file's content."""
    return plistlib.dumps(properties(job), sort_keys=False).decode()


def rotation(jobs: Sequence[Job]) -> str:
    """Return a file for newsyslog(8) that keeps five logs of 10 MB each per job.

    launchd opens a log once per process, so a running one goes on writing to the renamed file:
    nothing is compressed, which would lose lines.
    """
    lines = [
        "# Logs of Lockstep: file, owner, mode, how many, KB, when, N: nobody is told.",
        "# A process writes to the new file once it is started anew (`lockstep restart ROLE`).",
    ]
    lines += [f"{job.log_file}\t{job.place.user}:\t640\t5\t10240\t*\tN" for job in jobs]
    return "\n".join(lines) + "\n"


def prepare(job: Job) -> list[list[str]]:
    """Return the calls that make its log's folder."""
    place = job.place
    return [["/usr/bin/install", "-d", "-o", place.user, "-m", "0750", place.log_dir]]


def stop(name: str) -> list[str]:
    """Return the call that ends a job and forgets it; it fails when there is none."""
    return ["/bin/launchctl", "bootout", f"system/{name.removesuffix('.plist')}"]


def start(job: Job) -> list[list[str]]:
    """Return the calls that make it known and start it. The last fails while it still ends."""
    return [
        ["/bin/launchctl", "enable", f"system/{label(job)}"],
        ["/bin/launchctl", "bootstrap", "system", f"/{FOLDER}/{file_name(job)}"],
    ]
