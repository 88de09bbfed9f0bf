"""The matrix of RDMA devices: topologies that MLX accepts, and errors for all others."""

import json
from typing import Any

import pytest

from shared.configuration import device_matrix
from shared.errors import ConfigError

_MESH_4 = [
    [None, "en5", "en4", "en3"],
    ["en5", None, "en3", "en4"],
    ["en4", "en3", None, "en5"],
    ["en3", "en4", "en5", None],
]
_RING_4 = [
    [None, "en3", None, "en2"],
    ["en2", None, "en3", None],
    [None, "en2", None, "en3"],
    ["en3", None, "en2", None],
]


def _full(size: int, cables: int = 1) -> list[list[Any]]:
    """Return a mesh; each device leads to one peer."""
    return [
        [None if rank == peer else _entry(peer, cables) for peer in range(size)]
        for rank in range(size)
    ]


def _ring(size: int, cables: int = 1) -> list[list[Any]]:
    """Return a ring; each device leads to one peer."""
    return [
        [
            _entry(peer, cables) if (rank - peer) % size in (1, size - 1) else None
            for peer in range(size)
        ]
        for rank in range(size)
    ]


def _entry(peer: int, cables: int) -> str | list[str]:
    names = [f"en{peer}-{cable}" for cable in range(cables)]
    return names if cables > 1 else names[0]


@pytest.mark.parametrize(
    ("rows", "topology"),
    [
        (_full(2), "mesh"),
        (_full(2, 2), "mesh"),
        (_MESH_4, "mesh"),
        (_full(8), "mesh"),
        (_RING_4, "ring"),
        (_ring(5, 4), "ring"),
        (_ring(9), "ring"),
        # Additional cables are allowed: MLX uses the devices of neighbours only.
        ([[None, "a", "b", "c"], ["a", None, "d", None], ["b", "d", None, "e"],
          ["c", None, "e", None]], "ring"),
    ],
)  # fmt: skip
def test_rdma_device_matrices_of_meshes_and_rings_are_accepted(
    rows: list[list[Any]], topology: str
) -> None:
    """Meshes and rings with one or several cables between hosts pass; the JSON does not change."""
    matrix = device_matrix.parse(json.dumps(rows))

    assert device_matrix.topology(matrix) == topology
    assert json.loads(device_matrix.to_json(matrix)) == rows


def test_rdma_device_matrix_of_mesh_is_accepted_as_ring() -> None:
    """A mesh is a valid ring, as with MLX's backend "jaccl-ring"."""
    assert device_matrix.topology(device_matrix.parse(json.dumps(_MESH_4)), ring=True) == "ring"


@pytest.mark.parametrize(
    ("rows", "expected_words"),
    [
        ({}, "list of lists"),
        ([None], "list of lists"),
        ([[None, "a"]], "1 rows and 2 entries for rank 0"),
        ([[None, "a"], ["a", None, "b"]], "2 rows and 3 entries for rank 1"),
        ([["a", "b"], ["c", None]], "rank 0 to itself: write null"),
        ([[None, ""], ["a", None]], "not a device name"),
        ([[None, 5], ["a", None]], "rank 0 to rank 1 is 5"),
        ([[None, []], ["a", None]], "rank 0 to rank 1 is"),
        ([[None, ["a", 5]], ["a", None]], "contains 5, which is not a device"),
        ([[None, ["a", "a"]], ["a", None]], "same device twice"),
        (
            [[None, "a", ["b", "a"]], ["a", None, "b"], ["a", "b", None]],
            "names a from rank 0 to rank 1 and to rank 2: one device is one cable",
        ),
    ],
)
def test_rdma_device_matrix_is_refused_when_malformed(rows: Any, expected_words: str) -> None:
    """The matrix must be square, with null on the diagonal and device names elsewhere."""
    with pytest.raises(ConfigError, match=expected_words):
        device_matrix.parse(json.dumps(rows))


@pytest.mark.parametrize(
    ("rows", "expected_words"),
    [
        ([[None]], "jaccl needs 2 or more"),
        ([[None, None], ["a", None]], "no device from rank 0 to rank 1: it must be a mesh"),
        # A chain of three. MLX would accept it as a ring although a cable is missing.
        ([[None, "a", None], ["a", None, "b"], [None, "b", None]],
         "rank 0 to rank 2 and rank 2 to rank 0"),
        (_full(9), "mesh of 9 ranks, but MLX supports 8"),
        (_ring(4, 5), "5 cables between neighbours, but MLX supports 4"),
        ([[None, ["a", "b"], None, "c"], ["a", None, "b", None], [None, "a", None, "b"],
          ["a", None, "b", None]], "2 cables from rank 0 to rank 1 but 1 cable from rank 0 to"),
    ],
)  # fmt: skip
def test_rdma_device_matrix_error_names_rank_pair_without_device(
    rows: list[list[Any]], expected_words: str
) -> None:
    """The error names the pair of ranks without a device, or the number that is too large."""
    with pytest.raises(ConfigError, match=expected_words):
        device_matrix.topology(device_matrix.parse(json.dumps(rows)))


@pytest.mark.parametrize(
    ("rows", "machines", "most"),
    [
        (_full(2), "ab", (1, 64)),
        (_MESH_4, "abcd", (1, 64)),
        (_RING_4, "abcd", (1, 32)),
        # Two ranks per machine share the devices between their machines.
        (_full(2), "aa", (1, 64)),
        ([[None, "x", "en5", "y"], ["x", None, "y", "en5"],
          ["en5", "y", None, "x"], ["y", "en5", "x", None]], "aabb", (2, 128)),
    ],
)  # fmt: skip
def test_rdma_resources_are_counted_per_machine_and_device(
    rows: list[list[Any]], machines: str, most: tuple[int, int]
) -> None:
    """A connection needs a queue pair, and 64 memory regions in a mesh or 32 in a ring; the ranks
    of one machine share what its device has."""
    matrix = device_matrix.parse(json.dumps(rows))
    uses = device_matrix.device_uses(matrix, device_matrix.topology(matrix), list(machines))

    largest = max(uses.values(), key=lambda use: use.memory_regions)
    assert (largest.queue_pairs, largest.memory_regions) == most
    assert largest.exceeded == (most[1] > 100)


def test_ring_of_two_ranks_needs_two_queue_pairs_of_one_device() -> None:
    """In a ring of two, left and right neighbour are one rank behind one device."""
    matrix = device_matrix.parse(json.dumps(_full(2)))
    (one, _) = device_matrix.device_uses(matrix, "ring", ["a", "b"]).values()

    assert one.explain("en1") == "en1 needs 2 of 10 queue pairs and 64 of 100 memory regions"
