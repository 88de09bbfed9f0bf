"""Medians, percentiles and ratios."""

import pytest

from services.commands.bench.measuring import numbers


def test_percentile_is_a_value_that_was_measured() -> None:
    """Nearest rank: p50 and p95 of 1..20 are 10 and 19, never something in between."""
    values = [float(value) for value in range(20, 0, -1)]
    assert numbers.percentile(values, 0.5) == 10.0
    assert numbers.percentile(values, 0.95) == 19.0
    assert numbers.percentile(values, 0.0) == 1.0
    assert numbers.percentile(values, 1.0) == 20.0
    assert numbers.percentile([3.0], 0.99) == 3.0


@pytest.mark.parametrize(("values", "share"), [([], 0.5), ([1.0], 1.5), ([1.0], -0.1)])
def test_percentile_refuses_nonsense(values: list[float], share: float) -> None:
    """No values and shares outside 0 to 1 are errors, not zeros."""
    with pytest.raises(ValueError, match=r"no values|between"):
        numbers.percentile(values, share)


def test_spread_keeps_the_order_of_time() -> None:
    """Median and range, and the repeats as they came."""
    found = numbers.spread([3.0, 1.0, 2.0, 10.0])
    assert (found.median, found.low, found.high) == (2.5, 1.0, 10.0)
    assert found.values == [3.0, 1.0, 2.0, 10.0]
    with pytest.raises(ValueError, match="no values"):
        numbers.spread([])


def test_ratios_are_taken_pair_by_pair() -> None:
    """A drift that hits both of a pair leaves the ratio alone."""
    assert numbers.pair_ratios([9.0, 4.5], [10.0, 5.0]) == [0.9, 0.9]
    with pytest.raises(ValueError, match="2 repeats against 1"):
        numbers.pair_ratios([1.0, 2.0], [1.0])


def test_differences() -> None:
    """One fewer than the values."""
    assert numbers.differences([1.0, 1.5, 4.0]) == [0.5, 2.5]
    assert numbers.differences([1.0]) == []
