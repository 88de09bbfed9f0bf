"""Shares of experts or layers by rank. Equal inputs give equal shares on every rank. No MLX."""

import dataclasses
import itertools
from collections.abc import Sequence

from shared.messages.base import Sharding
from shared.messages.rank_link import JoinWorld, VocabularySplit

EQUAL_SHARES_RATIO = 0.9
"""Ranks get equal shares if the smallest memory is at least this part of the largest. The free
memory of a host varies between starts, and another split would make all stored blocks useless."""

DIVIDES_MATRICES = frozenset({"tensor", "tensor+expert"})
"""Ways of sharding in which each rank has a part of the matrices and heads of every layer."""
DIVIDES_EXPERTS = frozenset({"expert", "tensor+expert"})
"""Ways of sharding in which each rank has whole matrices of some routed experts."""

HEAD_BYTES_MIN = 64 << 20
"""Size in memory from which `world.split_vocabulary = "auto"` divides a head. Reading a small one
takes about as long as the exchanges that a divided one needs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """One rank's place in a split model. All fields but `rank` are equal on all ranks."""

    sharding: Sharding
    """How the model is split; "none" with one rank."""
    rank: int
    world_size: int
    memory_bytes: Sequence[int] = ()
    """Memory that each rank may use, by rank; empty: equal shares."""
    expert_shares: Sequence[int] = ()
    """Relative number of routed experts of each rank; empty: in proportion to memory."""
    vocabulary: VocabularySplit = "off"
    """Which matrices are divided by token ids; "off" in a pipeline."""

    @classmethod
    def of(cls, order: JoinWorld) -> "Split":
        """Return the split that the scheduler orders a rank to load."""
        return cls(
            order.sharding,
            order.rank,
            order.world_size,
            order.memory_bytes,
            order.expert_shares,
            order.vocabulary,
        )

    def expert_weights(self) -> Sequence[int]:
        """Return the relative number of routed experts of each rank."""
        return self.expert_shares or rank_weights(self.memory_bytes, self.world_size)


def rank_weights(memory_bytes: Sequence[int], world_size: int) -> list[int]:
    """Return the relative size of each rank's share of the model, in proportion to its memory.

    Args:
        memory_bytes: memory of each rank; empty: unknown.
        world_size: number of ranks.

    Returns:
        One positive number per rank. All are 1 if a memory is unknown or the smallest is at least
        EQUAL_SHARES_RATIO of the largest.
    """
    is_known = len(memory_bytes) == world_size
    if not is_known or min(memory_bytes) >= EQUAL_SHARES_RATIO * max(memory_bytes):
        return [1] * world_size
    return [max(1, one) for one in memory_bytes]


def divide(count: int, weights: Sequence[int]) -> list[int]:
    """Divide `count` equal items in proportion to the weights, at least one for each rank.

    Uses the largest remainder method; of equal remainders the lower rank's is rounded up.

    Args:
        count: number of items, such as experts or layers.
        weights: weight of each rank, by rank.

    Returns:
        Number of items by rank.

    Raises:
        ValueError: when there are fewer items than ranks.
    """
    size = len(weights)
    if count < size:
        raise ValueError(f"{count} cannot be divided between {size} ranks")
    total = sum(weights)
    # Integers only: floating point may round differently on different machines.
    shares = [count * weight // total for weight in weights]
    by_remainder = sorted(range(size), key=lambda rank: (-(count * weights[rank] % total), rank))
    for rank in by_remainder[: count - sum(shares)]:
        shares[rank] += 1
    for rank, share in enumerate(shares):
        if share == 0:
            richest = max(range(size), key=lambda one: (shares[one], -weights[one]))
            shares[richest] -= 1
            shares[rank] = 1
    return shares


def divide_layers(sizes: Sequence[int], weights: Sequence[int]) -> list[int]:
    """Divide consecutive layers in proportion to the weights, at least one for each rank.

    The last rank computes first, so it gets the first layers.

    Args:
        sizes: size of each layer, first to last, in any unit.
        weights: weight of each rank.

    Returns:
        Number of layers by rank.

    Raises:
        ValueError: when there are fewer layers than ranks.
    """
    count, size = len(sizes), len(weights)
    if count < size:
        raise ValueError(f"{count} layers cannot be divided between {size} ranks")
    if len(set(sizes)) == 1:
        return divide(count, weights)
    cumulative = [0, *itertools.accumulate(sizes)]
    shares = []
    start = 0
    weight_so_far = 0
    for stage, weight in enumerate(reversed(weights)):
        weight_so_far += weight
        latest = count - (size - stage - 1)
        # The cut closest to this part of the total size; of two equally close, the first.
        stop = min(
            range(start + 1, latest + 1),
            key=lambda cut: abs(cumulative[cut] * sum(weights) - cumulative[-1] * weight_so_far),
        )
        shares.append(stop - start if stage < size - 1 else count - start)
        start = stop
    return shares[::-1]


def item_range(shares: Sequence[int], rank: int) -> tuple[int, int]:
    """Return which items a rank gets, as (start, stop) without `stop`.

    Args:
        shares: number of items by rank. Rank 0 has the first ones.
        rank: the rank.
    """
    start = sum(shares[:rank])
    return start, start + shares[rank]
