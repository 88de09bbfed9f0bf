"""Draft statistics as one line per method for people. Pure."""

from collections.abc import Sequence

from shared.messages import DraftStatistics

_POSITIONS_SHOWN = 8
"""Later positions are seldom reached."""


def describe(statistics: Sequence[DraftStatistics]) -> list[str]:
    """Return a line for each method whose drafts were verified."""
    return [_line(one) for one in statistics if one.rows and one.proposed]


def _line(one: DraftStatistics) -> str:
    positions = zip(one.proposed_at, one.accepted_at, strict=True)
    shares = [f"{100 * accepted / proposed:.0f}" for proposed, accepted in positions if proposed]
    return (
        f"{one.method}: {one.proposed:,} proposed, {one.accepted:,} accepted "
        f"({one.accepted / one.proposed:.0%}; by position "
        f"{' '.join(shares[:_POSITIONS_SHOWN])} %), "
        f"{one.accepted / one.rows + 1:.2f} tokens per step"
    )
