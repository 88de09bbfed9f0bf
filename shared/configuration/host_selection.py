"""Selection of the host that a command applies to. Owns which options an inventory excludes."""

import socket
from collections.abc import Mapping
from typing import Any

from shared.configuration import host_share, inventory
from shared.configuration.host_share import HostShare
from shared.configuration.inventory import HostEntry, Inventory
from shared.configuration.loading import API_KEYS_VARIABLE, load_config, overriding_variables
from shared.errors import ConfigError, UsageError

_HOST = "gateway.host"
"""Setting that `--host` overrides. With an inventory the flag names one of its hosts instead."""


def select_share(
    file: str | None,
    config_file: str | None,
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
) -> HostShare:
    """Return the roles and settings of this machine, from the inventory or else a configuration.

    Args:
        file: path of the inventory, or None.
        config_file: path of the configuration, or None.
        flags: dotted keys and values; with an inventory, only the name of a host.
        environment: environment variables.

    Raises:
        ConfigError: as `load_config`, `inventory.read` and `host_share.share_of_host`, or when the
            environment overrides a setting beside an inventory.
        UsageError: when flags override settings beside an inventory, or the inventory does not
            contain this machine.
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
    """Return the inventory's host that `--host` names; None without this flag.

    Args:
        hosts: the inventory.
        flags: dotted keys and values; `--host` is stored under "gateway.host".

    Raises:
        UsageError: when the inventory has no such host.
    """
    name = flags.get(_HOST)
    return hosts.host(name) if name else None


def check_no_overrides(
    config_file: str | None, flags: Mapping[str, Any], environment: Mapping[str, str]
) -> None:
    """Check that only the inventory gives settings, so that they are the same on every host.

    Args:
        config_file: path of a configuration file, or None.
        flags: dotted keys and values; only `--host` is allowed.
        environment: environment variables.

    Raises:
        UsageError: when there is a configuration file or another flag.
        ConfigError: when a variable sets a setting.
    """
    given = [key for key, value in flags.items() if value is not None and key != _HOST]
    if config_file is not None or given:
        what = "--config" if config_file is not None else f"A flag that sets {given[0]}"
        raise UsageError(
            f"{what} cannot be used with --inventory, which contains all settings, so that they "
            "are the same on every host."
        )
    for variable in overriding_variables(environment):
        raise ConfigError(
            f"The environment variable {variable} cannot be used with --inventory, which contains "
            "all settings: unset it."
        )


def check_rank_is_here(share: HostShare, rank: int) -> None:
    """Check that the inventory gives this rank to this host.

    Args:
        share: the host's share. Without an inventory every rank is accepted.
        rank: number of the rank; -1: any rank, which is accepted.

    Raises:
        UsageError: when the rank belongs to a different host.
    """
    here = share.roles.ranks
    if share.name and rank >= 0 and rank not in here:
        raise UsageError(
            f"Rank {rank} does not belong to the host {share.name}, whose ranks are "
            f"{', '.join(map(str, here)) or 'none'}."
        )
