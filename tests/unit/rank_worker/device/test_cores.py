"""CPU cores of a rank: an equal share for each rank of a host."""

import os
import sys
import threading
from pathlib import Path

import pytest

from services.rank_worker.device import cores
from shared.messages import JoinWorld
from tests.support.orders import join_order

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
def test_ranks_of_one_host_get_equal_runs_of_cores(
    available: list[int], place: int, count: int, expected: list[int]
) -> None:
    """Each rank gets an equal run of cores; with too few cores ranks share one."""
    assert cores.share(available, place, count) == expected


def test_hostfile_gives_rank_count_and_rank_index_on_each_host() -> None:
    """The hostfile determines the number of ranks on a host and the index of each on it."""
    assert [cores.place_on_host(HOSTFILE, rank) for rank in range(3)] == [(0, 2), (1, 2), (0, 1)]


def _order_without_hostfile() -> JoinWorld:
    """Return an order without a hostfile."""
    return join_order()


def test_rank_without_hostfile_counts_as_only_one_on_host() -> None:
    """Without a hostfile a rank is treated as the only one on its host."""
    order = _order_without_hostfile()
    assert cores.hostfile(order, {}) == ""
    assert cores.place_on_host("", 0) == (0, 1)


def test_hostfile_named_in_environment_is_read_when_join_order_has_none(tmp_path: Path) -> None:
    """Without a hostfile in the join order, the one named in the environment is read."""
    (tmp_path / "hosts").write_text(HOSTFILE + "\n")
    order = _order_without_hostfile()
    assert cores.hostfile(order, {"MLX_HOSTFILE": str(tmp_path / "hosts")}) == HOSTFILE


def test_pinning_to_cores_affects_only_calling_thread() -> None:
    """Pinning binds the calling thread to its share; other threads keep all cores."""
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
def test_no_thread_is_pinned_with_pinning_off_on_gpu_or_for_single_rank(
    choice: str, on_cpu: bool, count: int
) -> None:
    """No thread is pinned when pinning is off, on a GPU, or for a single rank of a host."""
    assert cores.pin(choice, on_cpu=on_cpu, place=0, count=count) == []  # type: ignore[arg-type]
