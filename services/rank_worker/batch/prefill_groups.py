"""Grouping of prefill chunks into right-padded forwards. A pure function of the plan."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

from shared import limits
from shared.messages import PrefillChunk

WIDTH_STEP_MIN, WIDTH_STEP_MAX = 16, limits.FORWARD_TOKENS_MAX // 8
WIDTH_STEP_SHARE = 8
"""Widths are multiples of 1/8 of the next power of two, at least of 16 and at most of 256. That
gives 25 widths up to the longest chunk and, above 64 tokens, at most 20 % padding."""

CONCATENATED_MAX = 32
"""Most concatenated chunks of a forward: with MLX's attention each has its own in every layer."""

PADDING_SHARE_MAX = 0.125
"""Largest part of a grouped forward that may be padding."""


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillForward:
    """One forward over the chunks of a plan."""

    chunks: list[PrefillChunk]
    """At least one."""
    kind: Literal["rows", "side by side", "in place"]
    """How several chunks share the forward: each is a row of it, padded to the first, the longest;
    or they are one row, padded each; or one row whose chunks kernels write, padded as a whole."""


def padded_width(tokens: int) -> int:
    """Round a chunk's number of tokens up to a forward's width, so that few array shapes occur.

    Args:
        tokens: number of tokens in the chunk, 1 or more.

    Returns:
        1 for one token, otherwise the next multiple of a step (see `WIDTH_STEP_SHARE`).
    """
    if tokens == 1:
        # One token is computed like a decode.
        return 1
    step = (1 << (tokens - 1).bit_length()) // WIDTH_STEP_SHARE
    step = min(max(WIDTH_STEP_MIN, step), WIDTH_STEP_MAX)
    return -(-tokens // step) * step


def group_chunks(
    chunks: Sequence[PrefillChunk],
    tokens_max: int,
    width: Callable[[PrefillChunk], int] = lambda one: one.length,
) -> list[list[PrefillChunk]]:
    """Split the prefill chunks of a plan into forwards.

    Only short chunks that hold a whole sequence are grouped, with chunks of nearly the same length.
    Every other chunk is a group of its own.

    Args:
        chunks: prefill chunks of one plan.
        tokens_max: longest chunk that is grouped; 0: none is.
        width: returns the tokens per row of a forward whose longest chunk is given.

    Returns:
        Groups that hold every chunk once; the longest chunk of a group is its first.
    """
    groupable = [
        chunk
        for chunk in chunks
        if chunk.start == 0 and chunk.samples and chunk.length <= tokens_max
    ]
    groups = [[chunk] for chunk in chunks if chunk not in groupable]
    group: list[PrefillChunk] = []
    # Longest first, so that the first chunk of a group determines its width. The sort is stable.
    for chunk in sorted(groupable, key=lambda chunk: -chunk.length):
        if group and not _may_share([*group, chunk], width(group[0])):
            groups.append(group)
            group = []
        group.append(chunk)
    return [*groups, group] if group else groups


def concatenate_groups(
    groups: Sequence[list[PrefillChunk]], width: Callable[[PrefillChunk], int]
) -> list[PrefillForward]:
    """Concatenate chunks that are alone in their group, as many as a forward may have.

    Args:
        groups: a result of `group_chunks`.
        width: returns the tokens of a chunk in a forward.

    Returns:
        Forwards, which hold every chunk once: a group of several chunks as rows, or chunks of
        different sequences side by side, at most `limits.FORWARD_TOKENS_MAX` tokens together.
    """
    forwards: list[PrefillForward] = []
    open_chunks: list[PrefillChunk] = []
    sequences: set[int] = set()
    left = 0
    for group in groups:
        first, needed = group[0], width(group[0])
        has_room = needed <= left and len(open_chunks) < CONCATENATED_MAX
        if len(group) > 1:
            forwards.append(PrefillForward(group, "rows"))
        elif has_room and first.sequence_id not in sequences:
            open_chunks.append(first)
            sequences.add(first.sequence_id)
            left -= needed
        else:
            # Also for the next chunk of a sequence, which reads the one before.
            open_chunks, sequences = [first], {first.sequence_id}
            forwards.append(PrefillForward(open_chunks, "side by side"))
            left = limits.FORWARD_TOKENS_MAX - needed
    return forwards


def _may_share(group: Sequence[PrefillChunk], width: int) -> bool:
    """Tell whether chunks, the longest first, may share a forward of this width."""
    padding = 1.0 - sum(one.length for one in group) / (group[0].length * len(group))
    return width * len(group) <= limits.FORWARD_TOKENS_MAX and padding <= PADDING_SHARE_MAX
