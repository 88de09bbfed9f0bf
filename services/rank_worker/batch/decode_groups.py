"""Grouping of decoding rows into forwards. A pure function of the plan and the world.

A forward is as wide as its longest row; shorter rows are padded. One more forward reads all weights
once more, which costs as much time as the arithmetic of some number of tokens. Rows are split into
two forwards where that saves more padding than it costs.
"""

from collections.abc import Sequence

from shared.messages.rank_link import Backend

FORWARD_COST_TOKENS = 64
"""Fixed cost of a forward, in tokens of arithmetic; the default without a measurement."""

FORWARD_COST_TOKENS_CPU = 12
"""The same on a CPU. Measured with the demo model on two cores: 3 ms a forward, 0.27 ms a token."""

FORWARD_COST_TOKENS_BY_BACKEND = {"ring": 32, "nccl": 256}
"""The same with several ranks. `ring`: CPUs whose forwards wait for other ranks in every layer.
`nccl`:
GPUs, estimated from data sheets."""


def forward_cost_of(backend: Backend, *, on_cpu: bool) -> int:
    """Return the fixed cost of a forward, as the number of tokens whose arithmetic takes as long.

    With several ranks it depends on the backend alone: ranks that group rows differently would run
    different collectives.

    Args:
        backend: the world's backend for collectives; "off": one rank.
        on_cpu: whether the model runs on the CPU; only counts for one rank.
    """
    if backend == "off":
        return FORWARD_COST_TOKENS_CPU if on_cpu else FORWARD_COST_TOKENS
    return FORWARD_COST_TOKENS_BY_BACKEND.get(backend, FORWARD_COST_TOKENS)


def group_decode_rows(
    slots: Sequence[int],
    token_counts: Sequence[int],
    forward_cost_tokens: int = FORWARD_COST_TOKENS,
) -> list[list[int]]:
    """Split decoding rows into forwards at a low total cost, by dynamic programming.

    Args:
        slots: slot of each decoding row, ascending.
        token_counts: tokens that each row computes in this step: 1, or 1 and its drafts.
        forward_cost_tokens: fixed cost of a forward, in tokens; see `forward_cost_of`.

    Returns:
        Groups of indices into `slots`, ascending within each group; every row is in one group.
    """
    all_rows = list(range(len(slots)))
    # One forward over several rows also computes the rows between them.
    row_count = 1 if len(slots) == 1 else slots[-1] + 1
    if row_count * max(token_counts) - sum(token_counts) <= forward_cost_tokens:
        return [all_rows]
    # Longest first: only rows that are adjacent in this order share a forward.
    longest_first = sorted(all_rows, key=lambda index: -token_counts[index])
    min_costs = [0]
    """Lowest cost of the first n rows, in tokens."""
    group_starts = [0]
    """Start of the last group of the first n rows."""
    for stop in range(1, len(longest_first) + 1):
        candidates: list[tuple[int, int]] = []
        """(cost, start) for each start of the last group."""
        last_slot = 0
        for start in range(stop - 1, -1, -1):
            last_slot = max(last_slot, slots[longest_first[start]])
            rows = 1 if stop - start == 1 else last_slot + 1
            tokens = rows * token_counts[longest_first[start]]
            candidates.append((min_costs[start] + forward_cost_tokens + tokens, start))
        cost, start = min(candidates)
        min_costs.append(cost)
        group_starts.append(start)
    groups: list[list[int]] = []
    stop = len(longest_first)
    while stop:
        groups.append(sorted(longest_first[group_starts[stop] : stop]))
        stop = group_starts[stop]
    return groups[::-1]
