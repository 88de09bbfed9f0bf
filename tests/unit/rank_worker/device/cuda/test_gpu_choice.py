"""GPU of each rank: one of its own with NCCL, or a refusal."""

from pathlib import Path

import pytest

from services.rank_worker.device.cuda import gpu_choice
from shared.errors import ConfigError


@pytest.mark.parametrize(
    ("place", "visible", "count", "own"),
    [
        (0, None, 2, "0"),
        (1, None, 2, "1"),
        (1, None, None, "1"),
        (0, "3", 8, "3"),
        (1, "2, 5", 8, "5"),
        (1, "GPU-aa,GPU-bb", None, "GPU-bb"),
    ],
)
def test_ranks_take_visible_gpus_in_order(
    place: int, visible: str | None, count: int | None, own: str
) -> None:
    """Ranks take the GPUs in order, limited to CUDA_VISIBLE_DEVICES if it is set."""
    assert gpu_choice.own_gpu(place, visible, count) == own


@pytest.mark.parametrize(
    ("place", "visible", "count", "message"),
    [
        (2, None, 2, "rank number 3 on its host, but there are 2 GPUs.*--ranks"),
        (1, None, 1, "there is 1 GPU"),
        (1, "4", 8, "CUDA_VISIBLE_DEVICES is '4', so there is 1 GPU.*List all GPUs"),
        (0, "", 8, "CUDA_VISIBLE_DEVICES is '', so there are 0 GPUs"),
    ],
)
def test_more_ranks_than_gpus_on_host_are_refused(
    place: int, visible: str | None, count: int | None, message: str
) -> None:
    """More ranks than GPUs on a host are refused with both numbers and the remedy."""
    with pytest.raises(ConfigError, match=message):
        gpu_choice.own_gpu(place, visible, count)


def test_gpu_count_equals_number_of_gpu_device_files(tmp_path: Path) -> None:
    """Only device files of GPUs are counted; without any the number is unknown."""
    assert gpu_choice.count_gpus(tmp_path / "nowhere") is None
    assert gpu_choice.count_gpus(tmp_path) is None
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "nvidia"):
        (tmp_path / name).touch()

    assert gpu_choice.count_gpus(tmp_path) == 3


@pytest.mark.parametrize(
    ("before", "count", "after"),
    [
        ({}, 2, {"CUDA_VISIBLE_DEVICES": "0"}),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, 2, {"CUDA_VISIBLE_DEVICES": "1,0"}),
        ({}, 1, {}),
        ({}, None, {}),
    ],
    ids=["two", "chosen", "one", "none"],
)
def test_single_rank_sees_only_first_of_several_gpus(
    before: dict[str, str], count: int | None, after: dict[str, str]
) -> None:
    """A single rank sees the first of several GPUs, unless the operator has set the variable."""
    gpu_choice.show_one_gpu(before, count)

    assert before == after
