"""How evenly the work of routed experts falls on ranks and experts. Pure.

A load is a number of assignments: pairs of a token and an expert that it is routed to. Ranks sum
the results of each layer of experts, so all of them wait for the busiest rank of each layer.
"""

import itertools
from collections.abc import Iterable, Sequence

from shared.messages import ExpertRange
from shared.model.sharding.shares import item_range


def rank_imbalance(layers: Sequence[Sequence[float]]) -> float:
    """Return the loads of each layer's busiest rank over the mean loads of ranks, both summed.

    Args:
        layers: of each layer the load of each rank that holds a part of its experts.

    Returns:
        1 where all ranks have the same load in every layer, at most the number of ranks; 1 without
        any load.
    """
    mean = sum(sum(one) / len(one) for one in layers if one)
    return sum(max(one) for one in layers if one) / mean if mean else 1.0


def expert_imbalance(counts: Sequence[int]) -> float:
    """Return the load of a layer's busiest expert over the mean of its experts; 1 without load.

    Args:
        counts: load of each expert of one layer.
    """
    total = sum(counts)
    return max(counts) * len(counts) / total if total else 1.0


def loads_by_rank(counts: Sequence[int], shares: Sequence[int]) -> list[int]:
    """Return each rank's load in one layer.

    Args:
        counts: load of each expert.
        shares: number of experts by rank; rank 0 has the first ones.
    """
    ranges = (item_range(shares, rank) for rank in range(len(shares)))
    return [sum(counts[start:stop]) for start, stop in ranges]


def loads_of_ranges(counts: Sequence[int], ranges: Iterable[ExpertRange]) -> list[int]:
    """Return the load of each range of experts in one layer.

    Args:
        counts: load of each expert.
        ranges: which experts ranks hold; they may overlap.
    """
    return [sum(counts[one.first : one.first + one.count]) for one in ranges]


def balance(
    layers: Sequence[Sequence[int]], shares: Sequence[int], most: Sequence[int]
) -> list[int]:
    """Return numbers of experts by rank with a lower imbalance, the same in all layers.

    Every rank holds adjacent experts. Each border between two ranks is moved to its best place in
    turn until no move helps, so the result is never worse than `shares`; with two ranks it is the
    best one.

    Args:
        layers: load of each expert, by layer; all layers have the same number of experts.
        shares: number of experts by rank to begin with, at least 1 each.
        most: the most experts that each rank can hold; `shares` has no more.
    """
    sums = [[0, *itertools.accumulate(counts)] for counts in layers]
    borders = [0, *itertools.accumulate(shares)]

    def cost(number: int, place: int) -> int:
        """Return the busiest rank's loads over all layers, with one border at another place."""
        moved = [*borders[:number], place, *borders[number + 1 :]]
        pairs = list(itertools.pairwise(moved))
        return sum(max(one[stop] - one[start] for start, stop in pairs) for one in sums)

    improves = True
    while improves:
        improves = False
        for number in range(1, len(shares)):
            before, after = borders[number - 1], borders[number + 1]
            first = max(before + 1, after - most[number])
            last = min(after - 1, before + most[number - 1])
            # Of equally good places the present one.
            best = min(
                range(first, last + 1),
                key=lambda place: (cost(number, place), place != borders[number]),
            )
            if best != borders[number]:
                borders[number] = best
                improves = True
    return [stop - start for start, stop in itertools.pairwise(borders)]
