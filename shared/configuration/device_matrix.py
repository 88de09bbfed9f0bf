"""RDMA devices between ranks: JACCL's matrix and its rules. Pure.

MLX 0.32 accepts two topologies (`is_valid_mesh`, `is_valid_ring`): a mesh, in which every rank
reaches every other, and a ring, in which every rank reaches at least its two neighbours. A mesh
uses as many cables per pair as every pair has. Other matrices fail deep inside MLX, so they are
rejected here.
"""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import Any, Literal

from shared.errors import ConfigError

Topology = Literal["mesh", "ring"]
Devices = tuple[str, ...]
"""Devices of one rank whose cables lead to one peer; () without a cable."""
Matrix = tuple[tuple[Devices, ...], ...]
"""Devices by rank (rows) and peer (columns), both in rank order."""

MESH_RANKS_MAX = 8
"""Most ranks in a mesh, MLX's `MESH_MAX_PEERS`."""

RING_CABLES_MAX = 4
"""Most cables between two neighbours in a ring, MLX's `RING_MAX_CONNS`."""

DEVICE_QUEUE_PAIRS_MAX = 10
"""Queue pairs of one RDMA device over Thunderbolt, for all processes of its host (MLX issue 4209).
One cable between two ranks needs one at each end; a ring of two ranks needs two."""

DEVICE_REGIONS_MAX = 100
"""Memory regions of one RDMA device over Thunderbolt, for all processes of its host (MLX issue
3162). They are the buffers that the device may read and write."""

MESH_REGIONS = 64
RING_REGIONS = 32
"""Memory regions that MLX 0.32 registers per queue pair: buffers of 8 sizes, 2 of each, one to send
and one to receive; a mesh has as many again for scattered sums."""


def parse(text: str) -> Matrix:
    """Return the matrix of RDMA devices, by rank and peer, in the file of world.jaccl_devices.

    Args:
        text: JSON, as in a file for `MLX_IBV_DEVICES`. Each entry is null, a device, or a list of
            devices (one per cable).

    Raises:
        ConfigError: when it is not a square matrix of such entries with null on its diagonal.
    """
    name = "world.jaccl_devices"
    try:
        rows = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name} is not valid JSON: {error}.") from None
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ConfigError(
            f"{name} must contain a list of lists: one row per rank with one entry per rank."
        )
    return matrix_from_rows(rows, name)


def matrix_from_rows(rows: Sequence[Sequence[Any]], name: str) -> Matrix:
    """Return rows of JSON values as a device matrix, if they form a valid one.

    Args:
        rows: one row per rank; each entry is null, a device, or a list of devices.
        name: the file or setting with the matrix, for errors.

    Raises:
        ConfigError: as `parse`.
    """
    size = len(rows)
    for rank, row in enumerate(rows):
        if len(row) != size:
            raise ConfigError(
                f"{name} must have as many entries in each row as it has rows, but has {size} rows "
                f"and {len(row)} entries for rank {rank}: write one row per rank, with null for "
                "the rank itself."
            )
    matrix = tuple(
        tuple(_devices(entry, f"{name} for rank {rank} to rank {peer}") for peer, entry in row_of)
        for rank, row_of in enumerate(map(enumerate, rows))
    )
    for rank, row in enumerate(matrix):
        if row[rank]:
            raise ConfigError(
                f"{name} names a device from rank {rank} to itself: write null there."
            )
        _check_shared_devices(row, rank, name)
    return matrix


def topology(matrix: Matrix, name: str = "world.jaccl_devices", *, ring: bool = False) -> Topology:
    """Return the topology that MLX uses for a matrix.

    Args:
        matrix: result of `parse`.
        name: the file or setting with the matrix, for errors.
        ring: require a ring (`MLX_JACCL_RING`), even if a mesh is possible.

    Raises:
        ConfigError: when it is neither a mesh nor a ring, or exceeds MLX's limits.
    """
    size = len(matrix)
    if size < 2:
        raise ConfigError(f"{name} is for {size} rank, but jaccl needs 2 or more.")
    pairs = itertools.permutations(range(size), 2)
    missing = [(rank, peer) for rank, peer in pairs if not matrix[rank][peer]]
    if not missing and not ring:
        if size > MESH_RANKS_MAX:
            raise ConfigError(
                f"{name} is a mesh of {size} ranks, but MLX supports {MESH_RANKS_MAX}: keep only "
                "the neighbours' devices, which makes it a ring."
            )
        return "mesh"
    _check_ring(matrix, missing, name)
    return "ring"


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceUse:
    """Needs of one world for one RDMA device."""

    queue_pairs: int
    memory_regions: int

    @property
    def exceeded(self) -> bool:
        """Whether the device has fewer."""
        return self.queue_pairs > DEVICE_QUEUE_PAIRS_MAX or self.memory_regions > DEVICE_REGIONS_MAX

    def explain(self, device: str) -> str:
        """Return a clause about a device and its limits."""
        return (
            f"{device} needs {self.queue_pairs} of {DEVICE_QUEUE_PAIRS_MAX} queue pairs and "
            f"{self.memory_regions} of {DEVICE_REGIONS_MAX} memory regions"
        )


def device_uses(
    matrix: Matrix, shape: Topology, machines: Sequence[str]
) -> dict[tuple[str, str], DeviceUse]:
    """Return what a world needs of each RDMA device, by (machine, device) in rank order.

    Args:
        matrix: the devices.
        shape: result of `topology`.
        machines: name of each rank's machine, by rank. Ranks of one machine share its devices.
    """
    pairs: dict[tuple[str, str], int] = {}
    size = len(matrix)
    for rank, row in enumerate(matrix):
        sides = [(rank - 1) % size, (rank + 1) % size]
        for peer in range(size) if shape == "mesh" else sides:
            for device in row[peer]:
                key = (machines[rank], device)
                pairs[key] = pairs.get(key, 0) + 1
    each = MESH_REGIONS if shape == "mesh" else RING_REGIONS
    return {key: DeviceUse(count, count * each) for key, count in pairs.items()}


def to_json(matrix: Matrix) -> str:
    """Return the content of a file for `MLX_IBV_DEVICES`, in the format of MLX's own launcher."""
    return json.dumps(to_rows(matrix))


def to_rows(matrix: Matrix) -> list[list[str | list[str] | None]]:
    """Return the matrix as JSON values: one row per rank, as `matrix_from_rows` reads them."""
    return [[_entry(devices) for devices in row] for row in matrix]


def _entry(devices: Devices) -> str | list[str] | None:
    if len(devices) > 1:
        return list(devices)
    return devices[0] if devices else None


def _devices(entry: Any, where: str) -> Devices:
    if entry is None:
        return ()
    names = [entry] if isinstance(entry, str) else entry
    if not isinstance(names, list) or not names:
        raise ConfigError(
            f"{where} is {json.dumps(entry)}: write null, a device such as "
            '"rdma_en5", or a list of devices (one per cable).'
        )
    for name in names:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{where} contains {json.dumps(name)}, which is not a device name.")
    if len(set(names)) != len(names):
        raise ConfigError(f"{where} names the same device twice: one device is one cable.")
    return tuple(names)


def _check_shared_devices(row: Sequence[Devices], rank: int, name: str) -> None:
    """Check that each device leads to one peer: with two, MLX crashes both ranks."""
    peers: dict[str, int] = {}
    for peer, devices in enumerate(row):
        for device in devices:
            if device in peers:
                raise ConfigError(
                    f"{name} names {device} from rank {rank} to rank {peers[device]} and to rank "
                    f"{peer}: one device is one cable, which leads to one peer, so name another "
                    "device there, or null without a cable."
                )
            peers[device] = peer


def _check_ring(matrix: Matrix, missing: Sequence[tuple[int, int]], name: str) -> None:
    size = len(matrix)
    gaps = [(rank, peer) for rank, peer in missing if (rank - peer) % size in (1, size - 1)]
    if gaps:
        pairs = " and ".join(f"rank {rank} to rank {peer}" for rank, peer in gaps[:3])
        more = f" and {len(gaps) - 3} more" if len(gaps) > 3 else ""
        raise ConfigError(
            f"{name} names no device from {pairs}{more}: it must be a mesh (every rank to every "
            "other) or a ring (each to its two neighbours)."
        )
    counts = {
        (rank, peer): len(matrix[rank][peer])
        for rank in range(size)
        for peer in ((rank - 1) % size, (rank + 1) % size)
    }
    expected = counts[0, 1]
    for (rank, peer), count in counts.items():
        if count != expected:
            raise ConfigError(
                f"{name} is a ring with {_cables(expected)} from rank 0 to rank 1 but "
                f"{_cables(count)} from rank {rank} to rank {peer}: a ring needs equal numbers."
            )
    if expected > RING_CABLES_MAX:
        raise ConfigError(
            f"{name} is a ring with {expected} cables between neighbours, but MLX supports "
            f"{RING_CABLES_MAX}: remove the others."
        )


def _cables(count: int) -> str:
    return "1 cable" if count == 1 else f"{count} cables"
