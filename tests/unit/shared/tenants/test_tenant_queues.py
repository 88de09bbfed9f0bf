"""Turns of tenants that have a queue each."""

from collections import Counter, defaultdict

from hypothesis import given
from hypothesis import strategies as st

from shared.tenants.tenant_queues import TenantQueues

_TENANTS = "abcd"


def test_item_added_first_is_taken_before_others_of_its_tenant_only() -> None:
    """It goes before its tenant's other items, not before another tenant's turn."""
    queues: TenantQueues[str] = TenantQueues()
    for item in ("a1", "b1", "a2"):
        queues.add(item[0], item)
    queues.add("b", "b0", is_first=True)
    assert [queues.take() for _ in range(5)] == ["a1", "b0", "a2", "b1", None]


def test_dropped_item_is_never_taken_and_empty_queue_has_no_turn() -> None:
    """It can be dropped once, and its tenant leaves no trace."""
    queues: TenantQueues[str] = TenantQueues()
    queues.add("a", "a1")
    queues.add("b", "b1")
    assert queues.drop("a", "a1")
    assert not queues.drop("a", "a1")
    assert [queues.take(), queues.take()] == ["b1", None]
    assert len(queues) == 0


@given(
    st.lists(
        st.one_of(st.sampled_from(_TENANTS), st.frozensets(st.sampled_from(_TENANTS))), max_size=80
    )
)
def test_no_tenant_waits_for_more_than_one_turn_of_each_other_tenant(
    steps: list[str | frozenset[str]],
) -> None:
    """While a tenant waits and may have a turn, each other tenant has at most one, also if more is
    added and others may have no turn for a time. The items of a tenant stay in order."""
    queues: TenantQueues[tuple[str, int]] = TenantQueues()
    waiting: defaultdict[str, list[int]] = defaultdict(list)
    passed_by: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for number, step in enumerate(steps):
        if isinstance(step, str):
            queues.add(step, (step, number))
            waiting[step].append(number)
            continue
        allowed = {tenant for tenant in step if waiting[tenant]}
        taken = queues.take(lambda item, allowed=allowed: item[0] in allowed)  # type: ignore[misc]
        assert (taken is None) == (not allowed)
        if taken is not None:
            tenant, taken_number = taken
            assert tenant in allowed
            assert taken_number == waiting[tenant].pop(0)
            passed_by.pop(tenant, None)
            for other in allowed - {tenant}:
                passed_by[other][tenant] += 1
                assert passed_by[other][tenant] == 1
    assert len(queues) == sum(map(len, waiting.values()))
