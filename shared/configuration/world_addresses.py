"""Where the ranks of a world meet: addresses, devices and variables, from hostfile and settings.

Pure. The scheduler makes each rank's environment of it; `lockstep up` asks it before anything is
started whether there is enough.
"""

from collections.abc import Sequence

from shared.configuration import device_matrix, hostfile
from shared.configuration.device_matrix import Matrix
from shared.configuration.hostfile import Hostfile
from shared.configuration.settings import Config
from shared.errors import ConfigError

_FOREIGN_PREFIXES = ("MLX_", "NCCL_")
"""Variables that a hostfile may set: those of the libraries that it is for."""

_OWN = {
    "MLX_RANK",
    "MLX_HOSTFILE",
    "MLX_WORLD_SIZE",
    "MLX_IBV_DEVICES",
    "MLX_JACCL_COORDINATOR",
    "MLX_JACCL_RING",
    "MLX_METAL_FAST_SYNCH",
    "NCCL_HOST_IP",
    "NCCL_PORT",
}
"""Variables that Lockstep itself decides about."""


def parse_hostfile(text: str, size: int) -> Hostfile | None:
    """Return what the hostfile says, or None where there is none.

    Raises:
        ConfigError: as `hostfile.parse`, or it has another number of ranks.
    """
    if not text:
        return None
    hosts = hostfile.parse(text)
    if hosts.size != size:
        raise ConfigError(
            f"world.hostfile is for {hosts.size} ranks, but world.size is {size}: "
            "leave out world.size (--ranks), or make them equal."
        )
    return hosts


def ring_addresses(
    hosts: Hostfile | None,
    size: int,
    data_addresses: Sequence[str],
    machines: Sequence[str] = (),
) -> list[list[str]]:
    """Return each rank's addresses for the ring: the hostfile's, else those that ranks have said.

    Args:
        hosts: the hostfile, if there is one.
        size: number of ranks.
        data_addresses: host:port that each rank has said, by rank.
        machines: name of each rank's machine, by rank; () where it is not known.

    Raises:
        ConfigError: an address is missing, or others cannot reach it.
    """
    if hosts is not None and hosts.has_addresses():
        return [list(row) for row in hosts.addresses]
    if len(data_addresses) != size or not all(":" in item for item in data_addresses):
        raise ConfigError(
            f"{size} ranks need as many data addresses (host:port), "
            f"but they said {', '.join(map(repr, data_addresses)) or 'none'}: "
            "were some of them started by another launcher?"
        )
    if len(set(machines)) > 1:
        for rank, address in enumerate(data_addresses):
            if address.startswith(("127.", "localhost:")):
                raise ConfigError(
                    f"The ranks are on several machines, but rank {rank} on {machines[rank]} has "
                    f"said {address}, which the others cannot reach: set world.data_host there, or "
                    "world.hostfile."
                )
    return [[item] for item in data_addresses]


def jaccl_devices(
    hosts: Hostfile | None, size: int, text: str
) -> tuple[Matrix, device_matrix.Topology]:
    """Return the device matrix and its shape: of world.jaccl_devices, else of the hostfile.

    Raises:
        ConfigError: there is none, it has another number of ranks, or MLX could not use it.
    """
    if text:
        name, matrix = "world.jaccl_devices", device_matrix.parse(text)
    elif hosts is not None and hosts.devices:
        name, matrix = 'world.hostfile ("rdma")', hosts.devices
    else:
        raise ConfigError(
            'world.backend is jaccl, but world.hostfile names no devices ("rdma"): let '
            "`mlx.distributed_config --backend jaccl` write it, or set world.jaccl_devices."
        )
    if len(matrix) != size:
        raise ConfigError(
            f"{name} must hold {size} rows of {size} devices, one row per rank, null for the rank "
            f"itself, but has {len(matrix)} rows."
        )
    prefers_ring = hosts is not None and hosts.prefers_ring
    return matrix, device_matrix.topology(matrix, name, ring=prefers_ring)


def coordinator_address(hosts: Hostfile | None, setting: str) -> str:
    """Return where jaccl's ranks meet: the setting, else rank 0's first address.

    Raises:
        ConfigError: neither says it.
    """
    place = setting or (hosts.coordinator() if hosts is not None else "")
    if not place:
        raise ConfigError(
            'world.hostfile has no address ("ips") for rank 0, where all ranks of jaccl meet: add '
            "one, or set world.jaccl_coordinator (--distributed-jaccl-coordinator)."
        )
    return place


def hostfile_variables(hosts: Hostfile | None) -> dict[str, str]:
    """Return the hostfile's variables that ranks are given."""
    return {} if hosts is None else {k: v for k, v in hosts.variables.items() if _is_taken(k)}


def check_addresses(config: Config, hostfile_text: str, devices_text: str) -> list[str]:
    """Find out before there are ranks whether they will be able to meet.

    Args:
        config: the settings.
        hostfile_text: content of world.hostfile, "" without.
        devices_text: content of world.jaccl_devices, "" without.

    Returns:
        A sentence for each thing in the files that is left aside.

    Raises:
        ConfigError: they will not; names the setting, with the remedy.
    """
    size, backend = config.world.size, config.backend
    if backend == "off":
        return []
    hosts = parse_hostfile(hostfile_text, size)
    if backend == "jaccl":
        jaccl_devices(hosts, size, devices_text)
        coordinator_address(hosts, config.world.jaccl_coordinator)
    elif hosts is not None:
        needed = hosts.addresses if backend == "ring" else hosts.addresses[:1]
        for rank, row in enumerate(needed):
            if not row:
                raise ConfigError(
                    f'world.hostfile has no address ("ips") for rank {rank} on '
                    f"{hosts.machines[rank]}: {backend} needs it; "
                    "`mlx.distributed_config --backend ring` writes them."
                )
    return (
        [] if hosts is None else [_why_not(name) for name in hosts.variables if not _is_taken(name)]
    )


def _is_taken(name: str) -> bool:
    return name.startswith(_FOREIGN_PREFIXES) and name not in _OWN


def _why_not(name: str) -> str:
    if name == "MLX_METAL_FAST_SYNCH":
        return "world.hostfile sets MLX_METAL_FAST_SYNCH, but world.metal_fast_synch decides that."
    if name in _OWN:
        return f"world.hostfile sets {name}, which Lockstep sets itself."
    return (
        f"world.hostfile sets {name}, which is left aside: only MLX's and NCCL's variables are "
        "taken from there."
    )
