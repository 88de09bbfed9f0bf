"""Addresses, devices and variables by which ranks connect, from hostfile and settings. Pure.

The scheduler builds each rank's environment from them; `lockstep up` checks them before the start.
"""

from collections.abc import Sequence

from shared.configuration import device_matrix, hostfile
from shared.configuration.device_matrix import DeviceUse, Matrix
from shared.configuration.hostfile import Hostfile
from shared.configuration.settings import Config
from shared.errors import ConfigError

_PASSED_PREFIXES = ("MLX_", "NCCL_")
"""Prefixes of variables that a hostfile may set, those of MLX and NCCL."""

_LOCKSTEP_VARIABLES = {
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
"""Variables that only Lockstep sets."""


def parse_hostfile(text: str, size: int) -> Hostfile | None:
    """Parse a hostfile and compare its number of ranks with the settings'.

    Args:
        text: content of world.hostfile; "" without one.
        size: world.size.

    Returns:
        The hostfile; None for "".

    Raises:
        ConfigError: as `hostfile.parse`, or when its number of ranks differs.
    """
    if not text:
        return None
    hosts = hostfile.parse(text)
    if hosts.size != size:
        raise ConfigError(
            f"world.hostfile is for {hosts.size} ranks, but world.size is {size}: "
            "remove world.size (--ranks), or make them equal."
        )
    return hosts


def ring_addresses(
    hosts: Hostfile | None,
    size: int,
    data_addresses: Sequence[str],
    machines: Sequence[str] = (),
) -> list[list[str]]:
    """Return each rank's addresses for the ring: from the hostfile, else as reported by the ranks.

    Args:
        hosts: the hostfile, or None.
        size: number of ranks.
        data_addresses: host:port reported by each rank, by rank.
        machines: name of each rank's machine, by rank; () if unknown.

    Returns:
        By rank, the host:port addresses on which the rank accepts its neighbour.

    Raises:
        ConfigError: when an address is missing or other machines cannot reach it.
    """
    if hosts is not None and all(hosts.addresses):
        return [list(row) for row in hosts.addresses]
    if len(data_addresses) != size or not all(":" in item for item in data_addresses):
        raise ConfigError(
            f"{size} ranks need as many data addresses (host:port), "
            f"but reported {', '.join(map(repr, data_addresses)) or 'none'}: "
            "were some of them started by another launcher?"
        )
    if len(set(machines)) > 1:
        for rank, address in enumerate(data_addresses):
            if address.startswith(("127.", "localhost:")):
                raise ConfigError(
                    f"The ranks are on several machines, but rank {rank} on {machines[rank]} "
                    f"reports {address}, which the others cannot reach: set world.data_host there, "
                    "or world.hostfile."
                )
    return [[item] for item in data_addresses]


def jaccl_devices(
    hosts: Hostfile | None, size: int, text: str
) -> tuple[Matrix, device_matrix.Topology]:
    """Return the RDMA device with which each rank reaches each other one, and the topology.

    They come from world.jaccl_devices or else from the hostfile. Row i of the matrix names the
    devices of rank i. The topology is a mesh (all pairs are connected) or a ring.

    Args:
        hosts: the hostfile, or None.
        size: number of ranks.
        text: content of the file world.jaccl_devices (JSON); "" without one.

    Raises:
        ConfigError: when neither exists, its number of ranks differs, or MLX cannot use it.
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


def rdma_device_uses(
    config: Config, hostfile_text: str, devices_text: str
) -> dict[tuple[str, str], DeviceUse]:
    """Return what a world over jaccl needs of each RDMA device, by (machine, device).

    Args:
        config: the settings; the backend is jaccl.
        hostfile_text: content of world.hostfile, "" without one.
        devices_text: content of world.jaccl_devices, "" without one.

    Raises:
        ConfigError: as `jaccl_devices`.
    """
    size = config.world.size
    hosts = parse_hostfile(hostfile_text, size)
    matrix, shape = jaccl_devices(hosts, size, devices_text)
    machines = hosts.machines if hosts is not None else [f"rank {n}" for n in range(size)]
    return device_matrix.device_uses(matrix, shape, machines)


def coordinator_address(hosts: Hostfile | None, setting: str) -> str:
    """Return the host:port at which rank 0 of jaccl waits for the other ranks.

    That is the setting, or else rank 0's first address in the hostfile.

    Args:
        hosts: the hostfile, or None.
        setting: world.jaccl_coordinator; "": not set.

    Raises:
        ConfigError: when neither is given.
    """
    place = setting or (hosts.coordinator() if hosts is not None else "")
    if not place:
        raise ConfigError(
            'world.hostfile has no address ("ips") for rank 0, where all ranks of jaccl meet: add '
            "one, or set world.jaccl_coordinator (--distributed-jaccl-coordinator)."
        )
    return place


def hostfile_variables(hosts: Hostfile | None) -> dict[str, str]:
    """Return the hostfile's environment variables for ranks, without those that Lockstep sets.

    Returns:
        Name -> value, for variables of MLX and NCCL only; {} without a hostfile.
    """
    return {} if hosts is None else {k: v for k, v in hosts.variables.items() if _is_passed_on(k)}


def check_addresses(config: Config, hostfile_text: str, devices_text: str) -> list[str]:
    """Check before any rank starts that the files have what the backend needs to connect.

    For jaccl that is a usable device matrix and a coordinator; for a ring with a hostfile an
    address for each rank; for nccl with a hostfile an address for rank 0. No connection is tried.

    Args:
        config: the settings.
        hostfile_text: content of world.hostfile, "" without one.
        devices_text: content of world.jaccl_devices, "" without one.

    Returns:
        One sentence per setting in the files that is ignored.

    Raises:
        ConfigError: when something is missing; names the setting and the remedy.
    """
    size, backend = config.world.size, config.backend
    if backend == "off":
        return []
    hosts = parse_hostfile(hostfile_text, size)
    if backend == "jaccl":
        jaccl_devices(hosts, size, devices_text)
        place = coordinator_address(hosts, config.world.jaccl_coordinator)
        if hosts is not None:
            hosts.check_reachable(0, place)
    elif hosts is not None:
        needed = hosts.addresses if backend == "ring" else hosts.addresses[:1]
        for rank, row in enumerate(needed):
            if not row:
                raise ConfigError(
                    f'world.hostfile has no address ("ips") for rank {rank} on '
                    f"{hosts.machines[rank]}: {backend} needs it; "
                    "`mlx.distributed_config --backend ring` and `lockstep hostfile` write them."
                )
            for address in row:
                hosts.check_reachable(rank, address)
    variables = {} if hosts is None else hosts.variables
    return [_ignored_sentence(name) for name in variables if not _is_passed_on(name)]


def _is_passed_on(name: str) -> bool:
    return name.startswith(_PASSED_PREFIXES) and name not in _LOCKSTEP_VARIABLES


def _ignored_sentence(name: str) -> str:
    if name == "MLX_METAL_FAST_SYNCH":
        return "world.hostfile sets MLX_METAL_FAST_SYNCH, but world.metal_fast_synch decides that."
    if name in _LOCKSTEP_VARIABLES:
        return f"world.hostfile sets {name}, which Lockstep sets itself."
    return (
        f"world.hostfile sets {name}, which is ignored: only MLX's and NCCL's variables are used."
    )
