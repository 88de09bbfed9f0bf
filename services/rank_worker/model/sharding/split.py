"""Which part of a model a rank holds. No MLX."""

import dataclasses
from collections.abc import Sequence

from shared.messages.rank_link import Sharding


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """One rank's place in a split model; equal on all ranks but for `rank`."""

    sharding: Sharding
    """How the model is split; "none" for one rank."""
    rank: int
    world_size: int
    memory_bytes: Sequence[int] = ()
    """What each rank may use, by rank; empty: equal shares."""
