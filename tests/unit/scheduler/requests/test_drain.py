"""Orders to refuse new requests, to stop, and to hand over to another scheduler."""

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
from tests.unit.scheduler.support.in_memory_world import GATEWAY, InMemoryWorld, completion
from tests.unit.scheduler.support.world_factory import MakeWorld

OPERATOR = PeerId(b"operator-1f")


def order_drain(world: InMemoryWorld, *, is_on: bool, peer: PeerId = OPERATOR) -> None:
    """Let a peer order a drain, or its end."""
    world.tell(GatewayMessageReceived(peer, OrderDrain(is_on=is_on)))


def last_status(world: InMemoryWorld) -> StatusReported:
    """Return the last status report that was sent."""
    assert world.status is not None
    return world.status


def test_operator_drain_refuses_new_requests_until_withdrawn(make_world: MakeWorld) -> None:
    """New requests are refused and readiness is off at once; open requests finish; the process
    stays."""
    world = make_world()
    world.submit("runs", [1, 2], 30)
    world.submit("waits", [3], 30)
    world.step()
    order_drain(world, is_on=True)
    assert (last_status(world).draining, last_status(world).ready) == (True, False)
    assert "operator" in last_status(world).reason
    world.submit("new", [1], 1)
    refused = world.ends["new"]
    assert isinstance(refused, RequestRejected)
    assert (refused.cause, refused.retry_after_s) == ("draining", 5.0)
    world.settle()
    assert world.tokens["runs"] == completion([1, 2], 30)
    assert world.tokens["waits"] == completion([3], 30)
    world.advance(3_600.0)
    assert world.exit_code is None, "a drain by an operator must not stop the process"

    order_drain(world, is_on=False)
    assert (last_status(world).draining, last_status(world).ready) == (False, True)
    world.submit("later", [5], 2)
    world.settle()
    assert world.tokens["later"] == completion([5], 2)


def test_drain_is_reported_to_operator_and_gateways(make_world: MakeWorld) -> None:
    """The operator gets the answer and gateways get the status in the same step."""
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
def test_drain_order_from_peer_other_than_operator_is_refused(
    make_world: MakeWorld, peer: bytes
) -> None:
    """An order from another identity is refused and logged, and changes nothing."""
    world = make_world()
    order_drain(world, is_on=True, peer=PeerId(peer))
    assert [one.fields["message"] for one in world.log_lines if one.event == "message_refused"] == [
        "OrderDrain"
    ]
    world.submit("a", [1], 2)
    world.settle()
    assert world.tokens["a"] == completion([1], 2)


def test_draining_scheduler_accepts_requests_resumed_by_gateway(make_world: MakeWorld) -> None:
    """A gateway that lost its link resubmits running requests; a drain does not refuse them."""
    world = make_world()
    order_drain(world, is_on=True)
    whole = completion([9, 8], 6)
    world.tokens["a"] = whole[:3]
    world.submit("a", [9, 8], 6, generated=whole[:3])
    world.settle()
    assert world.tokens["a"] == whole


@pytest.mark.parametrize("stops", [True, False])
def test_repeated_submit_of_open_request_is_not_refused_while_draining(
    make_world: MakeWorld, stops: bool
) -> None:
    """An open request ends once, however often its gateway submits it."""
    world = make_world()
    world.submit("a", [1], 5)
    world.step()
    if stops:
        world.tell(DrainRequested())
    else:
        order_drain(world, is_on=True)
    world.submit("a", [1], 5)
    assert "a" not in world.ends
    world.settle()
    assert world.tokens["a"] == completion([1], 5)


def test_end_of_operator_drain_does_not_cancel_stop_by_sigterm(make_world: MakeWorld) -> None:
    """The end of an operator's drain does not cancel SIGTERM."""
    world = make_world()
    world.submit("a", [1], 5)
    world.step()
    world.tell(DrainRequested())
    order_drain(world, is_on=False)
    assert last_status(world).draining
    world.settle()
    assert world.exit_code == 0
    assert world.tokens["a"] == completion([1], 5)


def test_running_requests_fail_when_drain_time_is_over(make_world: MakeWorld) -> None:
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
    assert world.exit_code == 69, "a third signal does not change the exit code"


@pytest.mark.parametrize("orders", [1, 2])
@pytest.mark.parametrize("state", ["ready", "loading", "gathering", "failed", "drained"])
def test_scheduler_stopped_without_open_requests_exits_with_zero(
    make_world: MakeWorld, state: str, orders: int
) -> None:
    """Without open requests the exit code is 0 in every state and for repeated signals."""
    world = make_world(ranks=2, epochs_failed_max=1 if state == "failed" else 1_000)
    if state == "drained":
        order_drain(world, is_on=True)
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


def test_stopping_scheduler_begins_no_epoch_with_spare_process(make_world: MakeWorld) -> None:
    """A spare process is not ordered to join a world whose scheduler stops."""
    world = make_world()
    spare = world.start_rank(-1)
    for event in (DrainRequested(), DrainRequested()):
        world.tell(event)
    assert world.exit_code == 0
    assert spare not in world.ranks


def test_scheduler_exits_with_0_at_hand_over_and_next_one_finishes_requests(
    make_world: MakeWorld,
) -> None:
    """Ranks leave, the process exits with 0 at once, and another scheduler finishes the
    requests.
    """
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
    assert sorted(one.pid for one in last_status(world).dismissed) == [1, 2]

    # Its gateway resubmits the requests with their tokens to another scheduler.
    after = make_world(ranks=2)
    for name, prompt in (("a", [1, 2]), ("b", [3])):
        after.tokens[name] = world.tokens[name]
        after.submit(name, prompt, 500, generated=list(world.tokens[name]))
    after.settle()
    assert after.tokens["a"] == completion([1, 2], 500)
    assert after.tokens["b"] == completion([3], 500)
    for name in "ab":
        world.ends[name] = after.ends[name]
