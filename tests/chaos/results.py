"""Results of a run: one row per kind of fault, rendered as a table."""

import dataclasses
from collections.abc import Sequence

from tests.chaos.load.stream_records import Tally

_HEADER = (
    "fault", "count", "streams", "lost", "refused", "differ", "dup/missing", "pause s",
    "allowed s", "load s", "1st token s", "recovered s", "expected", "verdict",
)  # fmt: skip


@dataclasses.dataclass(slots=True)
class FaultResult:
    """Streams, pauses and problems of one kind of fault."""

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
    """Allowed pause of the fault with the longest pause."""
    load_s: float = 0.0
    """Longest time in seconds from the start of the ranks to a ready world."""
    first_token_s: float = 0.0
    recovered_s: float = 0.0
    """Longest time in seconds from a fault until all streams continued."""
    may_lose: bool = False
    may_refuse: bool = False
    figures: dict[str, float] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)

    def add_tally(self, tally: Tally) -> None:
        """Add the counts of streams."""
        self.streams += tally.complete + tally.lost
        self.lost += tally.lost
        self.refused += tally.refused
        self.differing += tally.differing
        self.wrong_tokens += tally.wrong_tokens
        is_bad = tally.differing or (tally.lost and not self.may_lose)
        if is_bad or (tally.refused and not self.may_refuse):
            self.problems += tally.examples

    def merge(self, other: "FaultResult") -> None:
        """Add the results of more faults of the same kind."""
        for name in ("count", "streams", "lost", "refused", "differing", "wrong_tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.pause_s >= self.pause_s:
            self.pause_s, self.pause_max_s = other.pause_s, other.pause_max_s
        for name in ("load_s", "first_token_s", "recovered_s"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        for name, value in other.figures.items():
            self.figures[name] = max(value, self.figures.get(name, value))
        self.problems += other.problems

    def add_pause(self, pause_s: float, allowed_s: float, load_s: float) -> None:
        """Add the longest pause of one fault and the pause allowed for it."""
        if pause_s > allowed_s:
            self.problems.append(f"pause of {pause_s:.2f} s, allowed are {allowed_s:.2f} s")
        if pause_s >= self.pause_s:
            self.pause_s, self.pause_max_s = pause_s, allowed_s
        self.load_s = max(self.load_s, load_s)

    @property
    def is_good(self) -> bool:
        """Whether all expectations hold."""
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
            f"{self.lost}{' (allowed)' if self.lost and self.may_lose else ''}",
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


def render(rows: Sequence[FaultResult]) -> str:
    """Return the table, followed by further measurements and all problems."""
    cells = [_HEADER, *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEADER))]
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
