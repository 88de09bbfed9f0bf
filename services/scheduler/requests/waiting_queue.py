"""Waiting queue. Owns the order of sequences that wait for a slot: by priority, then arrival."""

import bisect
from collections.abc import Iterator

from services.scheduler.requests.sequence import Sequence


class WaitingQueue:
    """Sequences that wait for a slot, in order of admission: by priority, then arrival."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        """Return the number of waiting sequences."""
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over a copy, in order of admission."""
        return iter(self._sequences.copy())

    def add(self, sequence: Sequence) -> int:
        """Add a sequence in order; return the number of sequences ahead of it."""
        place = bisect.bisect_left(self._sequences, _sort_key(sequence), key=_sort_key)
        self._sequences.insert(place, sequence)
        return place

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that is in the queue."""
        place = bisect.bisect_left(self._sequences, _sort_key(sequence), key=_sort_key)
        assert self._sequences[place] is sequence
        del self._sequences[place]

    def first(self, count: int) -> list[Sequence]:
        """Return the next `count` sequences to admit, or fewer; they stay in the queue."""
        return self._sequences[:count]


def _sort_key(sequence: Sequence) -> tuple[int, int]:
    return -sequence.request.priority, sequence.arrival_number
