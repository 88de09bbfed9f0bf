"""How the ids that one rank sampled become those of all ranks."""

from collections.abc import Callable
from typing import Literal

import mlx.core as mx

from shared.errors import InvariantBroken


def sharer(
    rank: int,
    world_size: int,
    synchronization: Literal["broadcast", "verify"],
    share_ids: Callable[[mx.array], mx.array] | None,
) -> Callable[[mx.array], mx.array]:
    """Return what makes sampled ids equal on all ranks.

    Args:
        rank: this rank.
        world_size: ranks in the world.
        synchronization: `verify` shares nothing: every rank samples, and the digests prove it.
        share_ids: sums an int32 array over all ranks, inside the graph.
    """
    if world_size == 1 or synchronization == "verify":
        return lambda ids: ids
    if share_ids is None:
        raise InvariantBroken(f"{world_size} ranks broadcast their ids but have no way to")
    # A factor instead of zeros: the sum then hangs on the forward on every rank, and all graphs are
    # alike, so that all ranks run their collectives in the same order.
    factor = mx.array(1 if rank == 0 else 0, dtype=mx.int32)
    return lambda ids: share_ids(ids * factor)
