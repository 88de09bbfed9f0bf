"""Jobs as units of systemd (systemd.service(5)), and the calls that start and end them. Pure."""

import re
from collections.abc import Sequence

from services.commands.deployment.jobs import ALL, FILES_MAX, Job
from shared import limits

FOLDER = "etc/systemd/system"
PATTERNS = (f"{ALL}.service", f"{ALL}-*.service")

_PLAIN = re.compile(r"[A-Za-z0-9_@:,./+=-]+")
_SYSTEMCTL = "/usr/bin/systemctl"


def unit_name(name: str) -> str:
    """Return what systemd calls the job of this name."""
    return f"{ALL}.service" if name == ALL else f"{ALL}-{name}.service"


def file_name(job: Job) -> str:
    """Return the name of its file."""
    return unit_name(job.name)


def render(job: Job) -> str:
    """Return its file's content. What it says goes to the journal, which rotates itself."""
    after = " ".join(["network-online.target", *map(unit_name, job.after)])
    lines = [
        "[Unit]",
        f"Description={job.summary}",
        "Wants=network-online.target",
        f"After={after}",
        # It is tried for ever: what is wrong may be another host.
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
        # No start can help where a setting or the command line is wrong.
        f"RestartPreventExitStatus={limits.EXIT_USAGE} {limits.EXIT_CONFIG}",
        # How a rank ends with its epoch.
        f"SuccessExitStatus={limits.EXIT_WORLD_LOST}",
        f"TimeoutStopSec={job.end_s}",
        # SIGTERM for the process alone: a supervisor ends its children in order.
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


def stop(names: Sequence[str]) -> list[str]:
    """Return the call that ends units for good, by their files' names."""
    return [_SYSTEMCTL, "disable", "--now", *names]


def reload() -> list[str]:
    """Return the call that has systemd read the files."""
    return [_SYSTEMCTL, "daemon-reload"]


def start(jobs: Sequence[Job]) -> list[list[str]]:
    """Return the calls that have units start at boot, and now with what their files say now."""
    names = [file_name(job) for job in jobs]
    return [[_SYSTEMCTL, "enable", *names], [_SYSTEMCTL, "restart", *names]]


def _word(text: str) -> str:
    """Return one word of a command line, where a dollar sign would stand for a variable."""
    return _quoted(text.replace("$", "$$"))


def _quoted(text: str) -> str:
    """Return text as one word, quoted for systemd where it must be."""
    text = text.replace("%", "%%")
    if _PLAIN.fullmatch(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
