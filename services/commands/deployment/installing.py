"""Installation of jobs for launchd or systemd. Owns the order of changes on the machine."""

import dataclasses
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from services.commands.deployment import launchd, systemd
from services.commands.deployment.jobs import Job
from shared.errors import ConfigError, UnavailableError

Call = Callable[[Sequence[str]], int]
"""Runs a command and returns its exit code."""

_RETRY_S = 1.0


@dataclasses.dataclass(slots=True)
class Target:
    """Machine on which jobs are installed: its files, its commands, and a list of changes."""

    root: Path
    """`/`, or a folder used in its place."""
    call: Call
    sleep: Callable[[float], None] = time.sleep
    """Waits for a number of seconds."""
    changes: list[str] = dataclasses.field(default_factory=list)
    """Changes so far, one sentence each."""

    def write(self, files: Mapping[str, str]) -> None:
        """Write files that every user can read, and note the changes.

        Args:
            files: path relative to the root -> content; missing folders are made.

        Raises:
            ConfigError: when one cannot be written.
        """
        for name, text in files.items():
            path = self.root / name
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                temporary = path.with_name(f".{path.name}.new")
                temporary.write_text(text, encoding="utf-8")
                temporary.chmod(0o644)
                temporary.replace(path)
            except OSError as error:
                raise ConfigError(f"Cannot write {path}: {error.strerror}.") from None
            self.changes.append(f"wrote {path}")

    def remove(self, path: Path) -> None:
        """Remove a file, if it exists, and note the change. Raises: ConfigError: it stays."""
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"Cannot remove {path}: {error.strerror}.") from None
        self.changes.append(f"removed {path}")

    def found(self, folder: str, *patterns: str) -> list[Path]:
        """Return the files in a folder whose names match a pattern, sorted.

        Args:
            folder: the folder, relative to the root.
            patterns: shell patterns, of which a name must match one.
        """
        return sorted({path for one in patterns for path in (self.root / folder).glob(one)})

    def run_checked(self, command: Sequence[str]) -> None:
        """Run a command. Raises: UnavailableError: its exit code is not 0."""
        code = self.call(command)
        if code:
            raise UnavailableError(f"`{shlex.join(command)}` failed with code {code}.")


def run_command(command: Sequence[str]) -> int:
    """Run a command with output to the terminal; return its exit code, 127 if it cannot be run.

    All commands are fixed in this folder; only names and paths in them are variable.
    """
    try:
        return subprocess.run(command, check=False).returncode
    except OSError:
        return 127


def install_launchd(target: Target, jobs: Sequence[Job]) -> None:
    """Stop Lockstep's LaunchDaemons, replace them by those of the given jobs, and start these.

    LaunchDaemons of Lockstep without a job among them are removed.

    Raises:
        ConfigError: when a file cannot be written.
        UnavailableError: when launchd refuses a job.
    """
    _stop_launchd(target, keep={launchd.file_name(job) for job in jobs})
    for job in jobs:
        target.run_checked(launchd.make_log_folder(job))
    target.write(launchd.files(jobs))
    for job in jobs:
        enable, bootstrap = launchd.start(job)
        target.run_checked(enable)
        # A predecessor that still drains makes this fail until it has ended.
        for _ in range(job.end_s):
            if target.call(bootstrap) == 0:
                break
            target.sleep(_RETRY_S)
        else:
            target.run_checked(bootstrap)
        target.changes.append(f"started {launchd.label(job)}")


def uninstall_launchd(target: Target) -> None:
    """Stop all LaunchDaemons of Lockstep and remove their files.

    Raises:
        ConfigError: when a file cannot be removed.
    """
    _stop_launchd(target, keep=set())


def install_systemd(target: Target, jobs: Sequence[Job]) -> None:
    """Write the units of the given jobs and restart them; stop and remove Lockstep's other units.

    Raises:
        ConfigError: when a file cannot be written.
        UnavailableError: when systemd refuses.
    """
    _stop_systemd(target, keep={systemd.file_name(job) for job in jobs})
    target.write(systemd.files(jobs))
    target.run_checked(systemd.reload())
    for command in systemd.start(jobs):
        target.run_checked(command)
    target.changes.append(f"started {', '.join(systemd.file_name(job) for job in jobs)}")


def uninstall_systemd(target: Target) -> None:
    """Stop and remove all units of Lockstep.

    Raises:
        ConfigError: when a file cannot be removed.
        UnavailableError: when systemd does not read its files again.
    """
    if _stop_systemd(target, keep=set()):
        target.run_checked(systemd.reload())


def _stop_launchd(target: Target, keep: set[str]) -> None:
    """Stop every job of Lockstep; remove the files whose names are not in `keep`."""
    for path in target.found(launchd.FOLDER, launchd.PATTERN):
        # This fails for a job that does not run, which is fine.
        target.call(launchd.stop(path.name))
        if path.name not in keep:
            target.remove(path)


def _stop_systemd(target: Target, keep: set[str]) -> bool:
    """Stop and remove the units not in `keep`; return whether there were any."""
    paths = [
        path for path in target.found(systemd.FOLDER, *systemd.PATTERNS) if path.name not in keep
    ]
    if paths:
        target.call(systemd.stop([path.name for path in paths]))
        for path in paths:
            target.remove(path)
    return bool(paths)
