"""Sequences that wait for a slot: higher priority first, then first come, first served."""

import bisect
from collections.abc import Iterator

from services.scheduler.requests.sequence import Sequence


class WaitingQueue:
    """Sequences in the order in which they will be admitted."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, Sequence]] = []

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over a copy, in order of admission."""
        return iter([entry[2] for entry in self._entries])

    def add(self, sequence: Sequence) -> int:
        """Put a sequence in its place; return how many are ahead of it."""
        priority = -sequence.request.priority
        place = bisect.bisect_left(self._entries, (priority, sequence.arrival), key=_rank)
        self._entries.insert(place, (priority, sequence.arrival, sequence))
        return place

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands."""
        key = (-sequence.request.priority, sequence.arrival)
        place = bisect.bisect_left(self._entries, key, key=_rank)
        assert self._entries[place][2] is sequence
        del self._entries[place]

    def first(self, count: int) -> list[Sequence]:
        """Return who is next, up to so many."""
        return [entry[2] for entry in self._entries[:count]]


def _rank(entry: tuple[int, int, Sequence]) -> tuple[int, int]:
    return entry[0], entry[1]
