"""The processes of one `lockstep up`: which roles, with which environment."""

import dataclasses
import os
import sysconfig
from pathlib import Path

import services
from services.supervisor import effective_config
from services.supervisor.child import Child, Role
from services.supervisor.console import Console
from shared.config import API_KEYS_VARIABLE
from shared.settings import Config


@dataclasses.dataclass(frozen=True, slots=True)
class Children:
    """Every role of this machine."""

    scheduler: Child
    ranks: list[Child]
    gateway: Child
    stores: list[Child]
    """One, or none where no blocks are kept on SSD."""

    @property
    def all(self) -> list[Child]:
        """All of them, in the order in which they start."""
        return [self.scheduler, *self.stores, *self.ranks, self.gateway]


def make(config: Config, folder: Path, console: Console) -> Children:
    """Write the configuration that they read into the run folder; start none of them yet."""
    config_file = effective_config.write(config, folder)
    environment = _environment(dict(os.environ))
    # Clients' keys are the gateway's alone.
    keyless = {name: text for name, text in environment.items() if name != API_KEYS_VARIABLE}

    def child(name: str, *arguments: str) -> Child:
        own = environment if name == "gateway" else keyless
        return Child(Role(name, arguments), config_file, own, console)

    return Children(
        scheduler=child("scheduler", "scheduler"),
        ranks=[
            child(f"rank {rank}", "rank-worker", "--rank", str(rank))
            for rank in range(config.world.size)
        ],
        gateway=child("gateway", "gateway"),
        stores=[child("store", "cache-store")] if keeps_blocks(config) else [],
    )


def keeps_blocks(config: Config) -> bool:
    """Tell whether there is a cache store."""
    return config.cache.enabled and config.cache.ssd


def _environment(own: dict[str, str]) -> dict[str, str]:
    environment = effective_config.without_overrides(own)
    # Log lines must not wait in a buffer: a process that is killed would take them along.
    environment["PYTHONUNBUFFERED"] = "1"
    # Children run the code that runs here, from a checkout too, and never a `services` folder that
    # happens to lie in the working directory (that is what -P in their command is for).
    root = str(Path(services.__file__).resolve().parents[1])
    if root != sysconfig.get_path("purelib"):
        paths = [root, *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment
