"""Detection of ranks and schedulers that the supervisor must kill."""

from services.supervisor.children.stuck_processes import (
    LEAVE_GRACE_S,
    SILENT_S,
    START_S,
    LingeringRanks,
    SchedulerLiveness,
)
from shared import limits
from shared.messages import DismissedRank
from tests.unit.supervisor.status.status_reports import rank_status, status_report

HERE = "mac-1"
"""The host of the ranks in `statuses`."""


def _dismissed(*pids: int, host: str = HERE) -> list[DismissedRank]:
    return [DismissedRank(host=host, pid=pid) for pid in pids]


def test_a_rank_gets_a_moment_to_end_by_itself() -> None:
    """Listed for half a second it is due, from the first report on and not from the last."""
    lingering_ranks = LingeringRanks(HERE)
    assert LEAVE_GRACE_S == 0.5

    lingering_ranks.update(status_report(dismissed=_dismissed(7)), 10.0)
    assert lingering_ranks.due(10.4) == set()
    lingering_ranks.update(status_report(dismissed=_dismissed(7, 8)), 10.4)

    assert lingering_ranks.due(10.5) == {7}
    assert lingering_ranks.due(10.9) == {7, 8}


def test_a_rank_whose_end_was_seen_is_left_alone() -> None:
    """Gone from the list it is due no more; listed again, its time begins anew."""
    lingering_ranks = LingeringRanks(HERE)
    lingering_ranks.update(status_report(dismissed=_dismissed(7)), 10.0)

    lingering_ranks.update(status_report(), 10.2)
    assert lingering_ranks.due(99.0) == set()
    lingering_ranks.update(status_report(dismissed=_dismissed(7)), 100.0)

    assert lingering_ranks.due(100.3) == set()


def test_a_rank_of_the_present_world_is_never_due() -> None:
    """A process id that was used again: whoever computes now is not whoever was told to leave."""
    lingering_ranks = LingeringRanks(HERE)
    present = rank_status(0)

    for now_s in (10.0, 11.0):
        lingering_ranks.update(
            status_report(ranks=[present], dismissed=_dismissed(present.pid)), now_s
        )

    assert lingering_ranks.due(12.0) == set()


def test_ranks_of_other_hosts_are_not_ours() -> None:
    """The same process id on another host is somebody else."""
    lingering_ranks = LingeringRanks(HERE)

    lingering_ranks.update(status_report(dismissed=_dismissed(7, host="mac-2")), 10.0)

    assert lingering_ranks.due(99.0) == set()


def test_a_scheduler_that_fell_silent_is_given_up() -> None:
    """Only after twice the time in which its ranks notice, and never while it speaks."""
    scheduler_liveness = SchedulerLiveness()
    scheduler_liveness.update(1, 100.0)

    assert SILENT_S == 2 * limits.PEER_SILENCE_S
    assert not scheduler_liveness.expired(1, 100.0 + SILENT_S - 0.1)
    assert scheduler_liveness.expired(1, 100.0 + SILENT_S)
    scheduler_liveness.update(1, 119.0)
    assert not scheduler_liveness.expired(1, 100.0 + SILENT_S)


def test_a_scheduler_that_starts_may_take_its_time() -> None:
    """A new process has said nothing yet: what its predecessor said does not count, for a while."""
    scheduler_liveness = SchedulerLiveness()
    scheduler_liveness.update(1, 1_000.0)

    assert not scheduler_liveness.expired(2, 9_000.0)
    assert not scheduler_liveness.expired(2, 9_000.0 + START_S - 0.1)
    assert scheduler_liveness.expired(2, 9_000.0 + START_S)
    assert not scheduler_liveness.expired(3, 9_000.0 + START_S)


def test_a_scheduler_that_was_never_heard_is_left_alone() -> None:
    """Perhaps it is we who may not ask."""
    scheduler_liveness = SchedulerLiveness()

    assert not scheduler_liveness.expired(1, 1_000.0)
    assert not scheduler_liveness.expired(1, 1_000.0 + 10 * START_S)
