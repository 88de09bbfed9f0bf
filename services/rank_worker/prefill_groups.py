"""Which prefill chunks of a plan share a right-padded forward: a function of the plan alone."""

from collections.abc import Sequence

from shared import limits
from shared.messages import PrefillChunk

GROUPED_TOKENS_MAX = 512
"""Longest chunk that is grouped: a longer one keeps a device busy by itself."""

WIDTH_STEP_MIN = 64
WIDTH_STEP_SHARE = 8
"""Widths are multiples of an eighth of the next power of two, and of no less than 64: sixteen up to
2,048. A fifth of a forward is padding at most, except in short ones, which take no less time."""

WASTE_MAX = 0.125
"""Largest share of a padded forward that may be padding."""


def padded_width(tokens: int) -> int:
    """Return how many columns a forward of so many tokens has where shapes should come again."""
    if tokens == 1:
        # Computed as a decode is.
        return 1
    step = max(WIDTH_STEP_MIN, (1 << (tokens - 1).bit_length()) // WIDTH_STEP_SHARE)
    return -(-tokens // step) * step


def group_chunks(chunks: Sequence[PrefillChunk]) -> list[list[PrefillChunk]]:
    """Split a plan's chunks into forwards.

    Only short chunks that are a whole sequence are grouped, with chunks of nearly their length;
    every other chunk is a group of its own.

    Returns:
        Groups, each longest first, that hold every chunk once.
    """
    together = [
        one for one in chunks if one.start == 0 and one.samples and one.length <= GROUPED_TOKENS_MAX
    ]
    groups = [[one] for one in chunks if one not in together]
    group: list[PrefillChunk] = []
    # Longest first, so that a group's width is known when it begins; equal lengths in plan order.
    for one in sorted(together, key=lambda chunk: -chunk.length):
        if group and not _may_share([*group, one]):
            groups.append(group)
            group = []
        group.append(one)
    return [*groups, group] if group else groups


def _may_share(group: Sequence[PrefillChunk]) -> bool:
    area = group[0].length * len(group)
    waste = 1.0 - sum(one.length for one in group) / area
    return area <= limits.FORWARD_TOKENS_MAX and waste <= WASTE_MAX
