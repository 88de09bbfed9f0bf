"""Which rank processes the supervisor kills, and which never."""

from services.supervisor.children.lingering_ranks import GRACE_S, LingeringRanks
from shared.messages import DismissedRank
from tests.unit.supervisor.status.statuses import rank, status

HERE = "mac-1"
"""The host of the ranks in `statuses`."""


def _dismissed(*pids: int, host: str = HERE) -> list[DismissedRank]:
    return [DismissedRank(host=host, pid=pid) for pid in pids]


def test_a_rank_gets_a_moment_to_end_by_itself() -> None:
    """Listed for half a second it is due, from the first report on and not from the last."""
    dismissals = LingeringRanks(HERE)
    assert GRACE_S == 0.5

    dismissals.take(status(dismissed=_dismissed(7)), 10.0)
    assert dismissals.due(10.4) == set()
    dismissals.take(status(dismissed=_dismissed(7, 8)), 10.4)

    assert dismissals.due(10.5) == {7}
    assert dismissals.due(10.9) == {7, 8}


def test_a_rank_whose_end_was_seen_is_left_alone() -> None:
    """Gone from the list it is due no more; listed again, its time begins anew."""
    dismissals = LingeringRanks(HERE)
    dismissals.take(status(dismissed=_dismissed(7)), 10.0)

    dismissals.take(status(), 10.2)
    assert dismissals.due(99.0) == set()
    dismissals.take(status(dismissed=_dismissed(7)), 100.0)

    assert dismissals.due(100.3) == set()


def test_a_rank_of_the_present_world_is_never_due() -> None:
    """A process id that was used again: whoever computes now is not whoever was told to leave."""
    dismissals = LingeringRanks(HERE)
    present = rank(0)

    for now_s in (10.0, 11.0):
        dismissals.take(status(ranks=[present], dismissed=_dismissed(present.pid)), now_s)

    assert dismissals.due(12.0) == set()


def test_ranks_of_other_hosts_are_not_ours() -> None:
    """The same process id on another host is somebody else."""
    dismissals = LingeringRanks(HERE)

    dismissals.take(status(dismissed=_dismissed(7, host="mac-2")), 10.0)

    assert dismissals.due(99.0) == set()
