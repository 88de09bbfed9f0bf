"""What one host of an inventory runs, and with which settings: it follows from the inventory alone.

The same file gives the same on every host, but for what stands in its own `[[hosts]]` table.
"""

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
"""In the scheduler's run folder: the matrix that the inventory's `rdma` tables give."""


@dataclasses.dataclass(frozen=True, slots=True)
class HostRoles:
    """Which processes one host has."""

    gateway: bool
    scheduler: bool
    cache_store: bool
    ranks: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class HostShare:
    """One host: what runs there, and with what."""

    name: str
    """"" where there is no inventory: this machine is all of it."""
    roles: HostRoles
    config: Config
    files: dict[str, str]
    """Path -> content of what must lie there before the scheduler starts."""

    def place_files(self) -> None:
        """Write them. Raises ConfigError when that cannot be done."""
        for name, text in self.files.items():
            path = Path(name)
            with private_files.locked(path.parent):
                private_files.replace(path, text)


def single_host_share(config: Config) -> HostShare:
    """Return the share of a machine that runs everything."""
    stores = config.cache.enabled and config.cache.ssd
    ranks = tuple(range(config.world.size))
    return HostShare("", HostRoles(True, True, stores, ranks), config, {})


def share_of_host(
    inventory: Inventory, host: HostEntry, *, has_api_keys: bool = False
) -> HostShare:
    """Return what one host runs.

    Args:
        inventory: of which `host` is one.
        host: whose share is asked for.
        has_api_keys: its environment brings API keys for clients.

    Raises:
        ConfigError: a setting is wrong, or contradicts what the hosts are.
    """
    tree = {
        section: dict(values) if isinstance(values, dict) else values
        for section, values in inventory.settings.items()
    }
    for section, key, value in _of_host(host):
        _section(tree, section, inventory)[key] = value
    world = _section(tree, "world", inventory)
    world["size"] = inventory.world_size
    _set_bus(inventory, tree)
    matrix = _devices(inventory)
    if matrix and world.get("backend") == "jaccl":
        _set_jaccl(inventory, tree)
    if host.data_address:
        world["data_host"] = host.data_address
    # Only a gateway needs keys of clients; the file of all hosts may name an address of it.
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


def _of_host(host: HostEntry) -> list[tuple[str, str, str]]:
    """Return section, key and value of what a host's own table says."""
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


def _set_bus(inventory: Inventory, tree: dict[str, Any]) -> None:
    """Have processes of several hosts meet at the scheduler's host."""
    scheduler = _section(tree, "scheduler", inventory)
    address = inventory.scheduler.address
    port = inventory.cluster.bus_port
    for index, key in enumerate(("gateway_address", "rank_address")):
        if len(inventory.hosts) > 1 and not scheduler.get(key):
            scheduler[key] = f"tcp://{_in_url(address)}:{port + index}"
        elif len(inventory.hosts) > 1 and str(scheduler[key]).startswith("ipc:"):
            raise ConfigError(
                f"{inventory.file}: scheduler.{key} is {scheduler[key]}, which other hosts do not "
                "reach: leave it away, or use tcp://."
            )


def _set_jaccl(inventory: Inventory, tree: dict[str, Any]) -> None:
    """Say which devices lead where, and where ranks meet, unless the settings say it."""
    world = tree["world"]
    if world.get("hostfile") or world.get("jaccl_devices"):
        raise ConfigError(
            f"{inventory.file}: The hosts have rdma tables, and world.hostfile or "
            "world.jaccl_devices names a file of devices: keep one or the other."
        )
    of_all = _section(tree, "paths", inventory).get("run_dir")
    run_dir = inventory.scheduler.run_dir or str(of_all or "")
    if not run_dir.startswith("/"):
        raise ConfigError(
            f"{inventory.file}: The table of RDMA devices is written into the run folder: set "
            f"run_dir of the host {inventory.scheduler.name} to an absolute path."
        )
    world["jaccl_devices"] = str(PurePath(run_dir) / DEVICES_FILE)
    first = inventory.by_rank()[0]
    if not world.get("jaccl_coordinator") and first.address:
        world["jaccl_coordinator"] = f"{first.address}:{inventory.cluster.coordinator_port}"


def _devices(inventory: Inventory) -> Matrix:
    """Return the matrix of RDMA devices by rank; () where no host has an `rdma` table.

    Raises:
        ConfigError: a host in it has another number of ranks than one.
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


def _check_stores(inventory: Inventory, config: Config) -> None:
    """Refuse cache stores where they do nothing, and ranks without one where others have one."""
    has_store = [host.name for host in inventory.hosts if "cache_store" in host.roles]
    if not (config.cache.enabled and config.cache.ssd):
        if has_store:
            raise ConfigError(
                f"{inventory.file}: The host {has_store[0]} has the role cache_store, but no "
                "blocks are kept on SSD: set cache.ssd and cache.enabled, or take the role away."
            )
        return
    for host in inventory.hosts:
        has_ranks = bool(inventory.ranks[host.name])
        if has_ranks and host.name not in has_store:
            raise ConfigError(
                f"{inventory.file}: The host {host.name} has ranks but not the role cache_store, "
                "and blocks are found again only if every rank has stored them: give it the role, "
                "or set cache.ssd = false."
            )
        if host.name in has_store and not has_ranks:
            raise ConfigError(
                f"{inventory.file}: The host {host.name} has the role cache_store but no ranks: "
                "a store serves the ranks of its own host only."
            )


def _check_backend(inventory: Inventory, config: Config, matrix: Matrix) -> None:
    """Refuse hosts that the backend's collectives cannot join."""
    with_ranks = [host for host in inventory.hosts if inventory.ranks[host.name]]
    if config.backend == "jaccl":
        if matrix:
            device_matrix.topology(matrix, f"{inventory.file}: The table of RDMA devices")
        if config.world.jaccl_fallback != "ring":
            return
    elif matrix:
        raise ConfigError(
            f"{inventory.file}: The hosts have rdma tables, but world.backend is "
            f"{config.backend}: set it to jaccl, or take the tables away."
        )
    if len(with_ranks) < 2 or config.world.hostfile:
        return
    for host in with_ranks:
        if not host.data_address:
            raise ConfigError(
                f"{inventory.file}: The host {host.name} has no data_address: ranks on several "
                f"hosts reach each other there ({_why(config)})."
            )


def _why(config: Config) -> str:
    if config.backend == "jaccl":
        return 'world.jaccl_fallback is "ring"'
    return f"world.backend is {config.backend}"


def _in_url(address: str) -> str:
    return f"[{address}]" if ":" in address else address
