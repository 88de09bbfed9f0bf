"""Settings and memory of ranks, as an inventory gives them."""

import contextlib
from collections.abc import Mapping
from typing import Any

from services.commands.planning.hosts import DeviceKind, RankMemory, memory_of_sizes
from shared.configuration import device_matrix, host_share
from shared.configuration.device_matrix import DeviceUse
from shared.configuration.inventory import Inventory, read
from shared.configuration.loading import config_from_tree
from shared.configuration.setting_rules import check_pipeline
from shared.configuration.settings import Config
from shared.errors import ConfigError
from shared.model.location import local_folder

_PLANNED = ("model", "rank_worker", "scheduler", "speculation")
"""Sections of an inventory that affect a plan."""


def read_inventory_memory(
    file: str, flags: Mapping[str, Any], device: DeviceKind | None, share: float | None
) -> tuple[Config, DeviceKind, list[RankMemory]]:
    """Read the settings, the ranks' device and the memory of each rank from an inventory.

    Args:
        file: its path.
        flags: dotted keys and values (None: not given), which override its settings.
        device: device of all ranks; None: cuda if the inventory's backend is nccl, else metal.
        share: share of memory that the device may use, 0 to 1; None: the device's default.

    Raises:
        ConfigError: when it is wrong, lacks the memory of a host, or its model is not here.
    """
    inventory = read(file)
    for name in (*_PLANNED, "world"):
        if not isinstance(inventory.settings.get(name, {}), dict):
            raise ConfigError(f"{file}: The setting {name} must be a section, [{name}].")
    tree = {name: dict(inventory.settings.get(name, {})) for name in _PLANNED}
    for key, value in flags.items():
        if value is not None:
            section, _, name = key.partition(".")
            tree[section][name] = value
    if "path" not in tree["model"] and (path := _own_path(inventory)):
        tree["model"]["path"] = path
    hosts = inventory.by_rank()
    for host in hosts:
        if not host.memory_bytes:
            raise ConfigError(
                f"{file} does not say how much memory {host.name} has: set memory_bytes in its "
                "[[hosts]] table, or give --memory instead of --inventory."
            )
    has_gpus = inventory.settings.get("world", {}).get("backend") == "nccl"
    kind: DeviceKind = device or ("cuda" if has_gpus else "metal")
    names = [host.name for host in hosts]
    config = config_from_tree(tree)
    part = 0.0 if kind == "cuda" else config.rank_worker.memory_share
    sizes = [
        host.memory_bytes // (1 if part else len(inventory.ranks[host.name])) for host in hosts
    ]
    return config, kind, memory_of_sizes(sizes, kind, share, names, machine_share=part)


def planned_world(file: str) -> tuple[str, str]:
    """Return backend and sharding of an inventory's ranks; "" for both if it has one rank.

    Raises:
        ConfigError: when the inventory is wrong, or its ranks are a pipeline over a backend
            without send and receive.
    """
    inventory = read(file)
    world = inventory.settings.get("world", {})
    if inventory.world_size == 1:
        return "", ""
    backend, sharding = str(world.get("backend", "auto")), str(world.get("sharding", "auto"))
    try:
        check_pipeline(backend, sharding)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    return "ring" if backend == "auto" else backend, sharding


def configured_shares(file: str) -> list[int]:
    """Return `world.expert_shares` of an inventory; [] without it.

    Raises:
        ConfigError: when the inventory is wrong, or these are no shares of its ranks.
    """
    inventory = read(file)
    shares = inventory.settings.get("world", {}).get("expert_shares", [])
    world = {"size": inventory.world_size, "expert_shares": shares}
    try:
        return config_from_tree({"world": world}).world.expert_shares
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def inventory_rdma_uses(file: str) -> dict[tuple[str, str], DeviceUse]:
    """Return what a world needs of each RDMA device, by (host, device); {} without jaccl.

    Raises:
        ConfigError: when the inventory or its table of devices is wrong.
    """
    inventory = read(file)
    matrix = host_share.rdma_matrix(inventory)
    if not matrix or inventory.settings.get("world", {}).get("backend") != "jaccl":
        return {}
    shape = device_matrix.topology(matrix, f"{file}: The table of RDMA devices")
    names = [host.name for host in inventory.by_rank()]
    return device_matrix.device_uses(matrix, shape, names)


def _own_path(inventory: Inventory) -> str:
    """Return the first `model_path` of a host with ranks that exists here; "": no host sets one."""
    paths = [host.model_path for host in inventory.by_rank() if host.model_path]
    for path in paths:
        with contextlib.suppress(ConfigError):
            if local_folder(path) is not None:
                return path
    if paths:
        raise ConfigError(
            f"{inventory.file}: The model is in {paths[0]} on a host with ranks, but not on this "
            "machine: run `lockstep plan` there, or name a copy with --model."
        )
    return ""
