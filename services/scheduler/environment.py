"""What MLX must find in a rank's environment, as MLX's own launcher would set it. Pure.

`MLX_METAL_FAST_SYNCH` is left out on purpose: it can wedge a Mac's GPU until the next boot.
"""

import json
from collections.abc import Sequence

from shared.errors import ConfigError
from shared.messages.rank_link import Backend


def world_environment(
    backend: Backend,
    rank: int,
    world_size: int,
    data_addresses: Sequence[str],
    jaccl_devices_text: str = "",
    jaccl_coordinator: str = "",
) -> tuple[dict[str, str], dict[str, str]]:
    """Return one rank's variables, and those whose value is the path of a file with this content.

    Args:
        backend: how the world's collectives run.
        rank: the rank that gets this environment.
        world_size: number of ranks.
        data_addresses: host:port of each rank, by rank (ring, nccl).
        jaccl_devices_text: JSON matrix of RDMA devices, row = rank, column = peer.
        jaccl_coordinator: host:port of rank 0's side channel.

    Raises:
        ConfigError: an address is missing, or the matrix does not fit the world.
    """
    if backend == "off":
        return {}, {}
    environment = {"MLX_RANK": str(rank)}
    if backend == "jaccl":
        check_devices(jaccl_devices_text, world_size)
        environment["MLX_JACCL_COORDINATOR"] = jaccl_coordinator
        return environment, {"MLX_IBV_DEVICES": jaccl_devices_text}
    _check_addresses(data_addresses, world_size)
    if backend == "ring":
        return environment, {"MLX_HOSTFILE": json.dumps([[item] for item in data_addresses])}
    host, _, port = data_addresses[0].rpartition(":")
    environment["NCCL_HOST_IP"] = host
    environment["NCCL_PORT"] = port
    environment["MLX_WORLD_SIZE"] = str(world_size)
    environment["CUDA_VISIBLE_DEVICES"] = str(_place_on_host(data_addresses, rank))
    return environment, {}


def _place_on_host(data_addresses: Sequence[str], rank: int) -> int:
    hosts = [address.rpartition(":")[0] for address in data_addresses]
    return hosts[:rank].count(hosts[rank])


def _check_addresses(data_addresses: Sequence[str], world_size: int) -> None:
    if len(data_addresses) != world_size or not all(":" in item for item in data_addresses):
        raise ConfigError(
            f"{world_size} ranks need as many data addresses (host:port), "
            f"but they said {', '.join(map(repr, data_addresses)) or 'none'}: "
            "were some of them started by another launcher?"
        )


def check_devices(text: str, world_size: int) -> None:
    """Raise ConfigError unless `text` is a matrix of RDMA devices for so many ranks."""
    try:
        matrix = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"world.jaccl_devices holds no JSON: {error}.") from None
    is_square = isinstance(matrix, list) and all(
        isinstance(row, list) and len(row) == world_size for row in matrix
    )
    if not is_square or len(matrix) != world_size:
        raise ConfigError(
            f"world.jaccl_devices must hold {world_size} rows of {world_size} devices, "
            "one row per rank, null for the rank itself."
        )
    for rank, row in enumerate(matrix):
        if row[rank] is not None:
            raise ConfigError(
                f"world.jaccl_devices names a device from rank {rank} to itself: write null there."
            )
