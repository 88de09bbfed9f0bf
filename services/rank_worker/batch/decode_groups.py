"""Which decoding rows share a forward: a function of the plan and the world alone.

A forward is as wide as its longest row, shorter ones are padded. A forward more reads all weights
once more, which takes as long as the arithmetic of so and so many tokens. So the rows are split
where that leaves out more padding than it costs.
"""

from collections.abc import Sequence

from shared.messages.rank_link import Backend

FORWARD_TOKENS = 64
"""A forward costs as much as the arithmetic of so many tokens, where nothing better is known."""

FORWARD_TOKENS_CPU = 12
"""Measured with the demo model on two cores: 3 ms a forward, 0.27 ms a token."""

FORWARD_TOKENS_BY_BACKEND = {"ring": 32, "nccl": 256}
"""A CPU whose forwards wait for other ranks in every layer; a GPU, from what data sheets say of its
arithmetic and memory."""


def forward_tokens_of(backend: Backend, *, on_cpu: bool) -> int:
    """Return what a forward costs in a world, in tokens.

    With several ranks the backend alone decides: ranks that group their rows otherwise run other
    collectives.
    """
    if backend == "off":
        return FORWARD_TOKENS_CPU if on_cpu else FORWARD_TOKENS
    return FORWARD_TOKENS_BY_BACKEND.get(backend, FORWARD_TOKENS)


def group_rows(
    slots: Sequence[int], counts: Sequence[int], forward_tokens: int = FORWARD_TOKENS
) -> list[list[int]]:
    """Split decoding rows into forwards so that the fewest tokens are computed.

    Args:
        slots: of the rows, rising.
        counts: tokens of each.
        forward_tokens: what a forward costs beside its tokens.

    Returns:
        Groups of indices into `slots`, rising in each; every row is in one of them.
    """
    everybody = list(range(len(slots)))
    padding = _area(slots, max(counts)) - sum(counts)
    if padding <= forward_tokens:
        return [everybody]
    # Longest first: only neighbours in this order ever share a forward.
    order = sorted(everybody, key=lambda index: -counts[index])
    least = [0]
    """Cost of the first n rows of the order."""
    starts = [0]
    """Where the last group of the first n rows begins."""
    for stop in range(1, len(order) + 1):
        best, best_start = -1, 0
        last_slot = 0
        for start in range(stop - 1, -1, -1):
            last_slot = max(last_slot, slots[order[start]])
            rows = 1 if stop - start == 1 else last_slot + 1
            cost = least[start] + forward_tokens + rows * counts[order[start]]
            if best < 0 or cost <= best:
                best, best_start = cost, start
        least.append(best)
        starts.append(best_start)
    groups: list[list[int]] = []
    stop = len(order)
    while stop:
        groups.append(sorted(order[starts[stop] : stop]))
        stop = starts[stop]
    return groups[::-1]


def _area(slots: Sequence[int], count: int) -> int:
    """Return the tokens that a forward computes: rows that rest between others are computed too."""
    rows = 1 if len(slots) == 1 else slots[-1] + 1
    return rows * count
