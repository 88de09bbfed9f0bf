"""Memory sizes on the command line, and the memory that a machine reports."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.commands.checks.text_table import format_bytes
from services.commands.doctor.system_commands import CommandOutcome, RunCommand
from services.commands.planning.hosts import (
    GIB,
    DeviceKind,
    device_of_this_machine,
    memory_of_sizes,
    memory_of_this_machine,
    parse_sizes,
    usable_bytes_of,
)
from shared.errors import UnavailableError, UsageError
from tests.support.control_groups import hide_control_groups, show_control_groups


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("512GB", [512 * GIB]),
        ("512gb, 192 GiB", [512 * GIB, 192 * GIB]),
        ("2x64G,1.5T", [64 * GIB, 64 * GIB, 1_536 * GIB]),
        ("8388608", [2**23]),
    ],
)
def test_memory_flag_accepts_units_and_repeated_sizes(text: str, sizes: list[int]) -> None:
    """There is one size per host, with or without a unit; "2x64G" means two hosts."""
    assert parse_sizes(text) == sizes


@given(st.text(max_size=20))
def test_memory_flag_gives_positive_sizes_or_usage_error_for_any_text(text: str) -> None:
    """Any text gives sizes above 0 or a UsageError."""
    with contextlib.suppress(UsageError):
        assert all(size > 0 for size in parse_sizes(text))


def test_byte_count_is_printed_in_largest_fitting_unit() -> None:
    """A size has about three digits, in the largest unit that gives at least one."""
    assert [format_bytes(n) for n in (0, 1_536, 5 * 2**20, 512 * GIB, 1_536 * GIB)] == [
        "0 B",
        "1.5 KiB",
        "5.0 MiB",
        "512 GiB",
        "1.5 TiB",
    ]


def test_usable_memory_is_documented_fraction_of_memory_of_mac_or_gpu() -> None:
    """Two thirds of a small Mac's memory are usable, three quarters of a large one's, and all of an
    NVIDIA GPU's."""
    assert usable_bytes_of(32 * GIB, "metal") == int(32 * GIB * 2 / 3)
    assert usable_bytes_of(512 * GIB, "metal") == 384 * GIB
    assert usable_bytes_of(80 * GIB, "cuda") == 80 * GIB
    assert memory_of_sizes([100 * GIB], "metal", 0.9)[0].usable_bytes == 90 * GIB


def _fake_system(**answers: str) -> RunCommand:
    """Return a function that answers a command with the text whose name is among its words."""

    def run(command: Sequence[str], _deadline_s: float) -> CommandOutcome:
        words = " ".join(command)
        text = next((text for name, text in answers.items() if name in words), "")
        return CommandOutcome(text, problem="" if text else f"{command[0]} is not on this machine")

    return run


def test_wired_limit_setting_becomes_usable_memory_of_mac() -> None:
    """iogpu.wired_limit_mb is the usable memory if it is set; 0 means the default part."""
    runner = _fake_system(memsize="549755813888\n", wired_limit="0\n")
    raised = _fake_system(memsize="549755813888\n", wired_limit="491520\n")

    assert [m.usable_bytes for m in memory_of_this_machine(1, "metal", runner=runner)] == [
        384 * GIB
    ]
    assert memory_of_this_machine(2, "metal", runner=raised)[1].usable_bytes == 240 * GIB


def test_plan_refuses_more_ranks_than_gpus() -> None:
    """Each rank uses one GPU, and too few GPUs are an error with their number."""
    runner = _fake_system(nvidia="NVIDIA H200, 570.86, 143771, 4\n" * 2)

    assert device_of_this_machine(runner, "linux") == "cuda"
    assert len(memory_of_this_machine(2, "cuda", runner=runner)) == 2
    with pytest.raises(UsageError, match="this machine has 2"):
        memory_of_this_machine(4, "cuda", runner=runner)


def test_ranks_on_one_linux_host_divide_its_available_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ranks divide the MemAvailable of Linux."""
    sizes = SimpleNamespace(total=16 * GIB, available=8 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: sizes)
    hide_control_groups(monkeypatch)

    assert [m.usable_bytes for m in memory_of_this_machine(2, "cpu")] == [4 * GIB] * 2


def test_plan_in_a_container_counts_what_its_limit_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan for this machine counts the memory that the rank worker would."""
    sizes = SimpleNamespace(total=16 * GIB, available=8 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: sizes)
    files = {"memory.max": str(3 * GIB), "memory.current": str(GIB)}
    show_control_groups(tmp_path, monkeypatch, files)

    assert [m.usable_bytes for m in memory_of_this_machine(2, "cpu")] == [GIB] * 2


def test_plan_gives_each_rank_the_configured_share_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the rank worker counts it: the share is one of the machine, and not of a GPU or a
    container's limit."""
    mac = _fake_system(memsize="549755813888\n", wired_limit="0\n")
    gpus = _fake_system(nvidia="NVIDIA H200, 570.86, 143771, 4\n")
    sizes = SimpleNamespace(total=16 * GIB, available=8 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: sizes)
    hide_control_groups(monkeypatch)

    def usable(kind: DeviceKind, runner: RunCommand = mac) -> int:
        return memory_of_this_machine(1, kind, machine_share=0.25, runner=runner)[0].usable_bytes

    assert usable("metal") == 96 * GIB
    assert usable("cpu") == 2 * GIB
    assert usable("cuda", gpus) == 143_771 * 2**20
    assert memory_of_sizes([64 * GIB], "cpu", machine_share=0.25)[0].usable_bytes == 16 * GIB

    files = {"memory.max": str(3 * GIB), "memory.current": str(GIB)}
    show_control_groups(tmp_path, monkeypatch, files)
    assert usable("cpu") == 2 * GIB


def test_plan_asks_for_memory_flag_when_memory_of_mac_is_unknown() -> None:
    """A Mac whose memory cannot be read gives an error that asks for `--memory`."""
    with pytest.raises(UnavailableError, match="--memory"):
        memory_of_this_machine(1, "metal", runner=_fake_system())
