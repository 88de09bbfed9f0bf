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


def _full(size: int, entry: Any = "en1") -> list[list[Any]]:
    return [[None if rank == peer else entry for peer in range(size)] for rank in range(size)]


def _ring(size: int, entry: Any = "en1") -> list[list[Any]]:
    return [
        [entry if (rank - peer) % size in (1, size - 1) else None for peer in range(size)]
        for rank in range(size)
    ]


@pytest.mark.parametrize(
    ("rows", "topology"),
    [
        (_full(2), "mesh"),
        (_full(2, ["en1", "en2"]), "mesh"),
        (_MESH_4, "mesh"),
        (_full(8), "mesh"),
        (_RING_4, "ring"),
        (_ring(5, ["en1", "en2", "en3", "en4"]), "ring"),
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
        (_ring(4, ["a", "b", "c", "d", "e"]), "5 cables between neighbours, but MLX supports 4"),
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
