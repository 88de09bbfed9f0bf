"""The result of a run: one row per fault, as a table for people and as JSON for machines."""

import dataclasses
from collections.abc import Sequence

from tests.chaos.records import Tally

_HEAD = (
    "fault", "count", "streams", "lost", "refused", "differ", "dup/missing", "pause s",
    "allowed s", "load s", "1st token s", "recovered s", "expected", "verdict",
)  # fmt: skip


@dataclasses.dataclass(slots=True)
class Row:
    """What one kind of fault has shown."""

    fault: str
    expected: str
    count: int = 0
    streams: int = 0
    lost: int = 0
    refused: int = 0
    differing: int = 0
    wrong_tokens: int = 0
    pause_s: float = 0.0
    pause_max_s: float = 0.0
    """What was allowed when it was so long."""
    load_s: float = 0.0
    """Longest time that the ranks took from their start to a world that is ready."""
    first_token_s: float = 0.0
    recovered_s: float = 0.0
    """Longest time from a fault until every stream went on."""
    may_lose: bool = False
    may_refuse: bool = False
    figures: dict[str, float] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)

    def take(self, tally: Tally) -> None:
        """Add what the streams have shown."""
        self.streams += tally.complete + tally.lost
        self.lost += tally.lost
        self.refused += tally.refused
        self.differing += tally.differing
        self.wrong_tokens += tally.wrong_tokens
        is_bad = tally.differing or (tally.lost and not self.may_lose)
        if is_bad or (tally.refused and not self.may_refuse):
            self.problems += tally.examples

    def add(self, other: "Row") -> None:
        """Add what the same fault has shown another time."""
        for name in ("count", "streams", "lost", "refused", "differing", "wrong_tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.pause_s >= self.pause_s:
            self.pause_s, self.pause_max_s = other.pause_s, other.pause_max_s
        for name in ("load_s", "first_token_s", "recovered_s"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        for name, value in other.figures.items():
            self.figures[name] = max(value, self.figures.get(name, value))
        self.problems += other.problems

    def take_pause(self, pause_s: float, allowed_s: float, load_s: float) -> None:
        """Add the longest pause of one fault, and what was allowed then."""
        if pause_s > allowed_s:
            self.problems.append(f"paused {pause_s:.2f} s, allowed are {allowed_s:.2f} s")
        if pause_s >= self.pause_s:
            self.pause_s, self.pause_max_s = pause_s, allowed_s
        self.load_s = max(self.load_s, load_s)

    @property
    def is_good(self) -> bool:
        """Whether nothing happened that must not happen."""
        return not (
            self.problems
            or (self.lost and not self.may_lose)
            or (self.refused and not self.may_refuse)
            or self.differing
            or self.wrong_tokens
        )

    def cells(self) -> tuple[str, ...]:
        """Return the row as text."""
        allowed = f"{self.pause_max_s:.1f}"
        return (
            self.fault,
            str(self.count),
            str(self.streams),
            f"{self.lost}{' (by nature)' if self.lost and self.may_lose else ''}",
            str(self.refused),
            str(self.differing),
            str(self.wrong_tokens),
            f"{self.pause_s:.2f}",
            allowed,
            f"{self.load_s:.2f}",
            f"{self.first_token_s:.2f}",
            f"{self.recovered_s:.2f}",
            self.expected,
            "good" if self.is_good else "BAD",
        )


def render(rows: Sequence[Row]) -> str:
    """Return the table, and below it what went wrong and what else was measured."""
    cells = [_HEAD, *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEAD))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]
    for row in rows:
        if row.figures:
            shown = ", ".join(f"{name} {value:g}" for name, value in _rounded(row.figures))
            lines.append(f"{row.fault}: {shown}")
        lines += [f"{row.fault}: PROBLEM: {problem}" for problem in row.problems]
    return "\n".join(lines)


def _rounded(figures: dict[str, float]) -> list[tuple[str, float]]:
    return [(name, round(value, 2)) for name, value in figures.items()]
