"""Jobs as units of systemd (systemd.service(5)), and commands that start and stop them. Pure."""

import re
from collections.abc import Sequence

from services.commands.deployment.jobs import FILES_MAX, SUPERVISED_JOB, Job
from shared import limits

FOLDER = "etc/systemd/system"
PATTERNS = (f"{SUPERVISED_JOB}.service", f"{SUPERVISED_JOB}-*.service")

_PLAIN = re.compile(r"[A-Za-z0-9_@:,./+=-]+")
_SYSTEMCTL = "/usr/bin/systemctl"


def unit_name(name: str) -> str:
    """Return the name of the unit of the job `name`, such as lockstep-gateway.service."""
    return f"{name}.service" if name == SUPERVISED_JOB else f"{SUPERVISED_JOB}-{name}.service"


def file_name(job: Job) -> str:
    """Return the name of a job's unit file, which is the name of its unit."""
    return unit_name(job.name)


def render(job: Job) -> str:
    """Return the content of a job's unit file. The journal keeps and rotates its log."""
    after = " ".join(["network-online.target", *map(unit_name, job.after)])
    lines = [
        "[Unit]",
        f"Description={job.summary}",
        "Wants=network-online.target",
        f"After={after}",
        # Starts are never given up, because another host may be the cause.
        "StartLimitIntervalSec=0",
        "",
        "[Service]",
        "Type=exec",
        f"User={job.place.user}",
        f"WorkingDirectory={job.place.work_dir.replace('%', '%%')}",
        *(f"Environment={_quoted(f'{key}={value}')}" for key, value in job.environment.items()),
        f"ExecStart={' '.join(map(_word, job.command))}",
        "Restart=always",
        f"RestartSec={job.pause_s}",
        # Another start does not help if a setting or the command line is wrong.
        f"RestartPreventExitStatus={limits.EXIT_USAGE} {limits.EXIT_CONFIG}",
        # Exit status of a rank whose epoch has ended.
        f"SuccessExitStatus={limits.EXIT_WORLD_LOST}",
        f"TimeoutStopSec={job.end_s}",
        # SIGTERM goes only to the main process: a supervisor stops its children in order.
        "KillMode=mixed",
        f"LimitNOFILE={FILES_MAX}",
        "UMask=0077",
        "NoNewPrivileges=true",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
        "",
    ]
    return "\n".join(lines)


def files(jobs: Sequence[Job]) -> dict[str, str]:
    """Return path without the leading slash -> content of each job's unit file."""
    return {f"{FOLDER}/{file_name(job)}": render(job) for job in jobs}


def stop(names: Sequence[str]) -> list[str]:
    """Return the command that stops and disables units, given their file names."""
    return [_SYSTEMCTL, "disable", "--now", *names]


def reload() -> list[str]:
    """Return the command that makes systemd read all unit files again."""
    return [_SYSTEMCTL, "daemon-reload"]


def start(jobs: Sequence[Job]) -> list[list[str]]:
    """Return the commands that enable units at boot and restart them with their new files."""
    names = [file_name(job) for job in jobs]
    return [[_SYSTEMCTL, "enable", *names], [_SYSTEMCTL, "restart", *names]]


def _word(text: str) -> str:
    """Return one word of a command line, with dollar signs escaped."""
    return _quoted(text.replace("$", "$$"))


def _quoted(text: str) -> str:
    """Return text as one word, quoted for systemd if necessary."""
    text = text.replace("%", "%%")
    if _PLAIN.fullmatch(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
