"""Which rank processes a supervisor is asked to end."""

import pytest

from services.scheduler.events import (
    GatewayConnected,
    GatewayMessageReceived,
    RankConnected,
    RankLost,
    RankMessageReceived,
    SendToGateway,
)
from services.scheduler.world import dismissed_ranks
from shared.identifiers import PeerId
from shared.messages import QueryStatus, RankFailed, RankHello, StatusReported
from tests.unit.scheduler.in_memory_world import GATEWAY, InMemoryWorld
from tests.unit.scheduler.world_factory import MakeWorld


def pids(world: InMemoryWorld) -> list[int]:
    """Return the process ids that the scheduler wants to be gone."""
    world.tell(GatewayMessageReceived(GATEWAY, QueryStatus()))
    assert world.status is not None
    assert all(one.host == "localhost" for one in world.status.dismissed)
    return [one.pid for one in world.status.dismissed]


def test_everybody_on_the_gateway_link_is_told_at_once(make_world: MakeWorld) -> None:
    """The very event that ends an epoch tells every peer who may have to be killed."""
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
def test_who_is_seen_to_end_is_forgotten(make_world: MakeWorld, cause: str) -> None:
    """A goodbye, or another session of the process, shows that it obeys."""
    world = make_world(ranks=2)
    first, second = world.ranks
    world.tell(RankLost(first, cause))
    assert pids(world) == [2]
    world.tell(RankLost(second, cause))
    assert pids(world) == []


@pytest.mark.parametrize(
    "cause", ["silent for 10 s", "its key is no longer allowed", "no session with b'rank-1'"]
)
def test_silence_is_no_end(make_world: MakeWorld, cause: str) -> None:
    """A stopped process is silent, before its epoch ends or after; it stays on the list."""
    world = make_world(ranks=2)
    first, second = world.ranks
    world.tell(RankLost(first, cause))
    world.tell(RankLost(second, cause))
    assert sorted(pids(world)) == [1, 2]


def test_a_missed_step_deadline_names_all_ranks(make_world: MakeWorld) -> None:
    """The scheduler cannot know which rank is stuck: all are told to leave, all are named."""
    world = make_world(ranks=2)
    world.submit("a", [1], 3)
    world.advance(61.0)
    assert sorted(pids(world)) == [1, 2]
    world.start_rank(0)
    world.start_rank(1)
    world.settle()


def test_a_successor_clears_its_predecessor(make_world: MakeWorld) -> None:
    """A process that comes back as the same rank on the same host proves the old one gone."""
    world = make_world(ranks=2)
    world.tell(RankLost(next(iter(world.ranks)), "silent for 10 s"))
    assert sorted(pids(world)) == [1, 2]
    world.start_rank(0)
    assert pids(world) == [2]
    world.start_rank(1)
    assert pids(world) == []


def test_a_successor_that_ends_the_epoch_clears_too(make_world: MakeWorld) -> None:
    """A new process may come before the old one's loss is known: only the others are named."""
    world = make_world(ranks=2)
    world.start_rank(0)
    assert pids(world) == [2]


def test_an_innocent_with_the_same_number_is_spared(make_world: MakeWorld) -> None:
    """Process ids come again: a new rank with a dismissed one's number takes it off the list."""
    world = make_world()
    world.tell(RankLost(next(iter(world.ranks)), "silent for 10 s"))
    assert pids(world) == [1]
    hello = RankHello(
        rank=-1,
        host="localhost",
        pid=1,
        data_address="127.0.0.1:9",
        launched=False,
        device="cpu",
        mlx_version="0",
        memory_bytes=1,
    )
    peer = PeerId(b"rank-new")
    world.tell(RankConnected(peer))
    world.tell(RankMessageReceived(peer, hello))
    assert pids(world) == []


def test_a_rank_that_failed_is_named_until_it_is_gone(make_world: MakeWorld) -> None:
    """Saying that one ends is not having ended: the goodbye is."""
    world = make_world()
    peer = next(iter(world.ranks))
    failed = RankFailed(rank=0, epoch=1, detail="x", permanent=False)
    world.tell(RankMessageReceived(peer, failed))
    assert pids(world) == [1]
    world.tell(RankLost(peer, "goodbye"))
    assert pids(world) == []


def test_the_list_is_bounded_in_time_and_number(make_world: MakeWorld) -> None:
    """After a minute a number may be anybody's; and a list that only grows is a leak."""
    world = make_world()
    for number in range(dismissed_ranks.COUNT_MAX + 5):
        world.tell(RankLost(next(iter(world.ranks)), "silent for 10 s"))
        # Another host each time, so that no successor clears anybody.
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


def test_one_process_is_never_two_ranks(make_world: MakeWorld) -> None:
    """A process that says hello over a second connection replaces its first."""
    world = make_world(ranks=2)
    world.tell(RankLost(PeerId(world.ranks.pop(next(iter(world.ranks))).peer), "goodbye"))
    hello = RankHello(
        rank=-1,
        host=world.host,
        pid=50,
        data_address="127.0.0.1:9",
        launched=False,
        device="cpu",
        mlx_version="0",
        memory_bytes=1,
    )
    for peer in (b"rank-x", b"rank-y"):
        world.tell(RankMessageReceived(PeerId(peer), hello))
    assert not world.ranks, "two connections of one process make no world of two"
    world.start_rank(-1)
    assert set(world.ranks) == {b"rank-y", b"rank-3"}
    # Its order to join was lost with its connection: it says hello again.
    world.tell(RankMessageReceived(PeerId(b"rank-z"), hello))
    assert 50 not in [one.pid for one in world.core._world.dismissed.report(world.now_s)]
    assert {b"rank-y", b"rank-3"} <= set(world.dismissed)
