"""How many experts or layers each rank gets. Equal on all ranks: it follows from equal numbers.

No MLX.
"""

import itertools
from collections.abc import Sequence

ALIKE = 0.9
"""Ranks of which the poorest has this part of the richest one's memory get equal shares: what a
host reports as free changes from start to start, and another split would find no block again."""


def weights_of(memory_bytes: Sequence[int], world_size: int) -> list[int]:
    """Return how much each rank takes compared with the others.

    Args:
        memory_bytes: of each rank; empty: unknown.
        world_size: how many ranks there are.

    Returns:
        One positive number per rank; all 1 where shares are to be equal.
    """
    if len(memory_bytes) != world_size or min(memory_bytes) >= ALIKE * max(memory_bytes):
        return [1] * world_size
    return [max(1, one) for one in memory_bytes]


def divide(count: int, weights: Sequence[int]) -> list[int]:
    """Divide `count` equal things in proportion to weights; everybody gets at least one.

    The largest remainders get what is left over, of equal ones those of low rank.

    Raises:
        ValueError: there are fewer things than ranks.
    """
    size = len(weights)
    if count < size:
        raise ValueError(f"{count} cannot be divided between {size} ranks")
    total = sum(weights)
    # In whole numbers: floating point may round differently on different machines.
    shares = [count * weight // total for weight in weights]
    order = sorted(range(size), key=lambda rank: (-(count * weights[rank] % total), rank))
    for rank in order[: count - sum(shares)]:
        shares[rank] += 1
    for rank, share in enumerate(shares):
        if share == 0:
            richest = max(range(size), key=lambda one: (shares[one], -weights[one]))
            shares[richest] -= 1
            shares[rank] = 1
    return shares


def divide_layers(sizes: Sequence[int], weights: Sequence[int]) -> list[int]:
    """Divide consecutive layers in proportion to weights; everybody gets at least one.

    The last rank computes first: it gets the first layers.

    Args:
        sizes: of each layer, first to last, in any unit.
        weights: of each rank.

    Returns:
        Number of layers by rank.

    Raises:
        ValueError: there are fewer layers than ranks.
    """
    count, size = len(sizes), len(weights)
    if count < size:
        raise ValueError(f"{count} layers cannot be divided between {size} ranks")
    if len(set(sizes)) == 1:
        return divide(count, weights)
    before = [0, *itertools.accumulate(sizes)]
    shares = []
    start = 0
    taken = 0
    for stage, weight in enumerate(reversed(weights)):
        taken += weight
        latest = count - (size - stage - 1)
        # The cut that comes closest to this part of the whole, and of two such the first.
        stop = min(
            range(start + 1, latest + 1),
            key=lambda cut: abs(before[cut] * sum(weights) - before[-1] * taken),
        )
        shares.append(stop - start if stage < size - 1 else count - start)
        start = stop
    return shares[::-1]


def span(shares: Sequence[int], rank: int) -> tuple[int, int]:
    """Return the half-open range of a rank whose share begins where the ranks before it end."""
    start = sum(shares[:rank])
    return start, start + shares[rank]
