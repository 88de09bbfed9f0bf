"""Commands `lockstep launchd` and `lockstep systemd`. Own their options and the check of rights."""

import os
import shlex
import sys
from collections.abc import Callable, Sequence
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


def _job_options(function: Callable[..., None]) -> Callable[..., int | None]:
    """Add the options that determine a host's jobs to a command."""
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
        function = add(function)
    return source_options(function)


def _make_group(kind: Kind, summary: str) -> click.Group:
    group = Group(name=kind, help=summary)

    @group.command(name="render")
    @_job_options
    def render_command(sources: SettingSources, **given: Any) -> None:
        """Print the files."""
        print_line(render(kind, make_jobs(sources, **given)))

    @group.command(name="install")
    @_job_options
    @_root_option
    def install_command(sources: SettingSources, *, root: str | None, **given: Any) -> None:
        """Write the files and start the jobs (needs root rights)."""
        print_line(change(kind, "install", root, make_jobs(sources, **given)))

    @group.command(name="uninstall")
    @_root_option
    def uninstall_command(root: str | None) -> None:
        """Stop the jobs and remove the files (needs root rights)."""
        print_line(change(kind, "uninstall", root))

    return group


launchd_group = _make_group("launchd", "Run Lockstep from boot on macOS, as LaunchDaemons.")
systemd_group = _make_group("systemd", "Run Lockstep from boot on Linux, as units.")


def make_jobs(
    sources: SettingSources, *, supervised: bool, user: str, env: Sequence[str]
) -> list[Job]:
    """Return the jobs that keep this host's processes running.

    Args:
        sources: sources of the settings.
        supervised: whether one job runs `lockstep up`, instead of one job per role.
        user: user that runs the jobs; "": the calling user.
        env: further environment variables of the jobs, as NAME=VALUE.

    Raises:
        ConfigError: when a setting is wrong or is given as an environment variable, which jobs do
            not inherit, or a job lacks a path.
        UsageError: when options contradict each other.
    """
    if not sources.inventory and sources.overrides:
        raise UsageError("--host names a host of an inventory: give --inventory too.")
    variables = jobs.parse_variables(env)
    # Jobs do not inherit this environment. This is checked first, because it may change settings.
    installation.check_environment(os.environ)
    share = sources.share()
    where = installation.find_installation(share, sources.config, sources.inventory, user)
    installation.check_installation(where, share)
    return jobs.make_host_jobs(share, where, variables, supervised=supervised)


def render(kind: Kind, made: Sequence[Job]) -> str:
    """Return the contents of all files of the jobs as one text, each below its path.

    Args:
        kind: system that runs the jobs.
        made: all jobs of this host.
    """
    files = launchd.files(made) if kind == "launchd" else systemd.files(made)
    return "\n".join(f"==> /{path} <==\n{text}" for path, text in files.items()).rstrip("\n")


def change(
    kind: Kind,
    action: Literal["install", "uninstall"],
    root: str | None,
    made: Sequence[Job] = (),
) -> str:
    """Write the files of jobs and start the jobs, or stop all jobs and remove their files.

    Args:
        kind: system that runs the jobs.
        action: what to do.
        root: folder used in place of /, for which no command is run; None: /.
        made: to install: all jobs of this host; other installed jobs of Lockstep are removed.

    Returns:
        A text that lists the changes.

    Raises:
        ConfigError: when root rights are missing, or a file cannot be written.
        UsageError: when this machine has no `kind`.
        UnavailableError: when launchd or systemd refuses.
    """
    not_run: list[str] = []

    def note(command: Sequence[str]) -> int:
        not_run.append(f"not run: {shlex.join(command)}")
        return 0

    if not root:
        _check_rights(kind, action)
    target = Target(Path(root or "/"), note if root else installing.run_command)
    match action, kind:
        case "install", "launchd":
            installing.install_launchd(target, made)
        case "install", _:
            installing.install_systemd(target, made)
        case _, "launchd":
            installing.uninstall_launchd(target)
        case _:
            installing.uninstall_systemd(target)
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
