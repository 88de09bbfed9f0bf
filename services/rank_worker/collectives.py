"""The only file that calls `mx.distributed`: joining a world, its group, sums over ranks.

Nothing here runs outside a plan's execution, except at load (ARCHITECTURE.md, I3).
"""

import os
import re
from collections.abc import Sequence
from typing import NoReturn

import mlx.core as mx
import numpy as np

from shared.errors import ConfigError, WorldLost
from shared.messages.rank_link import Backend


class Collectives:
    """This rank's place in the world and the operations that cross ranks."""

    def __init__(self, group: mx.distributed.Group | None, rank: int, world_size: int) -> None:
        self.group = group
        """What `model.shard` takes; None for one rank."""
        self.rank = rank
        self.world_size = world_size

    def sum_ids(self, ids: mx.array) -> mx.array:
        """Add up ids over all ranks, as part of the graph.

        Args:
            ids: int32 of any shape; shape, type and place in the graph are equal on all ranks.
        """
        return ids if self.group is None else mx.distributed.all_sum(ids, group=self.group)

    def sum_over_ranks(self, array: mx.array) -> mx.array:
        """Add up arrays over all ranks, as part of the graph of a forward.

        Args:
            array: shape, type and place in the graph are equal on all ranks.
        """
        return array if self.group is None else mx.distributed.all_sum(array, group=self.group)

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return every rank's numbers, in rank order; waits for all ranks (at load only, I3).

        Args:
            numbers: int32, as many on every rank.
        """
        rows = np.zeros((self.world_size, len(numbers)), dtype=np.int32)
        rows[self.rank] = numbers
        found = np.array(self.sum_ids(mx.array(rows)))
        return [[int(number) for number in row] for row in found]

    def check(self) -> None:
        """Add up numbers whose sum is known; returns when all ranks have come this far.

        Raises:
            WorldLost: the sum is wrong, or a rank is gone.
        """
        if self.group is None:
            return
        ranks = mx.array([1, self.rank, self.rank * self.rank], dtype=mx.int32)
        try:
            total = mx.distributed.all_sum(ranks, group=self.group)
            mx.eval(total)
        except RuntimeError as error:
            raise WorldLost(f"The first collective failed: {error}.") from error
        n = self.world_size
        due = [n, n * (n - 1) // 2, n * (n - 1) * (2 * n - 1) // 6]
        if total.tolist() != due:
            raise WorldLost(f"The first collective gave {total.tolist()} instead of {due}.")


def init(backend: Backend, rank: int, world_size: int) -> Collectives:
    """Join the world that the environment describes; waits for all ranks without a deadline.

    Raises:
        ConfigError: this machine's MLX has no such backend.
        WorldLost: MLX cannot, or it found another world than ordered.
    """
    if backend == "off":
        return Collectives(None, rank, world_size)
    if not mx.distributed.is_available(backend):
        _refuse(backend)
    try:
        group = mx.distributed.init(strict=True, backend=backend)
    except (RuntimeError, ValueError) as error:
        detail = _with_names(str(error))
        raise WorldLost(f"Joining the world over {backend} failed: {detail}.") from error
    if (group.rank(), group.size()) != (rank, world_size):
        raise WorldLost(
            f"Ordered to be rank {rank} of {world_size}, "
            f"but the environment says rank {group.rank()} of {group.size()}."
        )
    return Collectives(group, rank, world_size)


def _refuse(backend: Backend) -> NoReturn:
    if backend == "jaccl":
        # No wrong setting for good: world.jaccl_fallback may lead to ring.
        raise WorldLost(
            "MLX finds no RDMA on this machine, which jaccl needs: macOS 26.2 or later on a Mac "
            "with Thunderbolt 5, and `rdma_ctl enable`, once, in its recovery system."
        )
    raise ConfigError(
        f"MLX on this machine has no {backend}: set world.backend to ring, or install MLX for CUDA "
        "(the extra `cuda13`)."
    )


def _with_names(text: str) -> str:
    """Return MLX's words with the names of error numbers in place of these."""
    return re.sub(
        r"\(error: (\d+)\)|errno=?\s*(\d+)",
        lambda found: f"({os.strerror(int(found[1] or found[2]))})",
        text.rstrip("."),
    )
