"""Installation of Lockstep on a host: console script, settings, folders, user."""

import dataclasses
import getpass
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from shared.configuration import inventory
from shared.configuration.host_share import HostShare
from shared.configuration.inventory import HostEntry
from shared.configuration.loading import API_KEYS_VARIABLE, overriding_variables
from shared.errors import ConfigError, UsageError

LOG_DIR = "/var/log/lockstep"
"""Folder of log files under launchd unless the inventory or log.directory names one."""

_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@$\\-]{0,254}")


@dataclasses.dataclass(frozen=True, slots=True)
class Installation:
    """Paths of Lockstep on one host that its jobs need, and the user of its processes."""

    executable: str
    """Console script."""
    settings: tuple[str, ...]
    """Options that name the settings, for every command."""
    work_dir: str
    """Working folder of the processes."""
    log_dir: str
    """Folder of their logs under launchd."""
    user: str
    """User that runs them."""

    def __post_init__(self) -> None:
        """Refuse values that would break out of their line in a job's file. Raises ConfigError."""
        if not _USER.fullmatch(self.user):
            raise ConfigError(f"{self.user!r} is not the name of a user (--user).")
        for value in (self.executable, *self.settings, self.work_dir, self.log_dir):
            if not value.isprintable():
                raise ConfigError(
                    f"{value!r} has a line end or control character, which a job's file must not "
                    "contain: rename it."
                )

    @property
    def python(self) -> str:
        """Path of the Python interpreter beside the console script."""
        return str(PurePosixPath(self.executable).parent / "python")


def find_installation(
    share: HostShare, config_file: str | None, inventory_file: str | None, user: str = ""
) -> Installation:
    """Return paths and user of Lockstep on a host, from its `[[hosts]]` table in the inventory.

    Paths that are missing there, or without an inventory, are those of this machine.

    Args:
        share: the host's part of the configuration: its name in the inventory and its roles.
        config_file: path of the configuration file, with which the host's processes are started
            if there is no inventory; else it is not used.
        inventory_file: path of the inventory, or None.
        user: user of processes unless the inventory names one; "": the calling user.

    Raises:
        UsageError: when `config_file` and `inventory_file` are both None.
        ConfigError: when the inventory is wrong, or no user is named and the caller is root.
    """
    host = HostEntry(name="this-machine")
    if inventory_file is not None:
        host = inventory.read(inventory_file).host(share.name)
        file = host.inventory or str(Path(inventory_file).absolute())
        settings: tuple[str, ...] = ("--inventory", file, "--host", share.name)
    elif config_file is not None:
        file = str(Path(config_file).absolute())
        settings = ("--config", file)
    else:
        raise UsageError(
            "Settings are missing: give --config FILE for one machine, or --inventory FILE for "
            "several (lockstep.example.toml shows all settings; an empty file is enough)."
        )
    return Installation(
        executable=host.executable or console_script(),
        settings=settings,
        work_dir=host.work_dir or str(PurePosixPath(file).parent),
        log_dir=host.log_dir or share.config.log.directory or LOG_DIR,
        user=host.user or user or _calling_user(),
    )


def console_script() -> str:
    """Return the path of the script `lockstep` beside the Python interpreter that runs this."""
    return str(Path(sys.executable).parent / "lockstep")


def check_environment(environment: Mapping[str, str]) -> None:
    """Refuse settings and API keys given as environment variables, because jobs would lack them.

    Args:
        environment: environment variables of this process.

    Raises:
        ConfigError: when one of them is set.
    """
    if environment.get(API_KEYS_VARIABLE):
        raise ConfigError(
            f"{API_KEYS_VARIABLE} is set: jobs hold no secrets, so they would lack it. Set "
            "gateway.api_keys_file, make keys with `lockstep api-key new`, and unset the variable."
        )
    for variable, key in overriding_variables(environment).items():
        raise ConfigError(
            f"{variable} is set here, but jobs would lack it: write {key} into the file, and unset "
            "the variable."
        )


def check_installation(place: Installation, share: HostShare) -> None:
    """Refuse paths that a job of launchd or systemd would not find.

    Args:
        place: paths of the jobs.
        share: settings of the host.

    Raises:
        ConfigError: when a path is not absolute, or the run folder is not set.
    """
    paths = {"executable": place.executable, "work_dir": place.work_dir, "log_dir": place.log_dir}
    for name, path in (*paths.items(), ("the settings", place.settings[1])):
        if not path.startswith("/"):
            raise ConfigError(f"A job needs an absolute path, but {name} is {path}.")
    if not share.config.paths.run_dir:
        raise ConfigError(
            "paths.run_dir (run_dir of the host) is not set, and the state folder of "
            "jobs differs from yours: set it, so that `lockstep restart` finds them."
        )


def _calling_user() -> str:
    """Return the calling user, also behind sudo. Raises: ConfigError: it is root."""
    try:
        name = os.environ.get("SUDO_USER") or getpass.getuser()
    except (KeyError, OSError):
        raise ConfigError(
            f"User {os.getuid()} is not in the user database: name the user that runs Lockstep "
            "with --user."
        ) from None
    if name == "root":
        raise ConfigError(
            "Lockstep needs no root rights to serve: name the user that runs it with --user, or "
            "with `user` of the host in the inventory."
        )
    return name
