"""Waiting times between starts of one process."""

from services.supervisor.children.backoff import FIRST_S, FORGIVEN_S, LONGEST_S, Backoff


def test_waits_double_up_to_a_bound() -> None:
    """0.1 s, doubling, never more than 10 s."""
    backoff = Backoff()

    waits_s = [backoff.after(lived_s=1.0) for _ in range(9)]

    assert waits_s == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert (waits_s[0], waits_s[-1]) == (FIRST_S, LONGEST_S)


def test_a_healthy_life_is_rewarded() -> None:
    """A process that lived for a minute comes back at once when it exits."""
    backoff = Backoff()
    for _ in range(5):
        backoff.after(lived_s=0.5)

    assert backoff.after(lived_s=FORGIVEN_S) == FIRST_S
    assert backoff.after(lived_s=0.5) == 2 * FIRST_S


def test_whoever_has_served_comes_back_at_once() -> None:
    """A hundred short lives that each reached readiness: the wait never grows."""
    backoff = Backoff()

    waits_s = set()
    for _ in range(100):
        backoff.reset_backoff()
        waits_s.add(backoff.after(lived_s=3.0))

    assert waits_s == {FIRST_S}


def test_being_told_to_end_is_no_fault() -> None:
    """A rank that ended with its world waits no longer, and no shorter, than it would have."""
    backoff = Backoff()
    backoff.after(lived_s=1.0)

    waits_s = [backoff.after(lived_s=1.0, is_own_fault=False) for _ in range(5)]

    assert waits_s == [2 * FIRST_S] * 5
    assert backoff.after(lived_s=1.0) == 2 * FIRST_S
    assert backoff.after(lived_s=1.0) == 4 * FIRST_S
