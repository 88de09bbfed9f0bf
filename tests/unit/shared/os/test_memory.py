"""Memory that a process may use: the machine's and the limits of its control groups."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from shared.os.memory import MEMBERSHIP_FILE, UsableMemory, usable_memory
from tests.support.control_groups import write_group

GIB = 2**30
TOTAL, AVAILABLE = 24 * GIB, 20 * GIB


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = SimpleNamespace(total=TOTAL, available=AVAILABLE)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: sizes)


def _usable(
    folder: Path, membership: str, sharers: int = 1, machine_share: float = 0.0
) -> UsableMemory:
    (folder / "membership").write_text(membership)
    return usable_memory(
        sharers,
        machine_share,
        groups_folder=folder / "groups",
        membership_file=folder / "membership",
    )


def test_machine_without_control_groups_offers_its_available_memory(tmp_path: Path) -> None:
    """On macOS, and on Linux without limits, the machine's memory is shared in equal parts."""
    missing = usable_memory(2, groups_folder=tmp_path / "a", membership_file=tmp_path / "b")

    assert missing == UsableMemory(TOTAL // 2, AVAILABLE // 2)
    write_group(tmp_path / "groups", {"cgroup.procs": "1"})
    assert _usable(tmp_path, "0::/\n") == UsableMemory(TOTAL, AVAILABLE)


def test_smallest_limit_up_the_tree_bounds_memory_in_version_2(tmp_path: Path) -> None:
    """A process may use what the fullest of the groups above it has left; pages of files count as
    free."""
    groups = tmp_path / "groups"
    write_group(groups, {"cgroup.procs": "1"})
    pod = {"memory.max": str(2 * GIB), "memory.current": str(GIB)}
    write_group(groups / "pod", {**pod, "memory.stat": f"inactive_file {GIB // 4}\nanon 5"})
    own = {"memory.max": "max", "memory.high": str(3 * GIB), "memory.current": str(GIB // 2)}
    write_group(groups / "pod/container", own)

    usable = _usable(tmp_path, "0::/pod/container\n")

    assert usable == UsableMemory(2 * GIB, GIB + GIB // 4, str(groups / "pod"))


def test_limits_of_version_1_hold_even_where_group_is_hidden(tmp_path: Path) -> None:
    """A container sees its own group as the root and is told a path outside; the limit of a group
    above it is in the statistics."""
    group = tmp_path / "groups/memory"
    limits = {"memory.limit_in_bytes": str(4 * GIB), "memory.usage_in_bytes": str(GIB)}
    hidden = f"hierarchical_memory_limit {3 * GIB}\ntotal_active_file {GIB // 2}"
    write_group(group, {**limits, "memory.stat": hidden})

    usable = _usable(tmp_path, "7:cpu,cpuacct:/\n4:memory:/docker/1234\n0::/docker/1234\n")

    assert usable == UsableMemory(3 * GIB, 2 * GIB + GIB // 2, str(group))


def test_ranks_in_one_group_divide_its_limit_and_the_machine(tmp_path: Path) -> None:
    """Ranks that know of each other divide both; a share is a part of the machine only, because
    containers have limits of their own."""
    write_group(tmp_path / "groups", {"memory.max": str(6 * GIB), "memory.current": str(2 * GIB)})

    both, own = _usable(tmp_path, "0::/", 2), _usable(tmp_path, "0::/", 1, 0.125)

    assert (both.total_bytes, both.free_bytes) == (3 * GIB, 2 * GIB)
    assert (own.total_bytes, own.free_bytes) == (TOTAL // 8, AVAILABLE // 8)


def test_full_or_unlimited_group_gives_nothing_or_everything(tmp_path: Path) -> None:
    """A group that is above its limit has nothing left; a huge limit of version 1 does not
    count."""
    write_group(tmp_path / "groups", {"memory.max": str(GIB), "memory.current": str(2 * GIB)})
    assert _usable(tmp_path, "0::/../other").free_bytes == 0

    unlimited = {"memory.limit_in_bytes": "9223372036854771712", "memory.usage_in_bytes": "5"}
    write_group(tmp_path / "groups/memory", unlimited)
    assert _usable(tmp_path, "4:memory:/\n0::/") == UsableMemory(TOTAL, AVAILABLE)


_PRINT = (
    "from shared.os.memory import usable_memory as u; m = u(); print(m.total_bytes, m.free_bytes)"
)


def test_real_control_group_bounds_memory_of_its_process() -> None:
    """A process in a real group with a limit of 1 GiB may use at most that, on machines that let
    this user make groups."""
    group = _make_group()
    if group is None:
        return
    limit = group / ("memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes")
    enter = f"import os; open('{group}/cgroup.procs', 'w').write(str(os.getpid())); {_PRINT}"
    try:
        limit.write_text(str(GIB))
        done = subprocess.run(
            [sys.executable, "-c", enter], capture_output=True, text=True, timeout=30, check=True
        )
    finally:
        group.rmdir()

    total, free = map(int, done.stdout.split())
    assert total == GIB
    assert 0 < free < GIB


def _make_group() -> Path | None:
    """Make a control group below this process's own; return None where that is not allowed."""
    if not MEMBERSHIP_FILE.exists():
        return None
    lines = MEMBERSHIP_FILE.read_text().splitlines()
    paths = dict(line.split(":", 2)[1:] for line in lines)
    root = Path("/sys/fs/cgroup")
    base = root / "memory" if "memory" in paths else root
    own = base / paths.get("memory", paths.get("", "/")).lstrip("/")
    for parent in (own, base):
        group = parent / f"lockstep-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        if any((group / name).exists() for name in ("memory.max", "memory.limit_in_bytes")):
            return group
        group.rmdir()
    return None
