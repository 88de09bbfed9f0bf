"""What an inventory says to a plan: settings, and each rank's part of its host's memory."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from shared.configuration.inventory import Inventory, read
from shared.configuration.loading import config_from_tree
from shared.configuration.settings import Config
from shared.errors import ConfigError
from shared.model.location import local_folder

_PLANNED = ("model", "rank_worker", "scheduler", "speculation")
"""Sections of an inventory that a plan depends on."""


@dataclasses.dataclass(frozen=True, slots=True)
class ClusterMemory:
    """The hosts of an inventory."""

    config: Config
    has_gpus: bool
    """Ranks compute on NVIDIA's GPUs."""
    names: list[str]
    """Each rank's host."""
    sizes: list[int]
    """Each rank's part of its host's memory in bytes."""


def read_cluster(file: str, flags: Mapping[str, Any]) -> ClusterMemory:
    """Read an inventory.

    Args:
        file: its path.
        flags: dotted keys and values (None: not given), which override its settings.

    Raises:
        ConfigError: it is wrong, does not say how much memory there is, or its model is not here.
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
    return ClusterMemory(
        config=config_from_tree(tree),
        has_gpus=inventory.settings.get("world", {}).get("backend") == "nccl",
        names=[host.name for host in hosts],
        sizes=[host.memory_bytes // len(inventory.ranks[host.name]) for host in hosts],
    )


def _own_path(inventory: Inventory) -> str:
    """Return the first `model_path` of a host with ranks that is here; "": no host has one."""
    paths = [host.model_path for host in inventory.by_rank() if host.model_path]
    for path in paths:
        try:
            if local_folder(path) is not None:
                return path
        except ConfigError:
            continue
    if paths:
        raise ConfigError(
            f"{inventory.file}: The model lies in {paths[0]} of a host with ranks, and there is "
            "none on this machine: plan where it is, or name a copy with --model."
        )
    return ""
