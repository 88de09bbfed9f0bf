"""Waiting queue. Owns the order of sequences that wait for a slot; chooses no tenant."""

import bisect
import itertools
from collections.abc import Iterator, KeysView

from services.scheduler.requests.sequence import Sequence
from services.scheduler.requests.waiting_limits import WaitingLimits


class WaitingQueue:
    """Sequences that wait for a slot; those of one tenant by priority, then arrival."""

    def __init__(self, limits: WaitingLimits) -> None:
        self.limits = limits
        """Count what waits; the caller asks them before it adds a new request."""
        self._by_tenant: dict[str, list[Sequence]] = {}

    def __len__(self) -> int:
        """Return the number of waiting sequences."""
        return sum(map(len, self._by_tenant.values()))

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over a copy; sequences of one tenant are in order of admission."""
        return iter([one for queue in self._by_tenant.values() for one in queue])

    @property
    def tenants(self) -> KeysView[str]:
        """The tenants of the waiting sequences."""
        return self._by_tenant.keys()

    def add(self, sequence: Sequence) -> int:
        """Add a sequence in order; return about how many are admitted before it.

        Of another tenant, which takes turns with this one, at most one more is counted than of this
        tenant itself.
        """
        queue = self._by_tenant.setdefault(sequence.tenant, [])
        place = bisect.bisect_left(queue, _sort_key(sequence), key=_sort_key)
        others = [other for other in self._by_tenant.values() if other is not queue]
        queue.insert(place, sequence)
        self.limits.add(sequence)
        return place + sum(min(len(other), place + 1) for other in others)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that is in the queue."""
        queue = self._by_tenant[sequence.tenant]
        place = bisect.bisect_left(queue, _sort_key(sequence), key=_sort_key)
        assert queue[place] is sequence
        del queue[place]
        self.limits.remove(sequence)
        if not queue:
            del self._by_tenant[sequence.tenant]

    def heads(self, count: int) -> list[Sequence]:
        """Return the next `count` sequences of each tenant, or fewer; they stay in the queue.

        The first of all tenants come before the second ones.
        """
        if not self._by_tenant:
            return []
        queues = [queue[:count] for queue in self._by_tenant.values()]
        if len(queues) == 1:
            return queues[0]
        return [one for row in itertools.zip_longest(*queues) for one in row if one is not None]


def _sort_key(sequence: Sequence) -> tuple[int, int]:
    return -sequence.request.priority, sequence.arrival_number
