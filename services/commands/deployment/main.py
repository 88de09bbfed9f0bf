"""`lockstep launchd|systemd render|install|uninstall`: this host's jobs; returns what to print."""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from services.commands.deployment import installing, jobs, launchd, place, systemd
from services.commands.deployment.installing import Target
from services.commands.deployment.jobs import Job
from shared.configuration.host_share import HostShare
from shared.errors import ConfigError, UsageError

KINDS: Mapping[str, str] = {
    "launchd": "run Lockstep from boot on, on macOS: LaunchDaemons",
    "systemd": "run Lockstep from boot on, on Linux: units",
}
_PLATFORMS = {"launchd": "darwin", "systemd": "linux"}
_ACTIONS = {
    "render": "print the files",
    "install": "write the files and start the jobs (needs root rights)",
    "uninstall": "end the jobs and remove the files (needs root rights)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `lockstep launchd` or `lockstep systemd` its actions."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, summary in _ACTIONS.items():
        action = actions.add_parser(name, help=summary)
        action.add_argument(
            "--root", metavar="DIR", help="a folder that stands for /; no command is run"
        )
        if name == "uninstall":
            continue
        action.add_argument(
            "--supervised",
            action="store_true",
            help="one job that runs `lockstep up`, instead of one per role",
        )
        action.add_argument("--user", metavar="NAME", default="", help="as whom (default: you)")
        action.add_argument(
            "--env",
            metavar="NAME=VALUE",
            action="append",
            default=[],
            help="further environment, may be repeated; no secrets: everybody may read the files",
        )
        action.add_argument("--config", metavar="FILE", help="TOML file with settings")
        action.add_argument("--inventory", metavar="FILE", help="TOML file of several hosts")
        action.add_argument("--host", metavar="H", help="with --inventory: which host")


def run(
    kind: str,
    options: argparse.Namespace,
    choose: Callable[[], HostShare],
    environment: Mapping[str, str],
) -> str:
    """Do what the command line says; return what to print.

    Args:
        kind: `launchd` or `systemd`.
        options: the command line.
        choose: returns what this host runs; not asked for when jobs are taken away.
        environment: variables of this process.

    Raises:
        ConfigError: the settings do not do for jobs, or a file cannot be written.
        UsageError: root rights are missing, or the platform is the other one.
        UnavailableError: launchd or systemd refuses.
    """
    if options.action != "uninstall":
        if not options.inventory and options.host:
            raise UsageError("--host names a host of an inventory: give --inventory too.")
        made = _jobs(options, choose, environment)
        if options.action == "render":
            return render(kind, made)
    _check_rights(kind, options)
    calls: list[str] = []

    def note(command: Sequence[str]) -> int:
        calls.append(f"not run: {shlex.join(command)}")
        return 0

    target = Target(Path(options.root or "/"), note if options.root else installing.run_command)
    if options.action == "uninstall":
        (installing.uninstall_launchd if kind == "launchd" else installing.uninstall_systemd)(
            target
        )
    elif kind == "launchd":
        installing.install_launchd(target, made)
    else:
        installing.install_systemd(target, made)
    return "\n".join([*target.said, *calls]) or "There was nothing to do."


def render(kind: str, made: Sequence[Job]) -> str:
    """Return the files, each below its path."""
    if kind == "systemd":
        files = {f"/{systemd.FOLDER}/{systemd.file_name(job)}": systemd.render(job) for job in made}
    else:
        files = {f"/{launchd.FOLDER}/{launchd.file_name(job)}": launchd.render(job) for job in made}
        files[f"/{launchd.ROTATION_FILE}"] = launchd.rotation(made)
    return "\n".join(f"==> {path} <==\n{text}" for path, text in files.items()).rstrip("\n")


def _jobs(
    options: argparse.Namespace, choose: Callable[[], HostShare], environment: Mapping[str, str]
) -> list[Job]:
    variables = jobs.variables(options.env)
    # What the environment overrides here, a job would not have: said before anything else.
    place.check_environment(environment)
    share = choose()
    where = place.find(share, options.config, options.inventory, options.user)
    place.check(where, share)
    return jobs.make(share, where, variables, supervised=options.supervised)


def _check_rights(kind: str, options: argparse.Namespace) -> None:
    """Refuse to change a machine that is the other kind, or as somebody who may not."""
    if options.root:
        return
    if sys.platform != _PLATFORMS[kind]:
        other = next(one for one in KINDS if one != kind)
        raise UsageError(
            f"This machine has no {kind}: use `lockstep {other} {options.action}`, or --root DIR "
            "to write the files elsewhere."
        )
    if os.geteuid() != 0:
        words = [place.here(), *sys.argv[1:]]
        raise ConfigError(f"That needs root rights: run `sudo {shlex.join(words)}`.")
