"""Statistics of measurements: medians, ranges, percentiles, ratios, latencies. No I/O."""

import itertools
import math
import statistics
from collections.abc import Sequence

from msgspec import Struct


class Spread(Struct, frozen=True, kw_only=True):
    """Median, minimum (`low`) and maximum (`high`) of one metric over the repeats."""

    median: float
    low: float
    high: float
    values: list[float]
    """One per repeat, in order of time."""


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of all values do not exceed (nearest rank).

    Args:
        values: in any order.
        share: fraction from 0 (the minimum) to 1 (the maximum); 0.95 is the 95th percentile.

    Raises:
        ValueError: when `values` is empty or `share` is outside 0 to 1.
    """
    if not values:
        raise ValueError("no values")
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"{share} is not between 0 and 1")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def spread(values: Sequence[float]) -> Spread:
    """Return median, minimum and maximum of a metric.

    Args:
        values: one value per repeat, in order of time.

    Raises:
        ValueError: when there are no values.
    """
    if not values:
        raise ValueError("no values")
    return Spread(
        median=statistics.median(values), low=min(values), high=max(values), values=list(values)
    )


def differences(values: Sequence[float]) -> list[float]:
    """Return each value, from the second on, minus the value before it."""
    return [after - before for before, after in itertools.pairwise(values)]


def latencies(requests: Sequence[tuple[float, Sequence[float]]], wall_s: float) -> dict[str, float]:
    """Return time to first token, time between tokens and decode rate over all requests.

    Args:
        requests: per request the time it was sent and the times its tokens arrived, in seconds.
        wall_s: seconds from the first request sent to the last token.

    Returns:
        wall_s; ttft_p50_ms and ttft_p95_ms: median and 95th percentile of the time to first token;
        itl_p50_ms and itl_p95_ms: the same of the time between two tokens, over the tokens of all
        requests; decode_tokens_per_s: mean rate of one stream after its first token. Metrics
        without any value, such as the time between tokens of one-token completions, are absent.
    """
    first_ms = [(arrived[0] - sent) * 1_000 for sent, arrived in requests if arrived]
    between_ms = [gap * 1_000 for _, arrived in requests for gap in differences(arrived)]
    metrics = {"wall_s": wall_s}
    if first_ms:
        metrics["ttft_p50_ms"] = percentile(first_ms, 0.5)
        metrics["ttft_p95_ms"] = percentile(first_ms, 0.95)
    decoding_s = sum(arrived[-1] - arrived[0] for _, arrived in requests if arrived)
    if between_ms and decoding_s > 0.0:
        # The rate of one stream, not of all streams together.
        metrics["decode_tokens_per_s"] = len(between_ms) / decoding_s
    if between_ms:
        metrics["itl_p50_ms"] = percentile(between_ms, 0.5)
        metrics["itl_p95_ms"] = percentile(between_ms, 0.95)
    return metrics
