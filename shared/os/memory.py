"""Memory that this process may use: the machine's, within the limits of its control groups.

A container's limit is that of a control group. Groups nest, and a process is ended when any group
above it is full, so that the group with the least room counts. Owns no memory; starts no process.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import psutil

GROUPS_FOLDER = Path("/sys/fs/cgroup")
"""Where Linux shows control groups, of version 1, 2 or both."""

MEMBERSHIP_FILE = Path("/proc/self/cgroup")
"""The groups of this process."""

_Files = tuple[str, tuple[str, ...], str]

_VERSION_1: _Files = ("memory.usage_in_bytes", ("memory.limit_in_bytes",), "total_")
_VERSION_2: _Files = ("memory.current", ("memory.max", "memory.high"), "")
"""File with the bytes in use, files with limits, and the prefix of the names in `memory.stat`."""

_FILE_PAGES = ("active_file", "inactive_file")
"""Pages of files, such as weights that were read: the system gives them back when memory is
needed."""


@dataclasses.dataclass(frozen=True, slots=True)
class UsableMemory:
    """Bytes that one process may use, of the machine and within its control groups."""

    total_bytes: int
    """Including memory in use now."""
    free_bytes: int
    """Not in use, by this process or others."""
    limited_by: str = ""
    """The control group whose limit allows less than the machine has; "": none does."""


def usable_memory(
    sharers: int = 1,
    machine_share: float = 0.0,
    *,
    groups_folder: Path | None = None,
    membership_file: Path | None = None,
) -> UsableMemory:
    """Return the memory that one of several equal processes on this machine may use.

    Args:
        sharers: how many such processes share the machine and the control groups, in equal parts.
        machine_share: part of the machine's memory for this process, where processes in groups of
            their own share it; 0: equal parts. A group's limit is divided by `sharers` only.
        groups_folder: where control groups are mounted; None: where Linux has them.
        membership_file: file with the groups of this process; None: where Linux has it.
    """
    machine = psutil.virtual_memory()
    sharers = max(1, sharers)
    share = machine_share or 1.0 / sharers
    found = UsableMemory(int(machine.total * share), int(machine.available * share))
    folders = _group_folders(groups_folder or GROUPS_FOLDER, membership_file or MEMBERSHIP_FILE)
    for folder in folders:
        limit, used = _limit_and_use(folder)
        if limit is None or limit >= machine.total:
            continue
        total = limit // sharers
        free = max(0, limit - used) // sharers
        found = UsableMemory(
            min(found.total_bytes, total),
            min(found.free_bytes, free),
            str(folder) if total < found.total_bytes else found.limited_by,
        )
    return found


def _group_folders(groups_folder: Path, membership_file: Path) -> Iterator[Path]:
    """Yield the folders of the groups that count this process's memory, from its own up."""
    try:
        lines = membership_file.read_text().splitlines()
    except OSError:
        return
    paths = {controllers: path for _, controllers, path in (one.split(":", 2) for one in lines)}
    version_1 = [path for names, path in paths.items() if "memory" in names.split(",")]
    if version_1:
        base, path = groups_folder / "memory", version_1[0]
    else:
        base, path = groups_folder, paths.get("", "/")
        if not (base / "cgroup.procs").exists() and (base / "unified").is_dir():
            base /= "unified"
    # A container may see its group as the root and still be told the path outside.
    names = [name for name in path.split("/") if name not in ("", "..")]
    for depth in range(len(names), -1, -1):
        yield base.joinpath(*names[:depth])


def _limit_and_use(folder: Path) -> tuple[int | None, int]:
    """Return a group's limit in bytes, None without one, and the bytes it cannot give back."""
    use_file, limit_files, prefix = _VERSION_2
    if not (folder / use_file).exists():
        use_file, limit_files, prefix = _VERSION_1
    limits = [size for name in limit_files if (size := _read_number(folder / name)) is not None]
    statistics = _read_statistics(folder / "memory.stat")
    # Version 1 reports the smallest limit up the tree, also of groups that a container cannot see.
    if prefix and "hierarchical_memory_limit" in statistics:
        limits.append(statistics["hierarchical_memory_limit"])
    if not limits:
        return None, 0
    used = _read_number(folder / use_file) or 0
    reclaimable = sum(statistics.get(prefix + name, 0) for name in _FILE_PAGES)
    return min(limits), max(0, used - reclaimable)


def _read_number(file: Path) -> int | None:
    """Return the number in a file; None for "max" and where the file cannot be read."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _read_statistics(file: Path) -> dict[str, int]:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
