"""Percentiles from counts by range, against the durations themselves."""

import random

import pytest

from services.gateway.endpoints.page.percentiles import WINDOW_S, RecentPercentiles, percentile
from services.gateway.metrics.gateway import Histogram

BOUNDS_S = tuple(0.01 * one for one in range(1, 101))


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_percentile_of_many_durations_is_theirs_within_one_range(share: float) -> None:
    """The ranges are 10 ms wide."""
    choice = random.Random(5)
    durations = sorted(choice.gammavariate(2.0, 0.08) for _ in range(2_000))
    histogram = Histogram(BOUNDS_S)
    for one in durations:
        histogram.observe(one)
    true = durations[int(share * len(durations))]
    assert percentile(histogram.counts, BOUNDS_S, share) == pytest.approx(true, abs=0.011)


def test_percentile_beyond_last_bound_is_last_bound() -> None:
    """The last range has no end."""
    assert percentile([0, 0, 3], (1.0, 2.0), 0.5) == 2.0


def test_recent_percentiles_forget_what_is_older_than_their_window() -> None:
    """Slow tokens of long ago do not make the present look slow."""
    histogram = Histogram(BOUNDS_S)
    recent = RecentPercentiles(histogram)
    assert recent.observe(0.0) is None
    for _ in range(50):
        histogram.observe(0.9)
    slow = recent.observe(1.0)
    assert slow is not None
    assert slow[0] == pytest.approx(0.9, abs=0.011)
    for second in range(2, 2 + int(WINDOW_S) + 2):
        histogram.observe(0.05)
        found = recent.observe(float(second))
    assert found is not None
    assert found[2] == pytest.approx(0.05, abs=0.011)
