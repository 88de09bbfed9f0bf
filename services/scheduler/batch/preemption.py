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


def find_sated(running: Iterable[Sequence], turns: TenantTurns) -> set[str]:
    """Return the running tenants for which no other tenant gives up a place.

    They are those that with one place more would have over half of their fair part. Above that
    places go by turns alone, so that sequences are not moved back and forth.

    Args:
        running: the running sequences.
        turns: the tenants' weights.
    """
    counts = Counter(one.tenant for one in running)
    fair = _fair_parts(counts, turns)
    return {one for one, count in counts.items() if 2.0 * (count + 1) > fair[one]}


def choose_for_tenant(
    running: Iterable[Sequence], turns: TenantTurns, tenant: str
) -> Sequence | None:
    """Return the sequence to preempt for a tenant with few; None if the others share fairly.

    A tenant gives up a sequence if it has more than its part of the running ones, and keeps one.

    Args:
        running: the running sequences.
        turns: the tenants' weights.
        tenant: the tenant, which has no running sequences or is not sated.
    """
    sequences = list(running)
    counts = Counter(one.tenant for one in sequences)
    fair = _fair_parts(Counter({tenant: 0, **counts}), turns)
    donors = {one for one, count in counts.items() if count > max(1.0, fair[one])}
    return choose_for_memory((one for one in sequences if one.tenant in donors), turns)


def _fair_parts(counts: Counter[str], turns: TenantTurns) -> dict[str, float]:
    """Return each tenant's part of the running sequences by its weight."""
    weights = {one: turns.weight(one) for one in counts}
    per_weight = counts.total() / sum(weights.values()) if weights else 0.0
    return {one: weight * per_weight for one, weight in weights.items()}
