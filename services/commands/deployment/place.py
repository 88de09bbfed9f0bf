"""Where Lockstep is on a host: its console script, its settings, its folders, its user."""

import dataclasses
import getpass
import os
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from shared.configuration import inventory
from shared.configuration.host_share import HostShare
from shared.configuration.inventory import HostEntry
from shared.configuration.loading import API_KEYS_VARIABLE, environment_name, sections
from shared.errors import ConfigError, UsageError

LOG_DIR = "/var/log/lockstep"


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Absolute paths on one host, and as whom its processes run."""

    executable: str
    settings: tuple[str, ...]
    """The part of every command line that says where the settings are."""
    work_dir: str
    log_dir: str
    user: str

    @property
    def python(self) -> str:
        """The interpreter beside the console script."""
        return str(PurePosixPath(self.executable).parent / "python")


def find(
    share: HostShare, config_file: str | None, inventory_file: str | None, user: str = ""
) -> Place:
    """Return where things are on the host of `share`; what no `[[hosts]]` table says is as here.

    Args:
        share: its name is a host's of the inventory.
        config_file: the configuration, or None.
        inventory_file: the inventory, or None.
        user: as whom processes run unless the inventory says it; "": who asks.

    Raises:
        UsageError: `config_file` and `inventory_file` are both None.
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
            "Say which settings: --config FILE for one machine, or --inventory FILE for several "
            "(lockstep.example.toml shows all settings; an empty file will do)."
        )
    return Place(
        executable=host.executable or here(),
        settings=settings,
        work_dir=host.work_dir or str(PurePosixPath(file).parent),
        log_dir=host.log_dir or LOG_DIR,
        user=host.user or user or _asker(),
    )


def here() -> str:
    """Return the console script of this installation."""
    return str(Path(sys.executable).parent / "lockstep")


def check_environment(environment: Mapping[str, str]) -> None:
    """Refuse what is set here and would be missing in a job. Raises ConfigError."""
    if environment.get(API_KEYS_VARIABLE):
        raise ConfigError(
            f"{API_KEYS_VARIABLE} is set: jobs hold no secrets and would not have it. Set "
            "gateway.api_keys_file, make keys with `lockstep api-key new`, and unset the variable."
        )
    for section, struct in sections().items():
        for key in struct.__struct_fields__:
            if environment_name(section, key) in environment:
                raise ConfigError(
                    f"{environment_name(section, key)} is set here, but jobs would not have it: "
                    f"write {section}.{key} into the file, and unset the variable."
                )


def check(place: Place, share: HostShare) -> None:
    """Refuse what a job of launchd or systemd would not find.

    Raises:
        ConfigError: names what, and where to write it instead.
    """
    paths = {"executable": place.executable, "work_dir": place.work_dir, "log_dir": place.log_dir}
    for name, path in (*paths.items(), ("the settings", place.settings[1])):
        if not path.startswith("/"):
            raise ConfigError(f"A job needs an absolute path, but {name} is {path}.")
    if not share.config.paths.run_dir:
        raise ConfigError(
            "paths.run_dir (run_dir of the host) is not set, and jobs have another temporary "
            "folder than a terminal: set it, so that `lockstep restart` finds them."
        )


def _asker() -> str:
    """Return who asks; behind sudo, who typed it. Raises ConfigError for root itself."""
    name = os.environ.get("SUDO_USER") or getpass.getuser()
    if name == "root":
        raise ConfigError(
            "Lockstep needs no root rights to serve: say as whom it shall run, with --user, or "
            "with `user` of the host in the inventory."
        )
    return name
