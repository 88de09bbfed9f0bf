"""Tables of aligned text, counts and sizes in bytes. Pure."""

import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

_COLUMNS_MAX = 100_000
"""Width of a table: nothing is wrapped, so that commands in a cell can be copied."""


def table_lines(
    rows: Sequence[Sequence[str]], *, widths_min: Sequence[int] = (), indent: int = 0
) -> list[str]:
    """Return the lines of a table with aligned columns.

    Args:
        rows: text of each cell, row by row; each row has as many cells as the first.
        widths_min: least width of each of the first columns, in characters.
        indent: spaces before each line.
    """
    table = Table.grid(padding=(0, 2, 0, 0))
    for column in range(len(rows[0]) if rows else 0):
        table.add_column(
            no_wrap=True, min_width=widths_min[column] if column < len(widths_min) else None
        )
    for row in rows:
        table.add_row(*map(Text, row))
    text = io.StringIO()
    Console(file=text, width=_COLUMNS_MAX, color_system=None).print(table)
    return [f"{' ' * indent}{line}".rstrip() for line in text.getvalue().splitlines()]


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, in the plural unless it is 1: "1 record", "2 records"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_bytes(size: float) -> str:
    """Return a number of bytes as text: about three digits in the largest unit, B to TiB."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(size) >= unit:
            number = size / unit
            return f"{number:,.0f} {name}" if abs(number) >= 100 else f"{number:,.1f} {name}"
    return f"{size:,.0f} B"
