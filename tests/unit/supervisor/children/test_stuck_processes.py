"""Detection of ranks and schedulers that the supervisor must kill."""

from services.supervisor.children.stuck_processes import (
    LEAVE_GRACE_S,
    SILENCES,
    START_S,
    LingeringRanks,
    SchedulerLiveness,
)
from shared import limits
from shared.messages import DismissedRank
from tests.unit.supervisor.status.status_reports import rank_status, status_report

HOST = "mac-1"
"""The host of the ranks in `status_reports`."""


def _dismissed(*pids: int, host: str = HOST) -> list[DismissedRank]:
    return [DismissedRank(host=host, pid=pid) for pid in pids]


def test_rank_dismissed_by_scheduler_is_due_for_kill_after_half_second() -> None:
    """The half second counts from the first report of the rank, not from the last."""
    lingering_ranks = LingeringRanks(HOST)
    assert LEAVE_GRACE_S == 0.5

    lingering_ranks.update(status_report(dismissed=_dismissed(7)), 10.0)
    assert lingering_ranks.due(10.4) == set()
    lingering_ranks.update(status_report(dismissed=_dismissed(7, 8)), 10.4)

    assert lingering_ranks.due(10.5) == {7}
    assert lingering_ranks.due(10.9) == {7, 8}


def test_dismissed_rank_is_not_killed_after_it_left_scheduler_reports() -> None:
    """A rank that is reported again gets a new grace period."""
    lingering_ranks = LingeringRanks(HOST)
    lingering_ranks.update(status_report(dismissed=_dismissed(7)), 10.0)

    lingering_ranks.update(status_report(), 10.2)
    assert lingering_ranks.due(99.0) == set()
    lingering_ranks.update(status_report(dismissed=_dismissed(7)), 100.0)

    assert lingering_ranks.due(100.3) == set()


def test_rank_of_current_epoch_is_not_killed_when_its_pid_was_dismissed() -> None:
    """A process id can be reused: a rank of the current world is not the dismissed process."""
    lingering_ranks = LingeringRanks(HOST)
    current = rank_status(0)

    for now_s in (10.0, 11.0):
        lingering_ranks.update(
            status_report(ranks=[current], dismissed=_dismissed(current.pid)), now_s
        )

    assert lingering_ranks.due(12.0) == set()


def test_supervisor_kills_no_dismissed_rank_of_another_host() -> None:
    """The same process id on another host belongs to another process."""
    lingering_ranks = LingeringRanks(HOST)

    lingering_ranks.update(status_report(dismissed=_dismissed(7, host="mac-2")), 10.0)

    assert lingering_ranks.due(99.0) == set()


def test_scheduler_counts_as_hung_after_silence_of_twice_peer_limit() -> None:
    """A scheduler that reports in time never expires."""
    for silence_s in (limits.PEER_SILENCE_S, 40.0):
        scheduler_liveness = SchedulerLiveness(silence_s)
        scheduler_liveness.update(1, 100.0)

        assert SILENCES == 2.0
        assert not scheduler_liveness.expired(1, 100.0 + 2 * silence_s - 0.1)
        assert scheduler_liveness.expired(1, 100.0 + 2 * silence_s)
        scheduler_liveness.update(1, 119.0)
        assert not scheduler_liveness.expired(1, 100.0 + 2 * silence_s)


def test_new_scheduler_counts_as_hung_when_silent_beyond_start_period() -> None:
    """Reports of the previous scheduler do not count for a new process."""
    scheduler_liveness = SchedulerLiveness(limits.PEER_SILENCE_S)
    scheduler_liveness.update(1, 1_000.0)

    assert not scheduler_liveness.expired(2, 9_000.0)
    assert not scheduler_liveness.expired(2, 9_000.0 + START_S - 0.1)
    assert scheduler_liveness.expired(2, 9_000.0 + START_S)
    assert not scheduler_liveness.expired(3, 9_000.0 + START_S)


def test_new_scheduler_may_be_silent_as_long_as_a_running_one() -> None:
    """With `scheduler.silence_s` at its largest the period for a start is longer too."""
    scheduler_liveness = SchedulerLiveness(limits.PEER_SILENCE_MAX_S)
    scheduler_liveness.update(1, 1_000.0)

    assert not scheduler_liveness.expired(2, 9_000.0)
    assert not scheduler_liveness.expired(2, 9_000.0 + 2 * limits.PEER_SILENCE_MAX_S - 0.1)
    assert scheduler_liveness.expired(2, 9_000.0 + 2 * limits.PEER_SILENCE_MAX_S)


def test_scheduler_that_never_reported_is_never_counted_as_hung() -> None:
    """The supervisor itself may lack the permission to ask."""
    scheduler_liveness = SchedulerLiveness(limits.PEER_SILENCE_S)

    assert not scheduler_liveness.expired(1, 1_000.0)
    assert not scheduler_liveness.expired(1, 1_000.0 + 10 * START_S)
