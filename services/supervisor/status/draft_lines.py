"""What the scheduler counts of drafts, as one line per method for people. Pure."""

import re
from collections.abc import Mapping

_PART = re.compile(r"drafts_(ngram|draft_model|eagle)_.+_total")
_SHOWN = 8
"""Positions behind these are seldom reached."""


def is_part(name: str) -> bool:
    """Tell whether a counter is told of in such a line."""
    return bool(_PART.fullmatch(name))


def describe(counters: Mapping[str, float]) -> list[str]:
    """Return a line for each method that had drafts verified."""
    methods = sorted({found[1] for name in counters if (found := _PART.fullmatch(name))})
    return [line for method in methods if (line := _line(method, counters))]


def _line(method: str, counters: Mapping[str, float]) -> str:
    def count(what: str) -> float:
        return counters.get(f"drafts_{method}_{what}_total", 0.0)

    rows, proposed, accepted = count("rows"), count("proposed"), count("accepted")
    if not rows or not proposed:
        return ""
    shares = [
        f"{100 * count(f'accepted_at_{place}') / tried:.0f}"
        for place in range(_SHOWN)
        if (tried := count(f"proposed_at_{place}"))
    ]
    return (
        f"{method}: {proposed:,.0f} proposed, {accepted:,.0f} accepted "
        f"({accepted / proposed:.0%}; by position {' '.join(shares)} %), "
        f"{accepted / rows + 1:.2f} tokens per step"
    )
