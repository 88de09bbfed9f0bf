"""Sums over ranks in memory that all of them see: real processes, kernels on the CPU."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.mlx.execution.fast_path.kernels.metal_kernels import COMPILER
from tests.multirank.worlds.ring import run_ring

SOURCE = Path(__file__).with_name("driver_on_cpu.c")
LAYERS = 3
ADDS_UP = "fast path with kernels that add up over ranks"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the driver."""
    library = tmp_path_factory.mktemp("driver") / "driver.so"
    command = [str(COMPILER), "-x", "c", "-shared", "-fPIC", str(SOURCE), "-o", str(library)]
    subprocess.run(command, check=True)
    return library


def _run_ranks(size: int, case: str, driver: str, folder: Path) -> list[dict[str, Any]]:
    """Run a case; return each rank's result."""
    variables = {rank: {"MEMORY_FOLDER": str(folder)} for rank in range(size)}
    program = "tests.mlx.execution.fast_path.peers.peer_rank"
    return run_ring(program, [str(folder), driver, case], size, folder, 100.0, variables)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.proof)])
def test_sums_in_memory_equal_those_of_collectives(size: int, driver: Path, tmp_path: Path) -> None:
    """Of any number of rows in turn, and every rank has the same bits."""
    found = _run_ranks(size, "sums", str(driver), tmp_path)
    assert all(one["difference"] < 1e-5 for one in found)
    assert all(one == found[0] for one in found)


def test_a_rank_that_cannot_share_memory_keeps_all_from_it(driver: Path, tmp_path: Path) -> None:
    """Otherwise the others would wait in kernels for parts that never come."""
    first, second = _run_ranks(2, "faults", str(driver), tmp_path)
    opens = "another rank cannot open it"
    assert list(first.values()) == ["another rank has none", opens, opens]
    assert second["cuInit"] == "cuInit failed with 2"
    assert second["cuIpcOpenMemHandle_v2"] == "cuIpcOpenMemHandle_v2 failed with 2"
    assert second["other_memory"] == "the memory of another rank is a different one"


@pytest.mark.proof
def test_ranks_without_a_driver_say_so(tmp_path: Path) -> None:
    """The sums stay collectives."""
    found = _run_ranks(2, "faults", "/no/driver.so", tmp_path)
    assert all("/no/driver.so" in one["cuInit"] for one in found)


@pytest.mark.parametrize(
    "case",
    [
        "tensor+expert:qwen3_moe",
        *(
            pytest.param(case, marks=pytest.mark.proof)
            for case in (
                "tensor:qwen2",
                "tensor:qwen3_moe",
                "expert:qwen3_moe",
                "tensor:deepseek_v3",
            )
        ),
    ],
)
def test_decodes_that_add_up_in_memory_have_the_same_tokens(
    case: str, driver: Path, tmp_path: Path
) -> None:
    """And their layers start no collective."""
    for found in _run_ranks(2, case, str(driver), tmp_path):
        assert found["with"]["state"].startswith(ADDS_UP)
        assert not found["without"]["state"].startswith(ADDS_UP)
        assert found["with"]["tokens"] == found["without"]["tokens"]
        saved = found["without"]["collectives"] - found["with"]["collectives"]
        assert saved == LAYERS * (1 if case.startswith("expert") else 2)
