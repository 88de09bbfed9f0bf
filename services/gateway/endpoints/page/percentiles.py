"""Percentiles of durations in the last seconds, from counts by range. Pure."""

import itertools
from collections import deque

from services.gateway.metrics.gateway import Histogram

WINDOW_S = 15.0
"""Durations of this time are considered."""
PERCENTS = (50, 90, 99)


class RecentPercentiles:
    """Percentiles of what a histogram has counted lately; it must be observed again and again."""

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._snapshots: deque[tuple[float, list[int]]] = deque()
        """Time and counts, oldest first."""

    def observe(self, now_s: float) -> list[float] | None:
        """Return the percentiles `PERCENTS` in seconds; None without durations.

        Args:
            now_s: the monotonic time in seconds, later than at the last call.
        """
        counts = self._histogram.counts
        self._snapshots.append((now_s, counts))
        while len(self._snapshots) > 2 and now_s - self._snapshots[1][0] >= WINDOW_S:
            self._snapshots.popleft()
        oldest = self._snapshots[0][1]
        recent = [now - before for now, before in zip(counts, oldest, strict=True)]
        if not sum(recent):
            return None
        return [percentile(recent, self._histogram.bounds_s, one / 100.0) for one in PERCENTS]


def percentile(counts: list[int], bounds_s: tuple[float, ...], share: float) -> float:
    """Return the duration in seconds below which this share of all durations is.

    Within a range, durations count as evenly distributed, as in Prometheus' histogram_quantile.

    Args:
        counts: durations by range; one more than there are bounds, and at least one in all.
        bounds_s: ascending upper bounds of the ranges.
        share: from 0 to 1.
    """
    wanted = share * sum(counts)
    place = next(
        number for number, total in enumerate(itertools.accumulate(counts)) if total >= wanted > 0
    )
    if place == len(bounds_s):
        # The last range has no upper bound.
        return bounds_s[-1]
    lower_s = bounds_s[place - 1] if place else 0.0
    before = sum(counts[:place])
    return lower_s + (bounds_s[place] - lower_s) * (wanted - before) / counts[place]
