"""Queues of tenants that take turns. Owns whose turn is next; does nothing with the items."""

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class TenantQueues(Generic[_T]):
    """A queue of items for each tenant. Tenants take turns (round robin). Not thread-safe."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[_T]] = OrderedDict()
        """No queue is empty; that of the tenant with the next turn is first."""

    def __len__(self) -> int:
        """Return the number of items of all tenants."""
        return sum(map(len, self._queues.values()))

    def add(self, tenant: str, item: _T, *, is_first: bool = False) -> None:
        """Add an item to a tenant's queue, before all others there if it is the first."""
        queue = self._queues.setdefault(tenant, deque())
        queue.insert(0 if is_first else len(queue), item)

    def take(self, may_take: Callable[[_T], bool] = lambda _: True) -> _T | None:
        """Remove and return the item whose turn it is, None without one.

        Args:
            may_take: whether the first item of a queue may be taken now, else it keeps its turn.
        """
        for tenant, queue in self._queues.items():
            if may_take(item := queue[0]):
                self._queues.move_to_end(tenant)
                self.drop(tenant, item)
                return item
        return None

    def drop(self, tenant: str, item: _T) -> bool:
        """Remove an item; return whether it was in the tenant's queue."""
        queue = self._queues.get(tenant, deque())
        if item not in queue:
            return False
        queue.remove(item)
        if not queue:
            del self._queues[tenant]
        return True
