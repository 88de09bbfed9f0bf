"""When a scheduler that says nothing is given up."""

from services.supervisor.status.scheduler_liveness import SILENT_S, START_S, SchedulerLiveness
from shared import limits


def test_a_scheduler_that_fell_silent_is_given_up() -> None:
    """Only after twice the time in which its ranks notice, and never while it speaks."""
    silence = SchedulerLiveness()
    silence.heard(1, 100.0)

    assert SILENT_S == 2 * limits.PEER_SILENCE_S
    assert not silence.expired(1, 100.0 + SILENT_S - 0.1)
    assert silence.expired(1, 100.0 + SILENT_S)
    silence.heard(1, 119.0)
    assert not silence.expired(1, 100.0 + SILENT_S)


def test_a_scheduler_that_starts_may_take_its_time() -> None:
    """A new process has said nothing yet: what its predecessor said does not count, for a while."""
    silence = SchedulerLiveness()
    silence.heard(1, 1_000.0)

    assert not silence.expired(2, 9_000.0)
    assert not silence.expired(2, 9_000.0 + START_S - 0.1)
    assert silence.expired(2, 9_000.0 + START_S)
    assert not silence.expired(3, 9_000.0 + START_S)


def test_a_scheduler_that_was_never_heard_is_left_alone() -> None:
    """Perhaps it is we who may not ask."""
    silence = SchedulerLiveness()

    assert not silence.expired(1, 1_000.0)
    assert not silence.expired(1, 1_000.0 + 10 * START_S)
