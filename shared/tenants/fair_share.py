"""Fair shares of a bounded resource. Owns who holds how much of it; does not queue.

Source: Choudhury and Hahne, "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches",
IEEE/ACM Transactions on Networking, 1998.
"""

import math
from collections import defaultdict


class FairShare:
    """Divides a resource, such as bytes or places in a queue, between tenants.

    A tenant may hold `share / (1 - share)` times as much as is left free. So one tenant alone gets
    up to `share` of the resource, several get less each, and some is always free for a tenant
    that holds nothing. Not thread-safe.
    """

    def __init__(self, total: int, share: float) -> None:
        """Begin with the whole resource free.

        Args:
            total: amount that all tenants together may hold.
            share: largest part of `total` for one tenant, above 0 and up to 1; 1: only `total`
                limits a tenant.
        """
        self.total = total
        self.used = 0
        """Amount that all tenants hold."""
        self._held: defaultdict[str, int] = defaultdict(int)
        self._ratio = math.inf if share >= 1.0 else share / (1.0 - share)

    def __len__(self) -> int:
        """Return the number of tenants that hold something."""
        return len(self._held)

    def held_by(self, tenant: str) -> int:
        """Return the amount that a tenant holds."""
        return self._held.get(tenant, 0)

    def has_room(self, tenant: str, amount: int) -> bool:
        """Return whether a tenant may take this amount now.

        A tenant that holds nothing may take all that is free.
        """
        free = self.total - self.used - amount
        held = self.held_by(tenant)
        if free < 0:
            return False
        return not held or math.isinf(self._ratio) or held + amount <= self._ratio * free

    def take(self, tenant: str, amount: int) -> bool:
        """Give an amount to a tenant if there is room for it; return whether there was."""
        if not self.has_room(tenant, amount):
            return False
        self.add(tenant, amount)
        return True

    def add(self, tenant: str, amount: int) -> None:
        """Give an amount to a tenant even if there is no room for it."""
        if amount:
            self.used += amount
            self._held[tenant] += amount

    def release(self, tenant: str, amount: int) -> None:
        """Take an amount back from a tenant, which must hold at least that much."""
        held = self.held_by(tenant)
        assert amount <= held, (tenant, amount, held)
        self.used -= amount
        if amount == held:
            self._held.pop(tenant, None)
        else:
            self._held[tenant] = held - amount
