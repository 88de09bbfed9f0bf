"""Dismissed rank processes that a supervisor is asked to end."""

import msgspec
import pytest

from services.scheduler.events import (
    GatewayConnected,
    GatewayMessageReceived,
    RankLost,
    RankMessageReceived,
    SendToGateway,
)
from services.scheduler.world import dismissed_ranks
from shared.identifiers import PeerId
from shared.messages import QueryStatus, RankFailed, StatusReported
from tests.unit.scheduler.support.in_memory_world import GATEWAY, InMemoryWorld
from tests.unit.scheduler.support.rank_messages import HELLO
from tests.unit.scheduler.support.world_factory import MakeWorld


def dismissed_pids(world: InMemoryWorld) -> list[int]:
    """Return the process ids in the list of dismissed ranks."""
    world.tell(GatewayMessageReceived(GATEWAY, QueryStatus()))
    assert world.status is not None
    assert all(one.host == "localhost" for one in world.status.dismissed)
    return [one.pid for one in world.status.dismissed]


def test_lost_rank_makes_status_list_dismissed_ranks_to_all_peers(make_world: MakeWorld) -> None:
    """The event that ends an epoch reports all ranks that may have to be killed."""
    world = make_world(ranks=3)
    for peer in (b"status-1", b"operator-2"):
        world.tell(GatewayConnected(PeerId(peer)))
    silent = list(world.ranks)[1]
    actions = world.core.handle(RankLost(silent, "silent for 10 s"), world.now_s)
    told = {
        one.gateway: one.message
        for one in actions
        if isinstance(one, SendToGateway) and isinstance(one.message, StatusReported)
    }
    assert set(told) == {GATEWAY, b"status-1", b"operator-2"}
    for message in told.values():
        assert sorted(one.pid for one in message.dismissed) == [1, 2, 3]


@pytest.mark.parametrize("cause", ["goodbye", "restarted"])
def test_dismissed_rank_is_unlisted_after_goodbye_or_new_session(
    make_world: MakeWorld, cause: str
) -> None:
    """A goodbye, or another session of the process, shows that it obeys."""
    world = make_world(ranks=2)
    first, second = world.ranks
    world.tell(RankLost(first, cause))
    assert dismissed_pids(world) == [2]
    world.tell(RankLost(second, cause))
    assert dismissed_pids(world) == []


@pytest.mark.parametrize(
    "cause", ["silent for 10 s", "its key is no longer allowed", "no session with b'rank-1'"]
)
def test_silent_dismissed_rank_stays_listed(make_world: MakeWorld, cause: str) -> None:
    """A stopped process is silent, so it stays on the list."""
    world = make_world(ranks=2)
    first, second = world.ranks
    world.tell(RankLost(first, cause))
    world.tell(RankLost(second, cause))
    assert sorted(dismissed_pids(world)) == [1, 2]


def test_missed_step_deadline_dismisses_and_lists_all_ranks(make_world: MakeWorld) -> None:
    """The scheduler cannot know which rank is stuck, so all ranks are dismissed and listed."""
    world = make_world(ranks=2)
    world.submit("a", [1], 3)
    world.advance(61.0)
    assert sorted(dismissed_pids(world)) == [1, 2]
    world.start_rank(0)
    world.start_rank(1)
    world.settle()


def test_new_process_of_rank_removes_old_one_from_dismissed_list(make_world: MakeWorld) -> None:
    """A new process for the same rank on the same host shows that the old one is gone."""
    world = make_world(ranks=2)
    world.tell(RankLost(next(iter(world.ranks)), "silent for 10 s"))
    assert sorted(dismissed_pids(world)) == [1, 2]
    world.start_rank(0)
    assert dismissed_pids(world) == [2]
    world.start_rank(1)
    assert dismissed_pids(world) == []


def test_rank_replaced_before_its_loss_is_known_is_not_listed(make_world: MakeWorld) -> None:
    """A new process may connect before the loss of the old one is known: only the others are
    listed."""
    world = make_world(ranks=2)
    world.start_rank(0)
    assert dismissed_pids(world) == [2]


def test_new_rank_with_pid_of_dismissed_rank_removes_it_from_list(make_world: MakeWorld) -> None:
    """Process ids repeat: a new rank with the pid of a dismissed one removes it from the list."""
    world = make_world()
    world.tell(RankLost(next(iter(world.ranks)), "silent for 10 s"))
    assert dismissed_pids(world) == [1]
    hello = msgspec.structs.replace(HELLO, host="localhost")
    peer = PeerId(b"rank-new")
    world.tell(RankMessageReceived(peer, hello))
    assert dismissed_pids(world) == []


def test_failed_rank_is_listed_as_dismissed_until_its_goodbye(make_world: MakeWorld) -> None:
    """A failure report does not show that the process has ended; the goodbye does."""
    world = make_world()
    peer = next(iter(world.ranks))
    failed = RankFailed(rank=0, epoch=1, detail="x", permanent=False)
    world.tell(RankMessageReceived(peer, failed))
    assert dismissed_pids(world) == [1]
    world.tell(RankLost(peer, "goodbye"))
    assert dismissed_pids(world) == []


def test_dismissed_list_keeps_ranks_one_minute_and_is_bounded(make_world: MakeWorld) -> None:
    """After a minute a pid may belong to another process, and the list must not grow without
    bound."""
    world = make_world()
    for number in range(dismissed_ranks.COUNT_MAX + 5):
        world.tell(RankLost(next(iter(world.ranks)), "silent for 10 s"))
        # Another host each time, so that no successor removes an entry.
        world.ranks.clear()
        world.pending_plans.clear()
        world.host = f"host-{number}"
        world.start_rank(0)
    world.tell(GatewayMessageReceived(GATEWAY, QueryStatus()))
    assert world.status is not None
    assert len(world.status.dismissed) == dismissed_ranks.COUNT_MAX
    assert world.status.dismissed[-1].host == f"host-{dismissed_ranks.COUNT_MAX + 3}"
    world.advance(dismissed_ranks.REMEMBERED_S + 1.0)
    world.tell(GatewayMessageReceived(GATEWAY, QueryStatus()))
    assert world.status.dismissed == []


def test_process_that_connects_twice_counts_as_one_rank(make_world: MakeWorld) -> None:
    """A process that says hello over a second connection replaces its first one."""
    world = make_world(ranks=2)
    world.tell(RankLost(PeerId(world.ranks.pop(next(iter(world.ranks))).peer), "goodbye"))
    hello = msgspec.structs.replace(HELLO, host=world.host, pid=50)
    for peer in (b"rank-x", b"rank-y"):
        world.tell(RankMessageReceived(PeerId(peer), hello))
    assert not world.ranks, "two connections of one process make no world of two"
    world.start_rank(-1)
    assert set(world.ranks) == {b"rank-y", b"rank-3"}
    # Its order to join was lost with its connection, so it says hello again.
    world.tell(RankMessageReceived(PeerId(b"rank-z"), hello))
    assert 50 not in [one.pid for one in world.core._world.dismissed.report(world.now_s)]
    assert {b"rank-y", b"rank-3"} <= set(world.dismissed)
