"""`lockstep bench start`, with real stacks."""

import json
import subprocess
from pathlib import Path

import pytest

from services.commands.bench.measuring.processes import LOCKSTEP_COMMAND

BENCHMARK = ["bench", "start", "--preset", "tiny", "--rounds", "1", "--clients", "2", "--json"]
OTHER = "rank_worker.fast_path=off"


def _run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [*LOCKSTEP_COMMAND, *BENCHMARK, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.proof
def test_start_benchmark_starts_contenders_in_turn_each_with_own_folder_of_kernels(
    tmp_path: Path,
) -> None:
    """Every start is measured, and their ratios; without an NVIDIA GPU a note says so."""
    ended = _run("--quick", "--repeats", "2", "--cold", "--compare", OTHER, "--logs", str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    (case,) = report["cases"]
    assert {name: len(one["ready_s"]["values"]) for name, one in case["series"].items()} == {
        "lockstep": 2,
        OTHER: 2,
    }
    assert len(case["ratios"][f"{OTHER}/lockstep tokens_per_s"]["values"]) == 2
    starts = sorted(path.name[: len("kernels-1-1")] for path in tmp_path.glob("kernels-*"))
    assert starts == ["kernels-1-1", "kernels-1-2", "kernels-2-1", "kernels-2-2"]
    assert any("--cold changed nothing" in note for note in report["notes"])


@pytest.mark.proof
def test_start_benchmark_refuses_wrong_setting_before_first_start() -> None:
    """A mistake in the settings of the last contender is found at once."""
    ended = _run("--compare", OTHER, "--compare", "rank_worker.fst_path=off")
    assert ended.returncode == 78
    assert "FST_PATH" in ended.stderr
    assert "start 1" not in ended.stderr
