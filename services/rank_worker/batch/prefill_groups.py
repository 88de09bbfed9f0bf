"""Which prefill chunks of a plan share a right-padded forward: a function of the plan alone."""

from collections.abc import Callable, Sequence

from shared import limits
from shared.messages import PrefillChunk

GROUPED_TOKENS_MAX = 512
"""Longest chunk that is grouped: a longer one keeps a device busy by itself."""

WIDTH_STEPS = (16, limits.FORWARD_TOKENS_MAX // 8)
WIDTH_STEP_SHARE = 8
"""Widths are multiples of an eighth of the next power of two, but of no less than 16 and no more
than 256: 25 up to the longest chunk. Of more than 64 tokens a fifth is padding at most."""

WASTE_MAX = 0.125
"""Largest share of a padded forward that may be padding."""


def padded_width(tokens: int) -> int:
    """Return how many columns a forward of so many tokens has where shapes should come again."""
    if tokens == 1:
        # Computed as a decode is.
        return 1
    least, most = WIDTH_STEPS
    step = min(max(least, (1 << (tokens - 1).bit_length()) // WIDTH_STEP_SHARE), most)
    return -(-tokens // step) * step


def _own_width(chunk: PrefillChunk) -> int:
    return chunk.length


def group_chunks(
    chunks: Sequence[PrefillChunk], width: Callable[[PrefillChunk], int] = _own_width
) -> list[list[PrefillChunk]]:
    """Split a plan's chunks into forwards.

    Only short chunks that are a whole sequence are grouped, with chunks of nearly their length;
    every other chunk is a group of its own.

    Args:
        chunks: of a plan.
        width: columns of a forward whose longest chunk is given.

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
        if group and not _may_share([*group, one], width(group[0])):
            groups.append(group)
            group = []
        group.append(one)
    return [*groups, group] if group else groups


def _may_share(group: Sequence[PrefillChunk], width: int) -> bool:
    waste = 1.0 - sum(one.length for one in group) / (group[0].length * len(group))
    return width * len(group) <= limits.FORWARD_TOKENS_MAX and waste <= WASTE_MAX
