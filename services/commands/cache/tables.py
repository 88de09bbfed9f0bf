"""Text of what a cache store reports. Pure."""

from collections.abc import Sequence

from services.cache_store.files.check import CheckReport
from services.commands.checks.text_table import counted, format_bytes, table_lines
from shared.messages import StoredFolder, StoreReported

_HEADINGS = ("namespace", "rank", "records", "size", "used")
_AGES = ((86_400.0, "days"), (3_600.0, "h"), (60.0, "min"), (1.0, "s"))


def stats(report: StoreReported, *, is_running: bool) -> str:
    """Return the state of a store as text: directory, size, records, counters, one per line.

    Args:
        report: the state.
        is_running: whether a cache store runs; False: the directory was read without one.
    """
    used = format_bytes(report.bytes_used)
    if is_running:
        state = "on" if report.on else f"off ({report.cause})"
        first = f"The cache store is {state}"
        used += f" of {format_bytes(report.bytes_max)}"
    else:
        first = "No cache store runs"
    lines = [
        first,
        f"  directory  {report.directory}",
        f"  used       {used}",
        *([f"  lifetime   {_duration(report.ttl_s)} after the last use"] if report.ttl_s else []),
        f"  records    {report.records:,} in {counted(report.namespaces, 'namespace')}",
        f"  index      read in {report.started_s:.2f} s",
    ]
    if report.documents:
        stored = f"{report.documents:,}, {format_bytes(report.documents_bytes)}"
        if is_running:
            stored += f" of {format_bytes(report.documents_bytes_max)}"
        lines.append(f"  documents  {stored}")
    if report.foreign_files:
        lines.append(
            f"  foreign    {counted(report.foreign_files, 'file')} that Lockstep did not write"
        )
    title = "total"
    for name, value in sorted(report.counters.items()):
        lines.append(f"  {title:<9}  {name} {value:,.0f}")
        title = ""
    return "\n".join(lines)


def listing(folders: Sequence[StoredFolder], running: str = "") -> str:
    """Return a table of records, size and last use, with one line per namespace and rank.

    Args:
        folders: the records of each namespace and rank.
        running: namespace of the world that runs, whose lines say so; "": unknown.
    """
    rows = [_row(folder) for folder in folders]
    if not running:
        return "\n".join(table_lines([_HEADINGS, *rows]))
    serving = ["yes" if folder.namespace == running else "no" for folder in folders]
    marked = [(*row, word) for row, word in zip(rows, serving, strict=True)]
    return "\n".join(table_lines([(*_HEADINGS, "serves"), *marked]))


def check_report(report: CheckReport) -> str:
    """Return the result of a check of all records as text.

    There is one line per damaged record, and a last line with the totals.
    """
    lines = [f"{one.file} at {one.offset}: {one.detail}" for one in report.bad]
    good = f"{counted(report.records, 'record')} ({format_bytes(report.size_bytes)})"
    end = f"{counted(len(report.bad), 'bad record')}" if report.bad else "all are whole"
    return "\n".join([*lines, f"Checked {good}: {end}."])


def _row(folder: StoredFolder) -> tuple[str, ...]:
    return (
        folder.namespace,
        f"{folder.rank} of {folder.world_size}",
        f"{folder.records:,}",
        format_bytes(folder.size_bytes),
        _ago(folder.used_s),
    )


def _ago(seconds: float) -> str:
    return f"{_duration(seconds)} ago" if seconds >= 2.0 else "just now"


def _duration(seconds: float) -> str:
    unit_s, unit = next((one for one in _AGES if seconds >= 2.0 * one[0]), _AGES[-1])
    return f"{seconds / unit_s:.0f} {unit}"
