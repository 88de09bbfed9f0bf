"""Fair shares of a bounded resource."""

from hypothesis import given
from hypothesis import strategies as st

from shared.fair_share import FairShare


def _take_all(shares: FairShare, tenant: str, amount: int = 1) -> int:
    """Take as often as possible; return the amount that the tenant holds."""
    while shares.take(tenant, amount):
        pass
    return shares.held_by(tenant)


def test_single_tenant_gets_its_share_when_it_takes_all_it_can() -> None:
    """One tenant alone holds at most its share of the resource."""
    assert _take_all(FairShare(512, 0.75), "a") == 384


def test_single_tenant_gets_everything_when_share_is_one() -> None:
    """With a share of 1, only the total limits a tenant."""
    assert _take_all(FairShare(512, 1.0), "a") == 512


def test_newcomer_gets_room_when_four_tenants_take_all_they_can() -> None:
    """Four tenants that take all they can leave some of the resource for a fifth."""
    shares = FairShare(1_000, 0.75)
    for number in range(4):
        assert _take_all(shares, f"tenant {number}") > 0
    assert shares.take("newcomer", 1)


def test_tenant_without_holdings_gets_all_that_is_free_when_amount_is_large() -> None:
    """A tenant that holds nothing may take more than its share at once, if that much is free."""
    shares = FairShare(10, 0.5)
    assert shares.take("a", 4)
    assert not shares.take("b", 7)
    assert shares.take("b", 6)
    assert not shares.has_room("c", 1)


def test_tenant_is_forgotten_when_it_has_released_everything() -> None:
    """A tenant that holds nothing takes no memory."""
    shares = FairShare(10, 0.5)
    shares.take("a", 2)
    shares.release("a", 2)
    assert (len(shares), shares.used, shares.held_by("a")) == (0, 0, 0)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40), st.booleans()), max_size=60),
    st.sampled_from([0.25, 0.5, 0.75, 1.0]),
)
def test_sum_stays_within_total_when_tenants_take_and_release_at_random(
    steps: list[tuple[str, int, bool]], share: float
) -> None:
    """The tenants together never hold more than the total, and the sum of all is `used`."""
    shares = FairShare(100, share)
    for tenant, amount, is_taken in steps:
        if is_taken:
            shares.take(tenant, amount)
        else:
            shares.release(tenant, min(amount, shares.held_by(tenant)))
        assert shares.used == sum(map(shares.held_by, "abc")) <= shares.total
