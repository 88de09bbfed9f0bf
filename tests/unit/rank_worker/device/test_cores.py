"""Cores are shared out evenly among the ranks of one host."""

import os
import sys
import threading
from pathlib import Path

import pytest

from services.rank_worker.device import cores
from shared.messages import JoinWorld
from tests.orders import join_order

HOSTFILE = '[["10.0.0.1:5"], ["10.0.0.1:6"], ["10.0.0.2:5", "10.0.1.2:5"]]'


@pytest.mark.parametrize(
    ("available", "place", "count", "expected"),
    [
        ([0, 1], 0, 2, [0]),
        ([0, 1], 1, 2, [1]),
        ([2, 3, 4, 5, 6, 7], 1, 2, [5, 6, 7]),
        ([0, 1, 2, 3, 4], 1, 2, [2, 3]),
        ([4, 9], 3, 4, [9]),
        ([4], 0, 1, [4]),
    ],
)
def test_each_rank_gets_its_own_neighbours(
    available: list[int], place: int, count: int, expected: list[int]
) -> None:
    """Equal runs; with more ranks than cores they take turns on one."""
    assert cores.share(available, place, count) == expected


def test_ranks_are_counted_per_host() -> None:
    """The hostfile tells how many ranks share this host, and which of them this is."""
    assert [cores.place_on_host(HOSTFILE, rank) for rank in range(3)] == [(0, 2), (1, 2), (0, 1)]


def _order_alone() -> JoinWorld:
    return join_order()


def test_an_order_without_a_hostfile_says_nothing() -> None:
    """One rank, or a backend without a hostfile: as if alone."""
    order = _order_alone()
    assert cores.hostfile(order, {}) == ""
    assert cores.place_on_host("", 0) == (0, 1)


def test_a_launchers_hostfile_is_read(tmp_path: Path) -> None:
    """Without a file in the order, the one that the environment names counts."""
    (tmp_path / "hosts").write_text(HOSTFILE + "\n")
    order = _order_alone()
    assert cores.hostfile(order, {"MLX_HOSTFILE": str(tmp_path / "hosts")}) == HOSTFILE


def test_pinning_binds_the_thread_and_leaves_others() -> None:
    """The rank's thread keeps its share; the process's other threads may run anywhere."""
    if sys.platform != "linux":
        assert cores.pin("on", on_cpu=True, place=0, count=2) == []
        return
    before = os.sched_getaffinity(0)
    found: list[object] = []

    def pin() -> None:
        found.append(cores.pin("auto", on_cpu=True, place=0, count=2))
        found.append(sorted(os.sched_getaffinity(0)))

    thread = threading.Thread(target=pin)
    thread.start()
    thread.join()

    assert found[0] == found[1] == cores.share(sorted(before), 0, 2)
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("choice", "on_cpu", "count"), [("off", True, 2), ("auto", False, 2), ("auto", True, 1)]
)
def test_nothing_is_pinned_where_it_would_not_help(choice: str, on_cpu: bool, count: int) -> None:
    """Off, on a GPU, or alone on the host: the kernel decides."""
    assert cores.pin(choice, on_cpu=on_cpu, place=0, count=count) == []  # type: ignore[arg-type]
