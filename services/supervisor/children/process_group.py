"""Child processes of one `lockstep up`. Owns their roles, environment and start order."""

import dataclasses
import os
import sysconfig
from pathlib import Path

from msgspec import structs

import services
from services.supervisor.children import effective_config
from services.supervisor.children.child import RANK, Child, Role
from services.supervisor.children.effective_config import RunFiles
from services.supervisor.console.console import Console
from shared.configuration.host_share import HostShare
from shared.configuration.loading import API_KEYS_VARIABLE
from shared.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessGroup:
    """Child processes of one `lockstep up`; None or [] for roles that this host does not run."""

    scheduler: Child | None
    ranks: list[Child]
    gateway: Child | None
    stores: list[Child]
    """The cache store, or [] if no blocks are stored on SSD."""

    @property
    def all(self) -> list[Child]:
        """All children in start order: scheduler, store, ranks, gateway."""
        return [*_some(self.scheduler), *self.stores, *self.ranks, *_some(self.gateway)]

    @property
    def spares(self) -> list[Child]:
        """The spare processes of the ranks; [] if ranks have none."""
        return [rank.spare for rank in self.ranks if rank.spare is not None]


def create_group(share: HostShare, folder: Path, console: Console) -> ProcessGroup:
    """Write the files that the children read and create the children; starts no process.

    Args:
        share: the settings and the roles of this host.
        folder: the run folder, which gets the files.
        console: receives the children's output.

    Raises:
        ConfigError: when a file cannot be read or written.
    """
    # The console writes the log of all children, which it reads from their output.
    log = structs.replace(share.config.log, format="json", directory="")
    files = RunFiles(structs.replace(share.config, log=log), folder, share.files)
    try:
        files.restore()
    except OSError as error:
        raise ConfigError(
            f"Cannot write the roles' configuration in {folder}: {error.strerror}. Free space "
            "there, or set paths.run_dir."
        ) from None
    environment = _environment(dict(os.environ))
    # Only the gateway needs the clients' API keys.
    without_keys = {name: text for name, text in environment.items() if name != API_KEYS_VARIABLE}

    created: dict[str, list[Child]] = {"scheduler": [], "store": [], "rank": [], "gateway": []}
    for role in roles(share):
        variables = environment if role.name == "gateway" else without_keys
        spare = None
        if role.name.startswith(RANK) and share.config.rank_worker.spare != "off":
            spare = Child(spare_of(role), files, variables, console)
        child = Child(role, files, variables, console, spare)
        created[role.name.partition(" ")[0]].append(child)
    return ProcessGroup(
        scheduler=next(iter(created["scheduler"]), None),
        ranks=created["rank"],
        gateway=next(iter(created["gateway"]), None),
        stores=created["store"],
    )


def roles(share: HostShare) -> list[Role]:
    """Return the roles of a host in start order: scheduler, store, ranks, gateway."""
    host_roles = share.roles
    return [
        *([Role("scheduler", ("scheduler",))] if host_roles.scheduler else []),
        *([Role("store", ("cache-store",))] if host_roles.cache_store else []),
        *(Role(f"rank {rank}", ("rank-worker", "--rank", str(rank))) for rank in host_roles.ranks),
        *([Role("gateway", ("gateway",))] if host_roles.gateway else []),
    ]


def spare_of(role: Role) -> Role:
    """Return the role of the spare process of a rank, which waits for the place of `role`."""
    return Role(f"spare of {role.name}", (*role.arguments, "--spare"))


def _some(child: Child | None) -> list[Child]:
    return [] if child is None else [child]


def _environment(inherited: dict[str, str]) -> dict[str, str]:
    environment = effective_config.without_overrides(inherited)
    # Unbuffered output: a killed process would lose the log lines in its buffer.
    environment["PYTHONUNBUFFERED"] = "1"
    # Children import the same code as this process, also from a checkout. A folder named `services`
    # in their working directory is not imported because of -P in their command line.
    root = str(Path(services.__file__).resolve().parents[1])
    if root != sysconfig.get_path("purelib"):
        paths = [root, *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment
