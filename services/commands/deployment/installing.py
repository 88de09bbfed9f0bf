"""Puts jobs where launchd or systemd find them and starts them, or takes them away again."""

import dataclasses
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from services.commands.deployment import launchd, systemd
from services.commands.deployment.jobs import Job
from shared.errors import ConfigError, UnavailableError

Call = Callable[[Sequence[str]], int]
"""Runs a command and returns its exit code."""

_RETRY_S = 1.0


@dataclasses.dataclass(slots=True)
class Target:
    """The machine that is changed."""

    root: Path
    """`/`, or a folder that stands for it."""
    call: Call
    sleep: Callable[[float], None] = time.sleep
    said: list[str] = dataclasses.field(default_factory=list)
    """What was done."""

    def write(self, folder: str, name: str, text: str) -> None:
        """Write a file that everybody may read. Raises ConfigError when that cannot be done."""
        path = self.root / folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{name}.new")
            temporary.write_text(text, encoding="utf-8")
            temporary.chmod(0o644)
            temporary.replace(path)
        except OSError as error:
            raise ConfigError(f"Cannot write {path}: {error.strerror}.") from None
        self.said.append(f"wrote {path}")

    def remove(self, path: Path) -> None:
        """Remove a file. Raises ConfigError when that cannot be done."""
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"Cannot remove {path}: {error.strerror}.") from None
        self.said.append(f"removed {path}")

    def found(self, folder: str, *patterns: str) -> list[Path]:
        """Return our files in a folder."""
        return sorted({path for one in patterns for path in (self.root / folder).glob(one)})

    def must(self, command: Sequence[str]) -> None:
        """Run a command. Raises UnavailableError when it fails."""
        code = self.call(command)
        if code:
            raise UnavailableError(f"`{shlex.join(command)}` failed with code {code}.")


def run_command(command: Sequence[str]) -> int:
    """Run a command with the terminal's own output; return its exit code, 127 when there is none.

    The commands are this room's own: nothing in them comes from elsewhere but names and paths.
    """
    try:
        return subprocess.run(command, check=False).returncode
    except OSError:
        return 127


def install_launchd(target: Target, jobs: Sequence[Job]) -> None:
    """Write the LaunchDaemons, end those that ran before, start these.

    Raises:
        ConfigError: a file cannot be written.
        UnavailableError: launchd refuses a job.
    """
    _stop_launchd(target, keep={launchd.file_name(job) for job in jobs})
    for job in jobs:
        for command in launchd.prepare(job):
            target.must(command)
        target.write(launchd.FOLDER, launchd.file_name(job), launchd.render(job))
    folder, _, name = launchd.ROTATION_FILE.rpartition("/")
    target.write(folder, name, launchd.rotation(jobs))
    for job in jobs:
        enable, bootstrap = launchd.start(job)
        target.must(enable)
        # A predecessor that drains is in the way until it has ended.
        for _ in range(job.end_s):
            if target.call(bootstrap) == 0:
                break
            target.sleep(_RETRY_S)
        else:
            target.must(bootstrap)
        target.said.append(f"started {launchd.label(job)}")


def uninstall_launchd(target: Target) -> None:
    """End all LaunchDaemons of Lockstep and remove them. Raises ConfigError."""
    _stop_launchd(target, keep=set())
    rotation = target.root / launchd.ROTATION_FILE
    if rotation.exists():
        target.remove(rotation)


def install_systemd(target: Target, jobs: Sequence[Job]) -> None:
    """Write the units, end those that are none any more, start these.

    Raises:
        ConfigError: a file cannot be written.
        UnavailableError: systemd refuses.
    """
    _stop_systemd(target, keep={systemd.file_name(job) for job in jobs})
    for job in jobs:
        target.write(systemd.FOLDER, systemd.file_name(job), systemd.render(job))
    target.must(systemd.reload())
    for command in systemd.start(jobs):
        target.must(command)
    target.said.append(f"started {', '.join(systemd.file_name(job) for job in jobs)}")


def uninstall_systemd(target: Target) -> None:
    """End all units of Lockstep and remove them. Raises ConfigError, UnavailableError."""
    if _stop_systemd(target, keep=set()):
        target.must(systemd.reload())


def _stop_launchd(target: Target, keep: set[str]) -> None:
    """End every job of ours; remove the files of those that do not stay."""
    for path in target.found(launchd.FOLDER, launchd.PATTERN):
        # It fails for a job that does not run, which is what is wanted.
        target.call(launchd.stop(path.name))
        if path.name not in keep:
            target.remove(path)


def _stop_systemd(target: Target, keep: set[str]) -> bool:
    """End and remove the units that do not stay; tell whether there were any."""
    paths = [
        path for path in target.found(systemd.FOLDER, *systemd.PATTERNS) if path.name not in keep
    ]
    if paths:
        target.call(systemd.stop([path.name for path in paths]))
        for path in paths:
            target.remove(path)
    return bool(paths)
