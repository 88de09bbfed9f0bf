"""Orders to refuse new requests, to stop, and to make room for another scheduler."""

import pytest

from services.scheduler.events import (
    DrainRequested,
    GatewayConnected,
    GatewayMessageReceived,
    HandOverRequested,
    RankLost,
    SendToGateway,
)
from shared.identifiers import PeerId
from shared.messages import (
    LeaveWorld,
    OrderDrain,
    RequestFailed,
    RequestRejected,
    StatusReported,
)
from tests.unit.scheduler.in_memory_world import GATEWAY, InMemoryWorld, completion
from tests.unit.scheduler.world_factory import MakeWorld

OPERATOR = PeerId(b"operator-1f")


def order(world: InMemoryWorld, *, is_on: bool, peer: PeerId = OPERATOR) -> None:
    """Let somebody order to drain, or to take requests again."""
    world.tell(GatewayMessageReceived(peer, OrderDrain(is_on=is_on)))


def status(world: InMemoryWorld) -> StatusReported:
    """Return the last report that anybody got."""
    assert world.status is not None
    return world.status


def test_an_operator_drains_and_takes_it_back(make_world: MakeWorld) -> None:
    """New requests are refused and readiness is off at once; what runs goes on; nothing stops."""
    world = make_world()
    world.submit("runs", [1, 2], 30)
    world.submit("waits", [3], 30)
    world.step()
    order(world, is_on=True)
    assert (status(world).draining, status(world).ready) == (True, False)
    assert "operator" in status(world).reason
    world.submit("new", [1], 1)
    refused = world.ends["new"]
    assert isinstance(refused, RequestRejected)
    assert (refused.cause, refused.retry_after_s) == ("draining", 5.0)
    world.settle()
    assert world.tokens["runs"] == completion([1, 2], 30)
    assert world.tokens["waits"] == completion([3], 30)
    world.advance(3_600.0)
    assert world.exit_code is None, "an operator's drain never stops the process"

    order(world, is_on=False)
    assert (status(world).draining, status(world).ready) == (False, True)
    world.submit("later", [5], 2)
    world.settle()
    assert world.tokens["later"] == completion([5], 2)


def test_everybody_hears_of_a_drain_at_once(make_world: MakeWorld) -> None:
    """The operator gets the answer, gateways the news, in one step."""
    world = make_world()
    world.tell(GatewayConnected(OPERATOR))
    for is_on in (True, True, False):
        actions = world.core.handle(
            GatewayMessageReceived(OPERATOR, OrderDrain(is_on=is_on)), world.now_s
        )
        told = [(one.gateway, one.message) for one in actions if isinstance(one, SendToGateway)]
        assert {peer for peer, _ in told} == {OPERATOR, GATEWAY}
        for _, message in told:
            assert isinstance(message, StatusReported)
            assert message.draining is is_on


@pytest.mark.parametrize("peer", [b"gateway-1", b"status-2", b"rank-3", b"operators-4", b""])
def test_only_an_operator_may_order_it(make_world: MakeWorld, peer: bytes) -> None:
    """Another identity's order is refused, named in the log, and changes nothing."""
    world = make_world()
    order(world, is_on=True, peer=PeerId(peer))
    assert [one.fields["message"] for one in world.log_lines if one.event == "message_refused"] == [
        "OrderDrain"
    ]
    world.submit("a", [1], 2)
    world.settle()
    assert world.tokens["a"] == completion([1], 2)


def test_a_drained_server_goes_on_with_what_it_had(make_world: MakeWorld) -> None:
    """A gateway that lost its link offers running requests again: they are not new ones."""
    world = make_world()
    order(world, is_on=True)
    whole = completion([9, 8], 6)
    world.tokens["a"] = whole[:3]
    world.submit("a", [9, 8], 6, generated=whole[:3])
    world.settle()
    assert world.tokens["a"] == whole


@pytest.mark.parametrize("stops", [True, False])
def test_a_repeated_submit_is_not_refused_while_draining(
    make_world: MakeWorld, stops: bool
) -> None:
    """An open request has one end, however often its gateway offers it."""
    world = make_world()
    world.submit("a", [1], 5)
    world.step()
    if stops:
        world.tell(DrainRequested())
    else:
        order(world, is_on=True)
    world.submit("a", [1], 5)
    assert "a" not in world.ends
    world.settle()
    assert world.tokens["a"] == completion([1], 5)


def test_an_order_to_stop_outlasts_an_operators(make_world: MakeWorld) -> None:
    """Taking back a drain does not take back SIGTERM."""
    world = make_world()
    world.submit("a", [1], 5)
    world.step()
    world.tell(DrainRequested())
    order(world, is_on=False)
    assert status(world).draining
    world.settle()
    assert world.exit_code == 0
    assert world.tokens["a"] == completion([1], 5)


def test_time_over_ends_what_still_runs_and_says_so(make_world: MakeWorld) -> None:
    """After drain_s running requests fail with a reason, and the exit code is not 0."""
    world = make_world(drain_s=10.0)
    world.submit("a", [1], 5_000)
    world.step()
    world.tell(DrainRequested())
    world.advance(9.5)
    assert world.exit_code is None
    world.advance(1.0)
    end = world.ends["a"]
    assert isinstance(end, RequestFailed)
    assert end.cause == "stopping"
    world.tell(DrainRequested())
    assert world.exit_code == 69, "a third signal makes it no cleaner"


@pytest.mark.parametrize("orders", [1, 2])
@pytest.mark.parametrize("state", ["ready", "loading", "gathering", "failed", "drained"])
def test_stopping_without_work_is_clean(make_world: MakeWorld, state: str, orders: int) -> None:
    """Nothing was cut off, so the exit code is 0, whatever went on and however often it came."""
    world = make_world(ranks=2, epochs_failed_max=1 if state == "failed" else 1_000)
    if state == "drained":
        order(world, is_on=True)
    elif state != "ready":
        if state == "failed":
            world.submit("a", [1], 5)
        world.tell(RankLost(next(iter(world.ranks)), "goodbye"))
        world.ranks.clear()
    if state == "loading":
        world._join = lambda peer, message: None  # type: ignore[method-assign]
        world.start_rank(0)
        world.start_rank(1)
    expected = "ready" if state == "drained" else state
    assert world.core._world.state.value == expected
    for _ in range(orders):
        world.tell(DrainRequested())
    world.advance(1.0)
    assert world.exit_code == 0


def test_a_scheduler_that_stops_begins_no_epoch(make_world: MakeWorld) -> None:
    """A spare process is not told to join a world whose scheduler ends."""
    world = make_world()
    spare = world.start_rank(-1)
    for event in (DrainRequested(), DrainRequested()):
        world.tell(event)
    assert world.exit_code == 0
    assert spare not in world.ranks


def test_handing_over_ends_no_request(make_world: MakeWorld) -> None:
    """Ranks leave, the process ends with 0 at once, and every request is left to its gateway."""
    world = make_world(ranks=2)
    for name, prompt in (("a", [1, 2]), ("b", [3])):
        world.submit(name, prompt, 500)
    for _ in range(3):
        world.step()
    actions = world.core.handle(HandOverRequested(), world.now_s)
    leaves = [one for one in actions if isinstance(getattr(one, "message", None), LeaveWorld)]
    assert [len(getattr(one, "peers", ())) for one in leaves] == [2]
    for action in actions:
        world._perform(action)
    assert world.exit_code == 0
    assert not world.ends
    assert sorted(one.pid for one in status(world).dismissed) == [1, 2], "who may not obey"

    # What its gateway does next: the same requests, with their tokens, for another scheduler.
    after = make_world(ranks=2)
    for name, prompt in (("a", [1, 2]), ("b", [3])):
        after.tokens[name] = world.tokens[name]
        after.submit(name, prompt, 500, generated=list(world.tokens[name]))
    after.settle()
    assert after.tokens["a"] == completion([1, 2], 500)
    assert after.tokens["b"] == completion([3], 500)
    for name in "ab":
        world.ends[name] = after.ends[name]
