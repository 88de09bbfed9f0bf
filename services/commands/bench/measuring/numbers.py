"""Medians, ranges, percentiles and pair-by-pair ratios. No I/O, no processes."""

import itertools
import math
import statistics
from collections.abc import Sequence

from msgspec import Struct


class Spread(Struct, frozen=True, kw_only=True):
    """What repeats of one measurement gave."""

    median: float
    low: float
    high: float
    values: list[float]
    """One per repeat, in order of time."""


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` (0 to 1) of the values do not exceed (nearest rank).

    Raises:
        ValueError: there are no values, or the share is no share.
    """
    if not values:
        raise ValueError("no values")
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"{share} is not between 0 and 1")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def spread(values: Sequence[float]) -> Spread:
    """Return median and range of the repeats.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("no values")
    return Spread(
        median=statistics.median(values), low=min(values), high=max(values), values=list(values)
    )


def pair_ratios(measured: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Divide each repeat by the repeat of the reference that ran beside it.

    Raises:
        ValueError: the two do not have the same number of repeats.
    """
    if len(measured) != len(reference):
        raise ValueError(f"{len(measured)} repeats against {len(reference)}")
    return [one / other for one, other in zip(measured, reference, strict=True)]


def differences(values: Sequence[float]) -> list[float]:
    """Return the steps between neighbours."""
    return [after - before for before, after in itertools.pairwise(values)]
