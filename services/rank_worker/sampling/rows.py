"""Choosing rows out of a batch, at no cost when the choice is all of them."""

from collections.abc import Sequence

import mlx.core as mx


class Chosen:
    """Some rows of a batch, rising."""

    def __init__(self, indices: Sequence[int], total: int) -> None:
        self.indices = list(indices)
        self._all = len(self.indices) == total
        self._array = None if self._all else mx.array(self.indices, dtype=mx.int32)

    def __len__(self) -> int:
        """Return how many rows are chosen."""
        return len(self.indices)

    def take(self, batch: mx.array) -> mx.array:
        """Return these rows."""
        return batch if self._array is None else batch[self._array]

    def put(self, batch: mx.array, rows: mx.array) -> mx.array:
        """Return the batch with these rows replaced; `batch` itself stays as it is."""
        if self._array is None:
            return rows
        changed = batch[:]
        changed[self._array] = rows
        return changed
