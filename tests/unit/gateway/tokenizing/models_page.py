"""The table of docs/reference/models.md, for the tests that compare it with the code."""

from pathlib import Path

FILE = Path(__file__).resolve().parents[4] / "docs" / "reference" / "models.md"


def rows() -> list[dict[str, str]]:
    """Return the rows of the table of families as cells by the names of their columns."""
    lines = [line for line in FILE.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    end = next(index for index, line in enumerate(lines) if "claim" in line)
    names, _, *table = [_cells(line) for line in lines[:end]]
    return [dict(zip(names, cells, strict=True)) for cells in table]


def _cells(line: str) -> list[str]:
    return [cell.strip().replace("`", "") for cell in line.strip().strip("|").split("|")]
