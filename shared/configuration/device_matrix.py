"""Which RDMA device of each rank leads to which other: JACCL's matrix and what it must be. Pure.

MLX 0.32 accepts two shapes (`is_valid_mesh`, `is_valid_ring`): a mesh, where every rank reaches
every other, and a ring, where it reaches at least its two neighbours. Of several cables a mesh uses
as many as every pair has. What is neither fails deep inside MLX, so it is named here.
"""

import json
from collections.abc import Sequence
from typing import Any, Literal

from shared.errors import ConfigError

Topology = Literal["mesh", "ring"]
Devices = tuple[str, ...]
"""The devices of one rank whose cables lead to one peer; () where there is none."""
Matrix = tuple[tuple[Devices, ...], ...]
"""Row = rank, column = peer."""

MESH_RANKS_MAX = 8
"""MLX's `MESH_MAX_PEERS`."""

RING_CABLES_MAX = 4
"""MLX's `RING_MAX_CONNS`: cables between two neighbours."""


def parse(text: str, name: str = "world.jaccl_devices") -> Matrix:
    """Return the matrix that a file of `MLX_IBV_DEVICES` holds.

    Args:
        text: JSON; each entry is null, a device, or a list of devices (one per cable).
        name: what to call the file in an error.

    Raises:
        ConfigError: it is no square matrix of such entries with null on the diagonal.
    """
    try:
        rows = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name} holds no JSON: {error}.") from None
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ConfigError(
            f"{name} must hold a list of lists: one row per rank, in it one entry per rank."
        )
    return matrix_from_rows(rows, name)


def matrix_from_rows(rows: Sequence[Sequence[Any]], name: str) -> Matrix:
    """Return rows of JSON values as a matrix. Raises ConfigError as `parse`."""
    size = len(rows)
    for rank, row in enumerate(rows):
        if len(row) != size:
            raise ConfigError(
                f"{name} must hold as many devices in each row as there are rows, but has {size} "
                f"rows and {len(row)} entries for rank {rank}: one row per rank, null for the rank "
                "itself."
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
    return matrix


def topology(matrix: Matrix, name: str = "world.jaccl_devices", *, ring: bool = False) -> Topology:
    """Return which shape MLX makes of a matrix.

    Args:
        matrix: as `parse` returns it.
        name: what to call it in an error.
        ring: a ring is asked for (`MLX_JACCL_RING`), although it may be a mesh too.

    Raises:
        ConfigError: it is neither a mesh nor a ring, or more than MLX can hold.
    """
    size = len(matrix)
    if size < 2:
        raise ConfigError(f"{name} is for {size} rank: jaccl needs 2 or more.")
    missing = [
        (rank, peer)
        for rank in range(size)
        for peer in range(size)
        if rank != peer and not matrix[rank][peer]
    ]
    if not missing and not ring:
        if size > MESH_RANKS_MAX:
            raise ConfigError(
                f"{name} is a mesh of {size} ranks, and MLX holds {MESH_RANKS_MAX}: leave out all "
                "but the neighbours' devices, which makes it a ring."
            )
        return "mesh"
    _check_ring(matrix, missing, name)
    return "ring"


def to_json(matrix: Matrix) -> str:
    """Return the text that `MLX_IBV_DEVICES` names, written as MLX's own launcher writes it."""
    return json.dumps([[_entry(devices) for devices in row] for row in matrix])


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
            f"{where} holds {json.dumps(entry)}: write null, a device such as "
            '"rdma_en5", or a list of devices (one per cable).'
        )
    for name in names:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{where} holds {json.dumps(name)}, which is no device's name.")
    if len(set(names)) != len(names):
        raise ConfigError(f"{where} names the same device twice: one device is one cable.")
    return tuple(names)


def _check_ring(matrix: Matrix, missing: Sequence[tuple[int, int]], name: str) -> None:
    size = len(matrix)
    gaps = [(rank, peer) for rank, peer in missing if (rank - peer) % size in (1, size - 1)]
    if gaps:
        pairs = " and ".join(f"rank {rank} to rank {peer}" for rank, peer in gaps[:3])
        more = f" and {len(gaps) - 3} more" if len(gaps) > 3 else ""
        raise ConfigError(
            f"{name} names no device from {pairs}{more}: it must be a mesh (every rank to every "
            "other) or a ring (each to the one before and the one behind)."
        )
    counts = {
        (rank, peer): len(matrix[rank][peer])
        for rank in range(size)
        for peer in ((rank - 1) % size, (rank + 1) % size)
    }
    due = counts[0, 1]
    for (rank, peer), count in counts.items():
        if count != due:
            raise ConfigError(
                f"{name} is a ring with {_cables(due)} from rank 0 to rank 1 but {_cables(count)} "
                f"from rank {rank} to rank {peer}: a ring needs as many everywhere."
            )
    if due > RING_CABLES_MAX:
        raise ConfigError(
            f"{name} is a ring with {due} cables between neighbours, and MLX holds "
            f"{RING_CABLES_MAX}: leave out the others."
        )


def _cables(count: int) -> str:
    return "1 cable" if count == 1 else f"{count} cables"
