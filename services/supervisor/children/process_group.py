"""The processes of one `lockstep up`: which roles, with which environment."""

import dataclasses
import os
import sysconfig
from pathlib import Path

import services
from services.supervisor.children import effective_config
from services.supervisor.children.child import Child, Role
from services.supervisor.console.console import Console
from shared.configuration.host_share import HostShare
from shared.configuration.loading import API_KEYS_VARIABLE


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessGroup:
    """Every role of this machine."""

    scheduler: Child | None
    ranks: list[Child]
    gateway: Child | None
    stores: list[Child]
    """One, or none where no blocks are kept on SSD."""

    @property
    def all(self) -> list[Child]:
        """All of them, in the order in which they start."""
        return [*_some(self.scheduler), *self.stores, *self.ranks, *_some(self.gateway)]


def create_group(share: HostShare, folder: Path, console: Console) -> ProcessGroup:
    """Write the configuration that they read into the run folder; start none of them yet."""
    config_file = effective_config.write(share.config, folder)
    environment = _environment(dict(os.environ))
    # Clients' keys are the gateway's alone.
    keyless = {name: text for name, text in environment.items() if name != API_KEYS_VARIABLE}

    made: dict[str, list[Child]] = {"scheduler": [], "store": [], "rank": [], "gateway": []}
    for role in roles(share):
        own = environment if role.name == "gateway" else keyless
        child = Child(role, config_file, own, console)
        made[role.name.partition(" ")[0]].append(child)
    return ProcessGroup(
        scheduler=next(iter(made["scheduler"]), None),
        ranks=made["rank"],
        gateway=next(iter(made["gateway"]), None),
        stores=made["store"],
    )


def roles(share: HostShare) -> list[Role]:
    """Return what runs on a host, in the order in which it starts."""
    here = share.roles
    return [
        *([Role("scheduler", ("scheduler",))] if here.scheduler else []),
        *([Role("store", ("cache-store",))] if here.cache_store else []),
        *(Role(f"rank {rank}", ("rank-worker", "--rank", str(rank))) for rank in here.ranks),
        *([Role("gateway", ("gateway",))] if here.gateway else []),
    ]


def _some(child: Child | None) -> list[Child]:
    return [] if child is None else [child]


def _environment(own: dict[str, str]) -> dict[str, str]:
    environment = effective_config.without_overrides(own)
    # Log lines must not wait in a buffer: a process that is killed would take them along.
    environment["PYTHONUNBUFFERED"] = "1"
    # Children run the code that runs here, from a checkout too, and never a `services` folder that
    # happens to lie in the working directory (that is what -P in their command is for).
    root = str(Path(services.__file__).resolve().parents[2])
    if root != sysconfig.get_path("purelib"):
        paths = [root, *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment
