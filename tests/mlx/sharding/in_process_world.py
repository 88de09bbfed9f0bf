"""World of several ranks in one process.

The ranks run one after the other, so the total of a sum is known only after all of them have
reached it. Each pass runs every rank up to the first sum whose total is unknown, and adds the
summands up.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from services.rank_worker.peers.collectives import Collectives


class FakeGroup:
    """`mx.distributed.Group` without links."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size

    def rank(self) -> int:
        """Return the number of this rank."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self._size


def unlinked_collectives(rank: int, size: int) -> Collectives:
    """Return the collectives of a rank without any links."""
    return Collectives(FakeGroup(rank, size), rank, size)  # type: ignore[arg-type]


class _PendingSum(Exception):
    def __init__(self, part: mx.array) -> None:
        super().__init__()
        self.part = part


class InProcessWorld:
    """Runs the models of all ranks of a world."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        """Replace the sum of `mx.distributed`."""
        self.worlds = [unlinked_collectives(rank, size) for rank in range(size)]
        self.sums: list[mx.array] = []
        """Totals of the last run, in the order of the sums."""
        self._next = 0
        monkeypatch.setattr(mx.distributed, "all_sum", self._all_sum)

    def run(self, models: Sequence[nn.Module], tokens: mx.array, caches: Any = None) -> list[Any]:
        """Return the logits of each rank for one forward.

        Args:
            models: one per rank.
            tokens: int32 [rows, count].
            caches: returns new caches of a rank for each pass; None: no caches.
        """
        self.sums = []
        while True:
            parts: list[mx.array] = []
            logits: list[mx.array] = []
            for rank, model in enumerate(models):
                self._next = 0
                try:
                    cache = caches(rank) if caches is not None else None
                    logits.append(model(tokens, cache=cache))
                    mx.eval(logits[-1])
                except _PendingSum as pending:
                    mx.eval(pending.part)
                    parts.append(pending.part)
            if not parts:
                return logits
            assert len(parts) == len(models), "some ranks reach a sum that others do not reach"
            assert len({(tuple(part.shape), part.dtype) for part in parts}) == 1
            self.sums.append(sum(parts[1:], parts[0]))
            mx.eval(self.sums[-1])

    def _all_sum(self, part: mx.array, *, group: Any = None) -> mx.array:
        assert group is not None, "a sum outside the world"
        if self._next == len(self.sums):
            raise _PendingSum(part)
        self._next += 1
        # A new array, because a model may change it in place.
        return mx.array(self.sums[self._next - 1])
