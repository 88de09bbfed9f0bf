"""Settings and memory of ranks, as an inventory gives them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from shared.configuration.inventory import Inventory, read
from shared.configuration.loading import config_from_tree
from shared.configuration.settings import Config
from shared.errors import ConfigError
from shared.model.location import local_folder

_PLANNED = ("model", "rank_worker", "scheduler", "speculation")
"""Sections of an inventory that affect a plan."""


@dataclasses.dataclass(frozen=True, slots=True)
class InventoryMemory:
    """Settings of an inventory, and the memory of each of its ranks."""

    config: Config
    has_gpus: bool
    """Whether ranks compute on NVIDIA GPUs."""
    names: list[str]
    """Each rank's host."""
    sizes: list[int]
    """Each rank's part of its host's memory in bytes."""


def read_inventory_memory(file: str, flags: Mapping[str, Any]) -> InventoryMemory:
    """Read the settings and the memory of each rank from an inventory.

    Args:
        file: its path.
        flags: dotted keys and values (None: not given), which override its settings.

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
    return InventoryMemory(
        config=config_from_tree(tree),
        has_gpus=inventory.settings.get("world", {}).get("backend") == "nccl",
        names=[host.name for host in hosts],
        sizes=[host.memory_bytes // len(inventory.ranks[host.name]) for host in hosts],
    )


def _own_path(inventory: Inventory) -> str:
    """Return the first `model_path` of a host with ranks that exists here; "": no host sets one."""
    paths = [host.model_path for host in inventory.by_rank() if host.model_path]
    for path in paths:
        try:
            if local_folder(path) is not None:
                return path
        except ConfigError:
            continue
    if paths:
        raise ConfigError(
            f"{inventory.file}: The model is in {paths[0]} on a host with ranks, but not on this "
            "machine: run `lockstep plan` there, or name a copy with --model."
        )
    return ""
