"""Turns of tenants. Owns how much work each tenant has had while others had requests too.

Source: the Virtual Token Counter of Sheng et al., "Fairness in Serving Large Language Models",
OSDI 2024. Tokens of prompts that are computed and tokens that are generated count alike.
"""

import dataclasses
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator

from services.scheduler.requests.sequence import Sequence


@dataclasses.dataclass(slots=True)
class _Account:
    """Open requests and computed tokens of one tenant."""

    weight: float
    open_requests: int = 0
    served: float = 0.0
    """Tokens computed for it, divided by its weight."""
    is_passed_over: bool = False
    """Its last turn came, and it got nothing."""


class TenantTurns:
    """Decides which tenant is next: the one that has been served least, by its weight.

    Only tenants with open requests count. One that had no request waiting is first lifted to the
    least served of the others, so no tenant saves up turns. With one tenant nothing is counted.
    """

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}

    def __len__(self) -> int:
        """Return the number of tenants with open requests."""
        return len(self._accounts)

    def enter(self, tenant: str, weight: float, waiting: Collection[str]) -> None:
        """Record a new request.

        Args:
            tenant: whose request it is.
            weight: the tenant's weight, which replaces an earlier one.
            waiting: the tenants with waiting requests, without this request.
        """
        account = self._accounts.setdefault(tenant, _Account(weight))
        account.weight = weight
        account.open_requests += 1
        if tenant not in waiting:
            others = [one for one in waiting or self._accounts if one != tenant]
            least = min((self._accounts[one].served for one in others), default=0.0)
            account.served = max(account.served, least)

    def leave(self, tenant: str) -> None:
        """Record the end of a request; a tenant without open requests is forgotten."""
        account = self._accounts[tenant]
        account.open_requests -= 1
        if not account.open_requests:
            del self._accounts[tenant]

    def charge(self, tenant: str, tokens: int) -> None:
        """Count tokens that are computed for a tenant with open requests."""
        if len(self._accounts) > 1:
            account = self._accounts[tenant]
            account.served += tokens / account.weight
            account.is_passed_over = False

    def pass_over(self, tenant: str) -> None:
        """Record that a tenant with open requests had its turn, and got nothing.

        It then comes before others that were served as much, such as new ones: without that, they
        could come first again and again.
        """
        self._accounts[tenant].is_passed_over = True

    def weight(self, tenant: str) -> float:
        """Return the weight of a tenant with open requests."""
        return self._accounts[tenant].weight

    def in_turn(self, sequences: Iterable[Sequence]) -> Iterator[Sequence]:
        """Yield open sequences in turn; tokens charged meanwhile change whose turn is next.

        Args:
            sequences: the sequences; those of one tenant keep their order.
        """
        if len(self._accounts) <= 1:
            yield from sequences
            return
        by_tenant: defaultdict[str, deque[Sequence]] = defaultdict(deque)
        for sequence in sequences:
            by_tenant[sequence.tenant].append(sequence)
        # Of equal ones the last to come is first, since the others had turns before it came.
        order = {
            tenant: (not account.is_passed_over, -place)
            for place, (tenant, account) in enumerate(self._accounts.items())
        }
        while by_tenant:
            tenant = min(by_tenant, key=lambda one: (self._accounts[one].served, order[one]))
            yield by_tenant[tenant].popleft()
            if not by_tenant[tenant]:
                del by_tenant[tenant]
