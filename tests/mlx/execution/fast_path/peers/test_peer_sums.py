"""Sums over ranks in memory that all of them see: real processes, kernels on the CPU."""

from pathlib import Path
from typing import Any

import pytest

from tests.mlx.device.cuda.driver_on_cpu import compile_driver
from tests.multirank.worlds.ring import run_ring

LAYERS = 3
LOST = "a trial sum of 1 rows is wrong"
SUMS = "fast path with kernels that sum over ranks"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the driver."""
    return compile_driver(tmp_path_factory.mktemp("driver"))


def _run_ranks(size: int, case: str, driver: Path, folder: Path) -> list[dict[str, Any]]:
    """Run a case; return each rank's result. Compiled kernels are kept beside the driver."""
    program = "tests.mlx.execution.fast_path.peers.peer_rank"
    arguments = [str(driver.parent), str(driver), case]
    return run_ring(program, arguments, size, folder, 100.0, {"MEMORY_FOLDER": str(folder)})


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.proof)])
def test_sums_in_memory_equal_those_of_collectives(size: int, driver: Path, tmp_path: Path) -> None:
    """Of any number of rows in turn, and every rank has the same bits."""
    found = _run_ranks(size, "sums", driver, tmp_path)
    assert all(one["difference"] < 1e-5 for one in found)
    assert all(one == found[0] for one in found)


def test_a_rank_that_cannot_share_memory_keeps_all_from_it(driver: Path, tmp_path: Path) -> None:
    """Otherwise the others would wait in kernels for parts that never come."""
    first, second = _run_ranks(2, "faults", driver, tmp_path)
    failed = "failed (CUDA_ERROR_OUT_OF_MEMORY: out of memory)"
    opens = "another rank cannot open the others' memory"
    assert first == {
        "cuInit": "another rank has no memory to share",
        "cuIpcOpenMemHandle_v2": opens,
        "other_memory": opens,
        "cuMemsetD8_v2": "another rank cannot clear its memory",
        "no_stores": LOST,
    }
    assert second == {
        "cuInit": f"cuInit {failed}",
        "cuIpcOpenMemHandle_v2": f"cuIpcOpenMemHandle_v2 {failed}",
        "other_memory": "another rank's memory does not hold its handle",
        "cuMemsetD8_v2": f"cuMemsetD8_v2 {failed}",
        "no_stores": LOST,
    }


@pytest.mark.proof
def test_decodes_that_sum_in_memory_have_the_same_tokens(driver: Path, tmp_path: Path) -> None:
    """And a decode starts one collective less for each divided attention, MLP and block of experts.

    The model has a dense layer and two of experts.
    """
    for found in _run_ranks(2, "peer_memory:tensor:deepseek_v3", driver, tmp_path):
        assert found["with"]["state"].startswith(SUMS)
        assert not found["without"]["state"].startswith(SUMS)
        assert found["with"]["tokens"] == found["without"]["tokens"]
        saved = found["without"]["collectives"] - found["with"]["collectives"]
        assert saved == 2 * LAYERS


@pytest.mark.proof
def test_ranks_that_write_prompts_in_place_have_the_same_tokens(
    driver: Path, tmp_path: Path
) -> None:
    """Collectives sum over ranks in prompts, and memory in the decodes between them."""
    for found in _run_ranks(2, "prompts_in_place:tensor:qwen3_moe", driver, tmp_path):
        assert found["with"]["state"].startswith(f"{SUMS}; kernels attend to prompts too")
        assert found["without"]["state"].startswith(SUMS)
        assert "prompts" not in found["without"]["state"]
        assert found["with"]["tokens"] == found["without"]["tokens"]
