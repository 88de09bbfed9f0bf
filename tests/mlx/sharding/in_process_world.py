"""Several ranks' models in one process: what crosses ranks is added up between passes.

Ranks run one after the other, so a sum can only be given once all have come to it. Each pass runs
every rank up to the first sum whose total is not known yet, and adds up what they bring to it.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from services.rank_worker.collectives import Collectives


class Place:
    """A rank's place, as `mx.distributed.Group` tells it."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size

    def rank(self) -> int:
        """Return which rank this is."""
        return self._rank

    def size(self) -> int:
        """Return how many there are."""
        return self._size


def world(rank: int, size: int) -> Collectives:
    """Return a rank's place without any links."""
    return Collectives(Place(rank, size), rank, size)  # type: ignore[arg-type]


class _Pending(Exception):
    def __init__(self, part: mx.array) -> None:
        super().__init__()
        self.part = part


class SeveralRanks:
    """Runs the models of all ranks of a world."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        """Stand between the models and `mx.distributed`."""
        self.worlds = [world(rank, size) for rank in range(size)]
        self.sums: list[mx.array] = []
        """Totals of the last run, in order."""
        self._next = 0
        monkeypatch.setattr(mx.distributed, "all_sum", self._all_sum)

    def run(self, models: Sequence[nn.Module], tokens: mx.array, caches: Any = None) -> list[Any]:
        """Return each rank's logits for one forward.

        Args:
            models: one per rank.
            tokens: int32 [rows, count].
            caches: makes a rank's caches anew for each pass, as all before it left them.
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
                except _Pending as pending:
                    mx.eval(pending.part)
                    parts.append(pending.part)
            if not parts:
                return logits
            assert len(parts) == len(models), "some ranks come to a sum that others do not come to"
            assert len({(tuple(part.shape), part.dtype) for part in parts}) == 1
            self.sums.append(sum(parts[1:], parts[0]))
            mx.eval(self.sums[-1])

    def _all_sum(self, part: mx.array, *, group: Any = None) -> mx.array:
        assert group is not None, "a sum outside the world"
        if self._next == len(self.sums):
            raise _Pending(part)
        self._next += 1
        return self.sums[self._next - 1]
