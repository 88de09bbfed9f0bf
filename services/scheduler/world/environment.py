"""Rank environment. Owns the environment variables that MLX's own launcher would set. Pure.

`MLX_METAL_FAST_SYNCH` is set only for jaccl and only if the caller allows it, because it can block
a Mac's GPU until the next boot.
"""

import json
from collections.abc import Sequence

from shared.configuration import device_matrix, world_addresses
from shared.configuration.hostfile import NCCL_PORT, Hostfile
from shared.messages.rank_link import Backend


def rank_environment(
    backend: Backend,
    rank: int,
    world_size: int,
    data_addresses: Sequence[str],
    jaccl_devices_text: str = "",
    jaccl_coordinator: str = "",
    *,
    hostfile_text: str = "",
    fast_synch: bool = False,
    machines: Sequence[str] = (),
) -> tuple[dict[str, str], dict[str, str]]:
    """Return one rank's environment variables, and the files that some of them name.

    Args:
        backend: backend of the world's collectives.
        rank: the rank that gets this environment.
        world_size: number of ranks.
        data_addresses: host:port of each rank, by rank (ring, nccl without a hostfile).
        jaccl_devices_text: JSON matrix of RDMA devices, row = rank, column = peer; "": the
            hostfile's.
        jaccl_coordinator: host:port of rank 0's side channel; "": the hostfile's.
        hostfile_text: content of world.hostfile; "": not configured.
        fast_synch: Metal's fast synchronization may be used (jaccl).
        machines: name of each rank's machine, by rank; (): unknown.

    Returns:
        Variable -> value, and variable -> content of a file whose path becomes its value.

    Raises:
        ConfigError: when an address is missing or the matrix does not fit the world.
    """
    if backend == "off":
        return {}, {}
    hosts = world_addresses.parse_hostfile(hostfile_text, world_size)
    environment = {**world_addresses.hostfile_variables(hosts), "MLX_RANK": str(rank)}
    if backend == "jaccl":
        matrix, shape = world_addresses.jaccl_devices(hosts, world_size, jaccl_devices_text)
        environment["MLX_JACCL_COORDINATOR"] = world_addresses.coordinator_address(
            hosts, jaccl_coordinator
        )
        if shape == "ring":
            environment["MLX_JACCL_RING"] = "1"
        if fast_synch:
            environment["MLX_METAL_FAST_SYNCH"] = "1"
        return environment, {"MLX_IBV_DEVICES": device_matrix.to_json(matrix)}
    if backend == "ring":
        rows = world_addresses.ring_addresses(hosts, world_size, data_addresses, machines)
        return environment, {"MLX_HOSTFILE": json.dumps(rows)}
    root, places = _nccl_places(hosts, world_size, data_addresses, machines)
    host, _, port = root.rpartition(":")
    environment["NCCL_HOST_IP"] = host
    environment["NCCL_PORT"] = port
    environment["MLX_WORLD_SIZE"] = str(world_size)
    environment["CUDA_VISIBLE_DEVICES"] = str(places[:rank].count(places[rank]))
    return environment, {}


def _nccl_places(
    hosts: Hostfile | None, world_size: int, data_addresses: Sequence[str], machines: Sequence[str]
) -> tuple[str, list[str]]:
    """Return the address where NCCL's ranks meet, and the machine of each rank."""
    if hosts is not None and (root := hosts.coordinator(NCCL_PORT)):
        return root, list(hosts.machines)
    rows = world_addresses.ring_addresses(None, world_size, data_addresses, machines)
    return rows[0][0], [address.rpartition(":")[0] for (address,) in rows]
