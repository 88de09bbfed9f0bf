"""What the collectives of a decode step cost by themselves: counted in its graph, then timed.

A forward that is never evaluated shows how many sums over ranks a decode has. As many sums of the
same size, each waiting for the one before as layers do, are then run without anything between them:
the least time that such a step spends in collectives on these links.
"""

import hashlib
import io
import statistics

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from services.rank_worker.collectives import Collectives
from shared.canary_names import decode_name
from shared.clock import Clock
from shared.messages import CanaryFinding

ROWS = (1, 2, 4, 8)
"""Sequences that decode together."""

REPETITIONS = 5
"""Timed ones; one more goes before them."""

_SUM = 'label ="Sum AllReduce"'
"""A sum over ranks, as MLX writes graphs."""


def count_sums(model: nn.Module) -> int:
    """Return how many sums over ranks a decode of one row has; nothing is computed."""
    tokens = mx.zeros((1, 1), dtype=mx.int32)
    graph = io.StringIO()
    mx.export_to_dot(graph, model(tokens, cache=make_prompt_cache(model)))
    return graph.getvalue().count(_SUM)


def time_sums(
    world: Collectives, count: int, hidden_size: int, dtype: mx.Dtype, clock: Clock
) -> list[CanaryFinding]:
    """Time `count` sums in a row, for each number of rows.

    Args:
        world: all ranks call this at the same point, with equal arguments.
        count: of sums.
        hidden_size: width of a row.
        dtype: of its elements.
        clock: measures.
    """
    return [_time(world, count, rows, hidden_size, dtype, clock) for rows in ROWS]


def _time(
    world: Collectives, count: int, rows: int, hidden_size: int, dtype: mx.Dtype, clock: Clock
) -> CanaryFinding:
    seconds: list[float] = []
    # Nothing added up stays nothing, however often.
    state = mx.zeros((rows, hidden_size), dtype=dtype)
    mx.eval(state)
    for _ in range(REPETITIONS + 1):
        began_s = clock.now()
        for _ in range(count):
            state = world.sum_ids(state)
        mx.eval(state)
        seconds.append(clock.now() - began_s)
    digest = hashlib.blake2b(bytes(mx.array(state, dtype=mx.float32)), digest_size=16)
    return CanaryFinding(
        name=decode_name(count, rows),
        digest=digest.digest(),
        bytes=count * state.nbytes,
        microseconds=statistics.median(seconds[1:]) * 1e6,
    )
