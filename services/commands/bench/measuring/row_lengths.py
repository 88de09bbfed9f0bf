"""Lengths of the rows that a benchmark decodes together."""

import random
from fractions import Fraction
from math import ceil, floor

from shared.errors import UsageError

SHORTEST_SHARE = Fraction(3, 5)
"""Length of the shortest row, as a part of the longest one's."""


def uneven_lengths(batch: int, context: int) -> list[int]:
    """Return the lengths of rows in tokens, no two of them equal, in no order.

    Args:
        batch: number of rows.
        context: length of the longest row; the shortest is SHORTEST_SHARE of it.

    Raises:
        UsageError: the rows are too many and too short for that.
    """
    spread = floor((1 - SHORTEST_SHARE) * context)
    if spread < batch - 1:
        needed = ceil((batch - 1) / (1 - SHORTEST_SHARE))
        raise UsageError(
            f"{batch} rows of up to {context} tokens cannot have different lengths: {needed} or "
            "more tokens are needed."
        )
    lengths = [context - spread * row // max(1, batch - 1) for row in range(batch)]
    random.Random(0).shuffle(lengths)
    return lengths
