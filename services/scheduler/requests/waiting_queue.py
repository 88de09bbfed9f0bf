"""Waiting queue. Owns the order of sequences that wait for a slot: by priority, then arrival."""

import bisect
from collections.abc import Iterator

from services.scheduler.requests.sequence import Sequence


class WaitingQueue:
    """Sequences that wait for a slot, in order of admission: by priority, then arrival."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, Sequence]] = []

    def __len__(self) -> int:
        """Return the number of waiting sequences."""
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over a copy, in order of admission."""
        return iter([entry[2] for entry in self._entries])

    def add(self, sequence: Sequence) -> int:
        """Add a sequence in order; return the number of sequences ahead of it."""
        priority = -sequence.request.priority
        key = (priority, sequence.arrival_number)
        place = bisect.bisect_left(self._entries, key, key=_sort_key)
        self._entries.insert(place, (priority, sequence.arrival_number, sequence))
        return place

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that is in the queue."""
        key = (-sequence.request.priority, sequence.arrival_number)
        place = bisect.bisect_left(self._entries, key, key=_sort_key)
        assert self._entries[place][2] is sequence
        del self._entries[place]

    def first(self, count: int) -> list[Sequence]:
        """Return the next `count` sequences to admit, or fewer; they stay in the queue."""
        return [entry[2] for entry in self._entries[:count]]


def _sort_key(entry: tuple[int, int, Sequence]) -> tuple[int, int]:
    return entry[0], entry[1]
