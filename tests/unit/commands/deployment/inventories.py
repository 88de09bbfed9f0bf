"""Inventories for tests: two hosts that fit together, and changes to them."""

import tomllib
from pathlib import Path
from typing import Any

from shared.configuration import inventory
from shared.configuration.inventory import Inventory

TWO_HOSTS = """
[model]
path = "demo"

[[hosts]]
name = "studio-1"
address = "192.168.7.1"
data_address = "10.0.0.1"
ssh = "ann@studio-1.local"
roles = ["gateway", "scheduler", "cache_store"]
ranks = [0]
user = "ann"
executable = "/opt/lockstep/.venv/bin/lockstep"
inventory = "/opt/lockstep/cluster.toml"
run_dir = "/opt/lockstep/run"
keys_dir = "/opt/lockstep/keys"

[[hosts]]
name = "studio-2"
address = "192.168.7.2"
data_address = "10.0.0.2"
roles = ["cache_store"]
ranks = [1]
user = "bob"
executable = "/opt/lockstep/.venv/bin/lockstep"
inventory = "/opt/lockstep/cluster.toml"
run_dir = "/opt/lockstep/run"
"""


def inventory_tree() -> dict[str, Any]:
    """Return the inventory of two hosts as TOML gives it."""
    return tomllib.loads(TWO_HOSTS)


def parse_inventory(**changes: Any) -> Inventory:
    """Return the two hosts; `changes` replaces sections, or keys of `host0` and `host1`."""
    found = inventory_tree()
    for name, value in changes.items():
        if name in ("host0", "host1"):
            found["hosts"][int(name[-1])].update(value)
        else:
            found[name] = value
    return inventory.parse(found, "cluster.toml")


def write_inventory(folder: Path, text: str = TWO_HOSTS) -> Path:
    """Write an inventory into `folder` and return its path."""
    path = folder / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    return path
