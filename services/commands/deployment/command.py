"""Commands `lockstep launchd` and `lockstep systemd`. Own their options and the check of rights."""

import dataclasses
import functools
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import click

from services.commands.cli.click_support import Group
from services.commands.cli.flags import SettingSources, source_options
from services.commands.deployment import installation, installing, jobs, launchd, systemd
from services.commands.deployment.installing import Target
from services.commands.deployment.jobs import Job
from shared.errors import ConfigError, UsageError
from shared.os.standard_streams import print_line

Kind = Literal["launchd", "systemd"]
_PLATFORMS: dict[Kind, str] = {"launchd": "darwin", "systemd": "linux"}
_OTHERS: dict[Kind, Kind] = {"launchd": "systemd", "systemd": "launchd"}

_root_option = click.option(
    "--root", metavar="DIR", type=click.Path(), help="Folder used as /; no command is run."
)


@dataclasses.dataclass(frozen=True, slots=True)
class JobOptions:
    """Options of `lockstep launchd` and `lockstep systemd` that determine a host's jobs."""

    sources: SettingSources
    supervised: bool
    """Whether one job runs `lockstep up`, instead of one job per role."""
    user: str
    """User that runs the jobs; "": the calling user."""
    env: tuple[str, ...]
    """Further environment variables, as NAME=VALUE."""


def _job_options(function: Callable[..., None]) -> Callable[..., int | None]:
    """Add the options of JobOptions to a command."""

    @functools.wraps(function)
    def command(
        sources: SettingSources,
        *,
        supervised: bool,
        user: str,
        env: tuple[str, ...],
        **others: Any,
    ) -> None:
        function(JobOptions(sources, supervised, user, env), **others)

    for add in (
        click.option(
            "--env",
            metavar="NAME=VALUE",
            multiple=True,
            help="Further environment variable, repeatable; no secrets: every user can read the "
            "files.",
        ),
        click.option(
            "--user", metavar="NAME", default="", help="User that runs the jobs (default: you)."
        ),
        click.option(
            "--supervised",
            is_flag=True,
            help="Make one job that runs `lockstep up`, instead of one per role.",
        ),
    ):
        command = add(command)
    return source_options(command)


def _make_group(kind: Kind, summary: str) -> click.Group:
    group = Group(name=kind, help=summary)

    @group.command(name="render")
    @_job_options
    def render_command(options: JobOptions) -> None:
        """Print the files."""
        print_line(render(kind, make_jobs(options, os.environ)))

    @group.command(name="install")
    @_job_options
    @_root_option
    def install_command(options: JobOptions, *, root: str | None) -> None:
        """Write the files and start the jobs (needs root rights)."""
        print_line(install(kind, make_jobs(options, os.environ), root))

    @group.command(name="uninstall")
    @_root_option
    def uninstall_command(root: str | None) -> None:
        """Stop the jobs and remove the files (needs root rights)."""
        print_line(uninstall(kind, root))

    return group


launchd_group = _make_group("launchd", "Run Lockstep from boot on macOS, as LaunchDaemons.")
systemd_group = _make_group("systemd", "Run Lockstep from boot on Linux, as units.")


def make_jobs(options: JobOptions, environment: Mapping[str, str]) -> list[Job]:
    """Return the jobs that keep this host's processes running.

    Args:
        options: options of the command.
        environment: environment variables of this process; settings among them are refused,
            because jobs do not inherit them.

    Raises:
        ConfigError: when a setting is wrong or is in `environment`, or a job lacks a path.
        UsageError: when options contradict each other.
    """
    sources = options.sources
    if not sources.inventory and sources.overrides:
        raise UsageError("--host names a host of an inventory: give --inventory too.")
    variables = jobs.parse_variables(options.env)
    # Jobs do not inherit this environment. This is checked first, because it may change settings.
    installation.check_environment(environment)
    share = sources.share()
    where = installation.find_installation(share, sources.config, sources.inventory, options.user)
    installation.check_installation(where, share)
    return jobs.make_host_jobs(share, where, variables, supervised=options.supervised)


def render(kind: Kind, made: Sequence[Job]) -> str:
    """Return the contents of all files of the jobs as one text, each below its path.

    Args:
        kind: system that runs the jobs.
        made: all jobs of this host.
    """
    if kind == "systemd":
        files = {f"/{systemd.FOLDER}/{systemd.file_name(job)}": systemd.render(job) for job in made}
    else:
        files = {f"/{launchd.FOLDER}/{launchd.file_name(job)}": launchd.render(job) for job in made}
        files[f"/{launchd.ROTATION_FILE}"] = launchd.rotation(made)
    return "\n".join(f"==> {path} <==\n{text}" for path, text in files.items()).rstrip("\n")


def install(kind: Kind, made: Sequence[Job], root: str | None) -> str:
    """Write the files of jobs and start the jobs.

    Args:
        kind: system that runs the jobs.
        made: all jobs of this host; other installed jobs of Lockstep are removed.
        root: folder used in place of /, for which no command is run; None: /.

    Returns:
        A text that lists the changes.

    Raises:
        ConfigError: when root rights are missing, or a file cannot be written.
        UsageError: when this machine has no `kind`.
        UnavailableError: when launchd or systemd refuses.
    """
    target, not_run = _target(kind, "install", root)
    if kind == "launchd":
        installing.install_launchd(target, made)
    else:
        installing.install_systemd(target, made)
    return _done(target, not_run)


def uninstall(kind: Kind, root: str | None) -> str:
    """Stop all jobs of Lockstep and remove their files. Arguments and errors: as `install`."""
    target, not_run = _target(kind, "uninstall", root)
    if kind == "launchd":
        installing.uninstall_launchd(target)
    else:
        installing.uninstall_systemd(target)
    return _done(target, not_run)


def _target(kind: Kind, action: str, root: str | None) -> tuple[Target, list[str]]:
    """Return the machine to change, and a list that collects the commands not run."""
    not_run: list[str] = []
    if not root:
        _check_rights(kind, action)
        return Target(Path("/"), installing.run_command), not_run

    def note(command: Sequence[str]) -> int:
        not_run.append(f"not run: {shlex.join(command)}")
        return 0

    return Target(Path(root), note), not_run


def _done(target: Target, not_run: Sequence[str]) -> str:
    return "\n".join([*target.changes, *not_run]) or "There was nothing to do."


def _check_rights(kind: Kind, action: str) -> None:
    """Refuse to change a machine of the other platform, or without root rights."""
    if sys.platform != _PLATFORMS[kind]:
        raise UsageError(
            f"This machine has no {kind}: use `lockstep {_OTHERS[kind]} {action}`, or --root DIR "
            "to write the files elsewhere."
        )
    if os.geteuid() != 0:
        words = [installation.console_script(), *sys.argv[1:]]
        raise ConfigError(f"This command needs root rights: run `sudo {shlex.join(words)}`.")
