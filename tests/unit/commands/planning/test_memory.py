"""Sizes that people write, and what a machine says of its own memory."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.commands.planning.hosts import (
    GIB,
    AskSystem,
    device_of_this_machine,
    format_bytes,
    memory_of_sizes,
    memory_of_this_machine,
    parse_sizes,
    usable_bytes_of,
)
from shared.errors import UnavailableError, UsageError


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("512GB", [512 * GIB]),
        ("512gb, 192 GiB", [512 * GIB, 192 * GIB]),
        ("2x64G,1.5T", [64 * GIB, 64 * GIB, 1_536 * GIB]),
        ("8388608", [2**23]),
    ],
)
def test_sizes_are_read(text: str, sizes: list[int]) -> None:
    """One size per host, with or without a unit, as often as is said."""
    assert parse_sizes(text) == sizes


@given(st.text(max_size=20))
def test_other_texts_are_refused(text: str) -> None:
    """Sizes above 0, or one sentence that shows how to write them."""
    with contextlib.suppress(UsageError):
        assert all(size > 0 for size in parse_sizes(text))


def test_sizes_are_shown_with_a_unit() -> None:
    """Three digits or so, in the largest unit that gives at least one."""
    assert [format_bytes(n) for n in (0, 1_536, 5 * 2**20, 512 * GIB)] == [
        "0 B",
        "1.5 KiB",
        "5.0 MiB",
        "512 GiB",
    ]


def test_metal_may_use_a_part() -> None:
    """Two thirds of a small Mac, three quarters of a large one, all of a GPU of its own."""
    assert usable_bytes_of(32 * GIB, "metal") == int(32 * GIB * 2 / 3)
    assert usable_bytes_of(512 * GIB, "metal") == 384 * GIB
    assert usable_bytes_of(80 * GIB, "cuda") == 80 * GIB
    assert memory_of_sizes([100 * GIB], "metal", 0.9)[0].usable_bytes == 90 * GIB


def _says(**answers: str) -> AskSystem:
    def ask(command: Sequence[str]) -> str:
        return next((text for name, text in answers.items() if name in " ".join(command)), "")

    return ask


def test_a_mac_says_how_much_may_be_wired() -> None:
    """iogpu.wired_limit_mb is what the GPU may use where somebody has set it; 0: the usual part."""
    ask = _says(memsize="549755813888\n", wired_limit="0\n")
    raised = _says(memsize="549755813888\n", wired_limit="491520\n")

    assert [m.usable_bytes for m in memory_of_this_machine(1, "metal", ask=ask)] == [384 * GIB]
    assert memory_of_this_machine(2, "metal", ask=raised)[1].usable_bytes == 240 * GIB


def test_gpus_are_counted(tmp_path: Path) -> None:
    """A rank per GPU, and too few GPUs are named."""
    ask = _says(nvidia="143771\n143771\n")

    assert device_of_this_machine(ask, "linux") == "cuda"
    assert len(memory_of_this_machine(2, "cuda", ask=ask)) == 2
    with pytest.raises(UsageError, match="this machine has 2"):
        memory_of_this_machine(4, "cuda", ask=ask)


def test_ranks_of_one_machine_share_what_is_available(tmp_path: Path) -> None:
    """Linux: what could be had without swapping, divided by the ranks."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable:   8388608 kB\n")

    assert [m.usable_bytes for m in memory_of_this_machine(2, "cpu", meminfo=meminfo)] == [
        4 * GIB
    ] * 2


def test_a_mac_that_says_nothing_is_an_error_with_a_remedy() -> None:
    """No figure is made up."""
    with pytest.raises(UnavailableError, match="--memory"):
        memory_of_this_machine(1, "metal", ask=_says())
