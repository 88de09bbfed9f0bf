"""Preemption. Owns which running sequence gives up its place; removes none.

Between tenants, the one with the most running sequences for its weight gives one up; within a
tenant the one with the lowest priority, of equal ones the youngest.
"""

from collections import Counter
from collections.abc import Iterable

from services.scheduler.requests.sequence import Sequence
from services.scheduler.requests.tenant_turns import TenantTurns


def choose_for_memory(running: Iterable[Sequence], turns: TenantTurns) -> Sequence | None:
    """Return the sequence to preempt when the rows of all do not fit; None if none runs.

    Args:
        running: the running sequences.
        turns: the tenants' weights.
    """
    by_tenant: dict[str, list[Sequence]] = {}
    for one in running:
        by_tenant.setdefault(one.tenant, []).append(one)

    def load(tenant: str) -> tuple[float, int]:
        own = by_tenant[tenant]
        return len(own) / turns.weight(tenant), max(one.admission_number for one in own)

    if not by_tenant:
        return None
    most_loaded = by_tenant[max(by_tenant, key=load)]
    return min(most_loaded, key=lambda one: (one.request.priority, -one.admission_number))


def choose_for_tenant(
    running: Iterable[Sequence], turns: TenantTurns, tenant: str
) -> Sequence | None:
    """Return the sequence to preempt for a tenant without any; None if the others share fairly.

    A tenant gives up a sequence if it has more than its share of the running ones, and keeps one.

    Args:
        running: the running sequences.
        turns: the tenants' weights.
        tenant: the tenant without running sequences.
    """
    sequences = list(running)
    counts = Counter(one.tenant for one in sequences)
    weights = {one: turns.weight(one) for one in {*counts, tenant}}
    fair = len(sequences) / sum(weights.values())
    donors = {one for one, count in counts.items() if count > max(1.0, fair * weights[one])}
    return choose_for_memory((one for one in sequences if one.tenant in donors), turns)
