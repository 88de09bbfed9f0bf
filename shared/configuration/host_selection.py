"""Which host of an inventory a command is about, and what may not be said beside an inventory."""

import socket
from collections.abc import Mapping
from typing import Any

from shared.configuration import host_share, inventory
from shared.configuration.host_share import HostShare
from shared.configuration.inventory import HostEntry, Inventory
from shared.configuration.loading import API_KEYS_VARIABLE, environment_name, load_config, sections
from shared.errors import ConfigError, UsageError

_HOST = "gateway.host"
"""The setting that `--host` overrides; with an inventory the flag names one of its hosts."""


def select_share(
    file: str | None,
    config_file: str | None,
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
) -> HostShare:
    """Return what this machine runs: all of it by a configuration, or a host's share.

    Args:
        file: the inventory, or None.
        config_file: the configuration, or None.
        flags: dotted keys and values; with an inventory, only the name of a host.
        environment: variables.

    Raises:
        ConfigError: as `load_config`, `inventory.read` and `host_config.share`; or the environment
            overrides a setting although there is an inventory.
        UsageError: flags override settings although there is an inventory, or this machine is no
            host of it.
    """
    if file is None:
        return host_share.single_host_share(load_config(config_file, flags, environment))
    check_no_overrides(config_file, flags, environment)
    hosts = inventory.read(file)
    host = selected_host(hosts, flags) or hosts.this_host(socket.gethostname())
    return host_share.share_of_host(
        hosts, host, has_api_keys=bool(environment.get(API_KEYS_VARIABLE))
    )


def selected_host(hosts: Inventory, flags: Mapping[str, Any]) -> HostEntry | None:
    """Return the host that `--host` names, or None. Raises UsageError for one that is not there."""
    name = flags.get(_HOST)
    return hosts.host(name) if name else None


def check_no_overrides(
    config_file: str | None, flags: Mapping[str, Any], environment: Mapping[str, str]
) -> None:
    """Refuse what would say otherwise than the inventory. Raises UsageError, ConfigError."""
    given = [key for key, value in flags.items() if value is not None and key != _HOST]
    if config_file is not None or given:
        what = "--config" if config_file is not None else f"A flag that sets {given[0]}"
        raise UsageError(
            f"{what} does not go with --inventory: all settings stand there, so that they are the "
            "same on every host."
        )
    if variable := _override(environment):
        raise ConfigError(
            f"The environment variable {variable} does not go with --inventory, where all settings "
            "stand: unset it."
        )


def check_rank_is_here(share: HostShare, rank: int) -> None:
    """Refuse a rank that is another host's. Raises UsageError."""
    here = share.roles.ranks
    if share.name and rank >= 0 and rank not in here:
        raise UsageError(
            f"Rank {rank} is not one of the host {share.name}, which has "
            f"{', '.join(map(str, here)) or 'none'}."
        )


def _override(environment: Mapping[str, str]) -> str:
    """Return a variable that overrides a setting, "" if there is none."""
    for section, struct in sections().items():
        for key in struct.__struct_fields__:
            if environment_name(section, key) in environment:
                return environment_name(section, key)
    return ""
