"""What a cache store says, as text for people. Pure."""

from collections.abc import Sequence

from services.cache_store.files.check import CheckReport
from shared.messages import StoredFolder, StoreReported

_HEAD = ("namespace", "rank", "records", "size", "used")
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
_AGES = ((86_400.0, "days"), (3_600.0, "h"), (60.0, "min"), (1.0, "s"))


def stats(report: StoreReported, *, is_running: bool) -> str:
    """Return the state of a store as a few lines."""
    used = size(report.bytes_used)
    if is_running:
        state = "on" if report.on else f"off ({report.cause})"
        first = f"The cache store is {state}"
        used += f" of {size(report.bytes_max)}"
    else:
        first = "No cache store runs"
    lines = [
        first,
        f"  directory  {report.directory}",
        f"  used       {used}",
        f"  records    {report.records:,} in {counted(report.namespaces, 'namespace')}",
        f"  index      read in {report.started_s:.2f} s",
    ]
    if report.foreign_files:
        lines.append(
            f"  foreign    {counted(report.foreign_files, 'file')} that are not ours, left alone"
        )
    title = "total"
    for name, value in sorted(report.counters.items()):
        lines.append(f"  {title:<9}  {name} {value:,.0f}")
        title = ""
    return "\n".join(lines)


def listing(folders: Sequence[StoredFolder]) -> str:
    """Return a line per folder, aligned."""
    rows = [_HEAD, *(_row(folder) for folder in folders)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def verification(verified: CheckReport) -> str:
    """Return a line per bad record, then the sum."""
    lines = [f"{one.file} at {one.offset}: {one.detail}" for one in verified.bad]
    good = f"{counted(verified.records, 'record')} ({size(verified.size_bytes)})"
    end = f"{counted(len(verified.bad), 'bad record')}" if verified.bad else "all of them whole"
    return "\n".join([*lines, f"CheckReport {good}: {end}."])


def size(size_bytes: int) -> str:
    """Return bytes in the unit that people would choose."""
    value = float(size_bytes)
    for unit in _UNITS:
        if value < 1_024.0 or unit == _UNITS[-1]:
            break
        value /= 1_024.0
    return f"{size_bytes} bytes" if unit == "bytes" else f"{value:,.1f} {unit}"


def counted(count: int, noun: str) -> str:
    """Return "1 record", "2 records"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _row(folder: StoredFolder) -> tuple[str, ...]:
    return (
        folder.namespace,
        f"{folder.rank} of {folder.world_size}",
        f"{folder.records:,}",
        size(folder.size_bytes),
        _ago(folder.used_s),
    )


def _ago(seconds: float) -> str:
    for unit_s, unit in _AGES:
        if seconds >= 2.0 * unit_s:
            return f"{seconds / unit_s:.0f} {unit} ago"
    return "just now"
