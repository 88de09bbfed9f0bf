"""Fair shares of a bounded resource."""

from hypothesis import given
from hypothesis import strategies as st

from shared.tenants.fair_share import FairShare


def _take_all(shares: FairShare, tenant: str, amount: int = 1) -> int:
    """Take as often as possible; return the amount that the tenant holds."""
    while shares.take(tenant, amount):
        pass
    return shares.held_by(tenant)


def test_single_tenant_holds_at_most_maximum_share_of_resource() -> None:
    """A single tenant that takes all it can holds the share of 75 % and no more."""
    assert _take_all(FairShare(512, 0.75), "a") == 384


def test_single_tenant_gets_whole_resource_when_maximum_share_is_one() -> None:
    """With a share of 1, only the total limits a tenant."""
    assert _take_all(FairShare(512, 1.0), "a") == 512


def test_fifth_tenant_gets_some_resource_after_four_took_all_they_could() -> None:
    """Four tenants that take all they can leave some of the resource for a fifth."""
    shares = FairShare(1_000, 0.75)
    for number in range(4):
        assert _take_all(shares, f"tenant {number}") > 0
    assert shares.take("newcomer", 1)


def test_tenant_that_holds_nothing_may_take_more_than_its_share_once() -> None:
    """A tenant that holds nothing may take more than its share at once, if that much is free."""
    shares = FairShare(10, 0.5)
    assert shares.take("a", 4)
    assert not shares.take("b", 7)
    assert shares.take("b", 6)
    assert not shares.has_room("c", 1)


def test_fair_share_keeps_no_entry_of_tenant_that_released_everything() -> None:
    """A tenant that holds nothing has no entry."""
    shares = FairShare(10, 0.5)
    shares.take("a", 2)
    shares.release("a", 2)
    assert (len(shares), shares.used, shares.held_by("a")) == (0, 0, 0)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40), st.booleans()), max_size=60),
    st.sampled_from([0.25, 0.5, 0.75, 1.0]),
)
def test_tenants_never_hold_more_than_total_when_they_take_at_random(
    steps: list[tuple[str, int, bool]], share: float
) -> None:
    """After random takes and releases the tenants together hold no more than the total, and their
    sum is `used`."""
    shares = FairShare(100, share)
    for tenant, amount, is_taken in steps:
        if is_taken:
            shares.take(tenant, amount)
        else:
            shares.release(tenant, min(amount, shares.held_by(tenant)))
        assert shares.used == sum(map(shares.held_by, "abc")) <= shares.total
