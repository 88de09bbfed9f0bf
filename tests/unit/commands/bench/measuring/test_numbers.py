"""Medians, percentiles, ratios and latencies of measurements."""

import pytest

from services.commands.bench.measuring import numbers


def test_percentile_is_one_of_the_measured_values() -> None:
    """By nearest rank, p50 and p95 of 1 to 20 are 10 and 19."""
    values = [float(value) for value in range(20, 0, -1)]
    assert numbers.percentile(values, 0.5) == 10.0
    assert numbers.percentile(values, 0.95) == 19.0
    assert numbers.percentile(values, 0.0) == 1.0
    assert numbers.percentile(values, 1.0) == 20.0
    assert numbers.percentile([3.0], 0.99) == 3.0


@pytest.mark.parametrize(("values", "share"), [([], 0.5), ([1.0], 1.5), ([1.0], -0.1)])
def test_percentile_raises_error_without_values_or_with_fraction_outside_0_to_1(
    values: list[float], share: float
) -> None:
    """A percentile needs at least one value and a fraction between 0 and 1."""
    with pytest.raises(ValueError, match=r"no values|between"):
        numbers.percentile(values, share)


def test_spread_reports_median_minimum_maximum_and_values_in_time_order() -> None:
    """No values are an error."""
    found = numbers.spread([3.0, 1.0, 2.0, 10.0])
    assert (found.median, found.low, found.high) == (2.5, 1.0, 10.0)
    assert found.values == [3.0, 1.0, 2.0, 10.0]
    with pytest.raises(ValueError, match="no values"):
        numbers.spread([])


def test_differences_of_measured_values_subtract_each_value_from_the_next() -> None:
    """Each value is subtracted from the next one, so there is one difference fewer than values."""
    assert numbers.differences([1.0, 1.5, 4.0]) == [0.5, 2.5]
    assert numbers.differences([1.0]) == []


def test_latency_percentiles_include_every_request_but_no_gap_between_requests() -> None:
    """Time to first token begins when a request is sent; gaps are counted within requests only."""
    found = numbers.latencies([(0.0, [1.0, 1.5]), (1.0, [1.25, 1.5]), (2.0, [])], wall_s=2.0)
    assert found["ttft_p50_ms"] == 250.0
    assert found["ttft_p95_ms"] == 1_000.0
    assert found["itl_p95_ms"] == 500.0
    assert found["decode_tokens_per_s"] == pytest.approx(2 / 0.75)
    assert "itl_p50_ms" not in numbers.latencies([(0.0, [1.0])], wall_s=1.0)
