"""Imbalance of experts' loads, and shares that lower it, against a search of all shares."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.measurements.expert_balance import (
    balance,
    expert_imbalance,
    loads_by_rank,
    rank_imbalance,
)


def _imbalance(layers: list[list[int]], shares: list[int]) -> float:
    return rank_imbalance([loads_by_rank(counts, shares) for counts in layers])


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([[50, 50]], 1.0),
        ([[100, 0]], 2.0),
        # In each layer the ranks wait for another rank, so equal sums are no balance.
        ([[90, 10], [10, 90]], 1.8),
        ([[30, 60, 30], [0, 0, 0]], 1.5),
        ([[7]], 1.0),
        ([], 1.0),
    ],
)
def test_rank_imbalance_is_busiest_load_over_mean(layers: list[list[int]], expected: float) -> None:
    """Layers are summed, because each waits for its own busiest rank."""
    assert rank_imbalance(layers) == pytest.approx(expected)


def test_expert_imbalance_is_busiest_expert_over_mean() -> None:
    """A layer without load is balanced."""
    assert expert_imbalance([1, 1, 6, 0]) == 3.0
    assert expert_imbalance([0, 0]) == 1.0


_LAYERS = st.integers(4, 9).flatmap(
    lambda count: st.lists(
        st.lists(st.integers(0, 50), min_size=count, max_size=count), min_size=1, max_size=3
    )
)


@given(_LAYERS, st.data())
def test_balance_of_two_ranks_is_best_of_all_borders(
    layers: list[list[int]], data: st.DataObject
) -> None:
    """Within the memory of the ranks, no other border has a lower imbalance."""
    count = len(layers[0])
    first = data.draw(st.integers(1, count - 1))
    most = [data.draw(st.integers(one, count)) for one in (first, count - first)]
    possible = [
        [one, count - one] for one in range(1, count) if one <= most[0] and count - one <= most[1]
    ]
    found = balance(layers, [first, count - first], most)
    assert found in possible
    assert _imbalance(layers, found) == min(_imbalance(layers, one) for one in possible)


@given(_LAYERS, st.data())
def test_balance_of_several_ranks_is_possible_and_never_worse(
    layers: list[list[int]], data: st.DataObject
) -> None:
    """Every expert has a place, no rank is without one, and no rank has too many."""
    count = len(layers[0])
    borders = sorted(
        data.draw(st.lists(st.integers(1, count - 1), min_size=2, max_size=2, unique=True))
    )
    shares = [stop - start for start, stop in itertools.pairwise([0, *borders, count])]
    most = [data.draw(st.integers(one, count)) for one in shares]
    found = balance(layers, shares, most)
    assert sum(found) == count
    assert all(1 <= one <= limit for one, limit in zip(found, most, strict=True))
    assert _imbalance(layers, found) <= _imbalance(layers, shares)
