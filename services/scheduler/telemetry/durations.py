"""Durations of steps and requests. Owns their counts by range since the scheduler's start. Pure."""

import bisect

from shared.messages import DurationCounts
from shared.messages.durations import BOUNDS_S, DurationName


class Durations:
    """Counts durations by name, label and range."""

    def __init__(self) -> None:
        self._counts: dict[tuple[DurationName, str], list[int]] = {}
        self._sums_s: dict[tuple[DurationName, str], float] = {}

    def observe(self, name: DurationName, seconds: float, label: str = "") -> None:
        """Count a duration.

        Args:
            name: kind of duration.
            seconds: the duration.
            label: the kind of step, "" for requests.
        """
        key, bounds = (name, label), BOUNDS_S[name]
        counts = self._counts.setdefault(key, [0] * (len(bounds) + 1))
        counts[bisect.bisect_left(bounds, seconds)] += 1
        self._sums_s[key] = self._sums_s.get(key, 0.0) + max(0.0, seconds)

    def report(self) -> list[DurationCounts]:
        """Return all counts."""
        return [
            DurationCounts(
                name=name, label=label, counts=list(counts), sum_s=self._sums_s[name, label]
            )
            for (name, label), counts in self._counts.items()
        ]
