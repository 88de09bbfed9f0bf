"""Durations of steps and requests. Owns their counts by range since the scheduler's start. Pure."""

import bisect

from shared import limits
from shared.messages import DurationCounts
from shared.messages.telemetry.durations import BOUNDS_S, DurationName


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
        counts = self._counts.get(key)
        if counts is None:
            counts = self._counts[key] = [0] * (len(bounds) + 1)
            self._sums_s[key] = 0.0
        counts[bisect.bisect_left(bounds, seconds)] += 1
        self._sums_s[key] = add_seconds(self._sums_s[key], seconds)

    def report(self) -> list[DurationCounts]:
        """Return all counts."""
        return [
            DurationCounts(
                name=name, label=label, counts=list(counts), sum_s=self._sums_s[name, label]
            )
            for (name, label), counts in self._counts.items()
        ]


def add_seconds(total_s: float, more_s: float) -> float:
    """Return a sum of durations that fits a message, even if a rank reports nonsense."""
    return min(limits.SECONDS_MAX, total_s + max(0.0, more_s))


def add_counts(total: int, more: int) -> int:
    """Return a sum of counts that fits a message, as `add_seconds`."""
    return min(limits.COUNT_MAX, total + more)
