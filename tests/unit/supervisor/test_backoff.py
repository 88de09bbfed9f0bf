"""Waiting times between starts of one process."""

from services.supervisor.backoff import FIRST_S, FORGIVEN_S, LONGEST_S, Backoff


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
