"""Share of one host: its roles and settings, derived from the inventory alone.

The same inventory gives the same settings on every host, except for those in its own `[[hosts]]`
table.
"""

import copy
import dataclasses
from pathlib import Path, PurePath
from typing import Any

from shared.configuration import device_matrix
from shared.configuration.device_matrix import Matrix
from shared.configuration.inventory import HostEntry, Inventory
from shared.configuration.loading import config_from_tree
from shared.configuration.settings import Config
from shared.errors import ConfigError
from shared.os import private_files

DEVICES_FILE = "rdma_devices.json"
"""File in the scheduler's run folder with the matrix of the inventory's `rdma` tables."""


@dataclasses.dataclass(frozen=True, slots=True)
class HostRoles:
    """The processes that one host runs."""

    gateway: bool
    scheduler: bool
    cache_store: bool
    ranks: tuple[int, ...]
    """Numbers of its ranks."""


@dataclasses.dataclass(frozen=True, slots=True)
class HostShare:
    """The part of a cluster that one host runs: its roles, settings and files."""

    name: str
    """Name of the host; "" without an inventory, when one machine runs everything."""
    roles: HostRoles
    config: Config
    files: dict[str, str]
    """Path -> content of files that the scheduler on this host needs; {} on other hosts."""

    def write_files(self) -> None:
        """Write `files`, replacing older ones. Raises ConfigError if their folder is not usable."""
        for name, text in self.files.items():
            path = Path(name)
            with private_files.locked(path.parent):
                private_files.replace(path, text)


def single_host_share(config: Config) -> HostShare:
    """Return the share of a machine that runs all ranks and roles that the settings need."""
    stores = config.cache.enabled and config.cache.ssd
    ranks = tuple(range(config.world.size))
    return HostShare("", HostRoles(True, True, stores, ranks), config, {})


def share_of_host(
    inventory: Inventory, host: HostEntry, *, has_api_keys: bool = False
) -> HostShare:
    """Derive the roles, settings and files of one host from the inventory.

    Args:
        inventory: the inventory.
        host: one of its hosts.
        has_api_keys: the host's environment contains API keys.

    Raises:
        ConfigError: when a setting is wrong or contradicts the hosts.
    """
    tree = copy.deepcopy(inventory.settings)
    for section, key, value in _host_settings(host):
        _section(tree, section, inventory)[key] = value
    world = _section(tree, "world", inventory)
    world["size"] = inventory.world_size
    _set_addresses(inventory, tree)
    matrix = rdma_matrix(inventory)
    if matrix and world.get("backend") == "jaccl":
        _set_jaccl(inventory, tree)
    if host.data_address:
        world["data_host"] = host.data_address
    # Only a gateway needs API keys; other hosts have the gateway's address in their settings too.
    has_api_keys = has_api_keys or "gateway" not in host.roles
    try:
        config = config_from_tree(tree, has_api_keys=has_api_keys)
    except ConfigError as error:
        raise ConfigError(f"{inventory.file}: {error}") from None
    _check_stores(inventory, config)
    _check_backend(inventory, config, matrix)
    files: dict[str, str] = {}
    if "scheduler" in host.roles and config.backend == "jaccl" and matrix:
        files[config.world.jaccl_devices] = device_matrix.to_json(matrix)
    roles = HostRoles(
        gateway="gateway" in host.roles,
        scheduler="scheduler" in host.roles,
        cache_store="cache_store" in host.roles,
        ranks=inventory.ranks[host.name],
    )
    return HostShare(host.name, roles, config, files)


def rdma_matrix(inventory: Inventory) -> Matrix:
    """Return the matrix of RDMA devices by rank, () without `rdma` tables.

    Raises:
        ConfigError: when a host with RDMA does not have exactly one rank.
    """
    if not any(host.rdma for host in inventory.hosts):
        return ()
    for host in inventory.hosts:
        count = len(inventory.ranks[host.name])
        if count > 1 or (host.rdma and not count):
            raise ConfigError(
                f"{inventory.file}: The host {host.name} has {count} ranks, but with RDMA each "
                "host has one."
            )
    hosts = inventory.by_rank()
    rows = [[host.rdma.get(peer.name) for peer in hosts] for host in hosts]
    return device_matrix.matrix_from_rows(rows, f"{inventory.file}: The table of RDMA devices")


def _host_settings(host: HostEntry) -> list[tuple[str, str, str]]:
    """Return (section, key, value) for each setting in the host's own table."""
    own = [
        ("paths", "run_dir", host.run_dir),
        ("paths", "keys_dir", host.keys_dir),
        ("cache", "directory", host.cache_dir),
        ("model", "path", host.model_path),
    ]
    return [(section, key, value) for section, key, value in own if value]


def _section(tree: dict[str, Any], name: str, inventory: Inventory) -> dict[str, Any]:
    section = tree.setdefault(name, {})
    if not isinstance(section, dict):
        raise ConfigError(f"{inventory.file}: The setting {name} must be a section.")
    return section


def _set_addresses(inventory: Inventory, tree: dict[str, Any]) -> None:
    """Set tcp addresses at the scheduler's host if there are several hosts."""
    scheduler = _section(tree, "scheduler", inventory)
    address = inventory.scheduler.address
    if ":" in address:
        address = f"[{address}]"
    port = inventory.cluster.bus_port
    for index, key in enumerate(("gateway_address", "rank_address")):
        if len(inventory.hosts) > 1 and not scheduler.get(key):
            scheduler[key] = f"tcp://{address}:{port + index}"
        elif len(inventory.hosts) > 1 and str(scheduler[key]).startswith("ipc:"):
            raise ConfigError(
                f"{inventory.file}: scheduler.{key} is {scheduler[key]}, which other hosts cannot "
                "reach: remove it, or use tcp://."
            )


def _set_jaccl(inventory: Inventory, tree: dict[str, Any]) -> None:
    """Set the device file and the coordinator of jaccl, unless the settings contain them."""
    world = tree["world"]
    if world.get("hostfile") or world.get("jaccl_devices"):
        raise ConfigError(
            f"{inventory.file}: The hosts have rdma tables, and world.hostfile or "
            "world.jaccl_devices names a file with devices: keep one of them."
        )
    common_run_dir = _section(tree, "paths", inventory).get("run_dir")
    run_dir = inventory.scheduler.run_dir or str(common_run_dir or "")
    if not run_dir.startswith("/"):
        raise ConfigError(
            f"{inventory.file}: The table of RDMA devices is written into the run folder: set "
            f"run_dir of the host {inventory.scheduler.name} to an absolute path."
        )
    world["jaccl_devices"] = str(PurePath(run_dir) / DEVICES_FILE)
    first = inventory.by_rank()[0]
    if not world.get("jaccl_coordinator") and first.address:
        world["jaccl_coordinator"] = f"{first.address}:{inventory.cluster.coordinator_port}"


def _check_stores(inventory: Inventory, config: Config) -> None:
    """Check that exactly the hosts with ranks have a cache store, if blocks are stored on SSD."""
    has_store = [host.name for host in inventory.hosts if "cache_store" in host.roles]
    if not (config.cache.enabled and config.cache.ssd):
        if has_store:
            raise ConfigError(
                f"{inventory.file}: The host {has_store[0]} has the role cache_store, but no "
                "blocks are stored on SSD: set cache.ssd and cache.enabled, or remove the role."
            )
        return
    for host in inventory.hosts:
        has_ranks = bool(inventory.ranks[host.name])
        if has_ranks and host.name not in has_store:
            raise ConfigError(
                f"{inventory.file}: The host {host.name} has ranks but not the role cache_store, "
                "and stored blocks are usable only if every rank has stored them: add the role, "
                "or set cache.ssd = false."
            )
        if host.name in has_store and not has_ranks:
            raise ConfigError(
                f"{inventory.file}: The host {host.name} has the role cache_store but no ranks: "
                "a store serves the ranks of its own host only."
            )


def _check_backend(inventory: Inventory, config: Config, matrix: Matrix) -> None:
    """Check that the hosts have the addresses or devices that the backend needs."""
    with_ranks = [host for host in inventory.hosts if inventory.ranks[host.name]]
    if config.backend == "jaccl":
        if matrix:
            device_matrix.topology(matrix, f"{inventory.file}: The table of RDMA devices")
        if config.world.jaccl_fallback != "ring":
            return
    elif matrix:
        raise ConfigError(
            f"{inventory.file}: The hosts have rdma tables, but world.backend is "
            f"{config.backend}: set it to jaccl, or remove the tables."
        )
    if len(with_ranks) < 2 or config.world.hostfile:
        return
    reason = f"world.backend is {config.backend}"
    if config.backend == "jaccl":
        reason = 'world.jaccl_fallback is "ring"'
    for host in with_ranks:
        if not host.data_address:
            raise ConfigError(
                f"{inventory.file}: The host {host.name} has no data_address, where the ranks of "
                f"other hosts reach its ranks ({reason})."
            )
