"""Rendezvous, loading and the end of an epoch."""

from typing import Literal

import msgspec

from services.scheduler.core import SchedulerCore
from services.scheduler.events import (
    AllowSilence,
    RankLost,
    RankMessageReceived,
    SendToRanks,
    TimePassed,
)
from shared.configuration.loading import config_from_tree
from shared.identifiers import PeerId
from shared.messages import (
    JoinWorld,
    LeaveWorld,
    RankHello,
    RankLoading,
    RequestRejected,
)
from tests.unit.scheduler.support.in_memory_world import InMemoryWorld, completion
from tests.unit.scheduler.support.rank_messages import HELLO, READY
from tests.unit.scheduler.support.world_factory import MakeWorld


def join_orders(core: SchedulerCore, peer: bytes, hello: RankHello) -> dict[bytes, JoinWorld]:
    """Say hello as a peer; return the orders to join by peer."""
    actions = core.handle(RankMessageReceived(PeerId(peer), hello), 0.0)
    return {
        bytes(action.peers[0]): action.message
        for action in actions
        if isinstance(action, SendToRanks) and isinstance(action.message, JoinWorld)
    }


OTHER = msgspec.structs.replace(HELLO, pid=2, data_address="127.0.0.1:5001")


def make_core(**world: object) -> SchedulerCore:
    """Return a core that waits for two ranks."""
    return SchedulerCore(config_from_tree({"world": {"size": 2, **world}}))


def test_epoch_begins_when_all_ranks_are_connected() -> None:
    """The first hello starts nothing; the second makes both ranks join, each with its
    environment."""
    core = make_core()
    assert join_orders(core, b"x", HELLO) == {}
    orders = join_orders(core, b"y", OTHER)
    assert {message.rank for message in orders.values()} == {0, 1}
    assert {message.epoch for message in orders.values()} == {1}
    for message in orders.values():
        assert message.environment["MLX_RANK"] == str(message.rank)
        assert message.files["MLX_HOSTFILE"] == '[["127.0.0.1:5000"], ["127.0.0.1:5001"]]'


def test_rank_with_fixed_number_keeps_it_in_any_arrival_order() -> None:
    """`--rank` and mlx.launch decide the rank, in any order of arrival."""
    core = make_core()
    join_orders(core, b"x", msgspec.structs.replace(HELLO, rank=1))
    orders = join_orders(core, b"y", msgspec.structs.replace(HELLO, rank=0))
    assert orders[b"x"].rank == 1
    assert orders[b"y"].rank == 0


def test_ranks_started_by_mlx_launch_keep_their_environment() -> None:
    """A rank that MLX's launcher has started gets no other environment."""
    core = make_core()
    launched = msgspec.structs.replace(HELLO, launched=True)
    join_orders(core, b"x", msgspec.structs.replace(launched, rank=0))
    orders = join_orders(core, b"y", msgspec.structs.replace(launched, rank=1))
    assert all(not message.environment and not message.files for message in orders.values())


def test_receipt_digests_include_logits_only_when_devices_are_equal() -> None:
    """Different devices need not agree in the last bit, so the digest omits the logits."""
    for device, expected in (("cpu", True), ("gpu", False)):
        core = make_core()
        join_orders(core, b"x", HELLO)
        orders = join_orders(core, b"y", msgspec.structs.replace(OTHER, device=device))
        assert {message.receipt_logits for message in orders.values()} == {expected}


def test_ranks_with_different_models_are_configuration_failure() -> None:
    """Ranks with different fingerprints are dismissed with a reason."""
    core = make_core()
    join_orders(core, b"x", HELLO)
    join_orders(core, b"y", OTHER)
    core.handle(RankMessageReceived(PeerId(b"x"), READY), 1.0)
    other = msgspec.structs.replace(READY, rank=1, model_fingerprint="other")
    actions = core.handle(RankMessageReceived(PeerId(b"y"), other), 1.0)
    leaves = [
        action.message
        for action in actions
        if isinstance(action, SendToRanks) and isinstance(action.message, LeaveWorld)
    ]
    assert len(leaves) == 1
    assert "different models (rank 0 on mac same, rank 1 on mac other)" in leaves[0].detail
    # Another start would load the same models again, which may take long.
    assert core._world.recovery.failure == "configuration"
    assert core._world.explain() == leaves[0].detail
    third = msgspec.structs.replace(HELLO, pid=3)
    assert (
        join_orders(core, b"z", third)
        == join_orders(core, b"w", msgspec.structs.replace(OTHER, pid=4))
        == {}
    )


def test_epoch_ends_when_joining_or_loading_exceeds_deadline() -> None:
    """Ranks that do not join, or never finish loading, end the epoch by the scheduler's clock."""
    stages: list[tuple[Literal["joining", "loading"], float]]
    stages = [("joining", 61.0), ("loading", 3_661.0)]
    for stage, after_s in stages:
        core = make_core()
        join_orders(core, b"x", HELLO)
        join_orders(core, b"y", OTHER)
        for peer in (b"x", b"y"):
            core.handle(
                RankMessageReceived(PeerId(peer), RankLoading(stage=stage, loaded=0.5)), 1.0
            )
        leaves_at_s = []
        for now_s in range(1, 3_800):
            messages = [
                getattr(one, "message", None) for one in core.handle(TimePassed(), float(now_s))
            ]
            leaves_at_s += [now_s for one in messages if isinstance(one, LeaveWorld)]
        assert leaves_at_s == [after_s]


def test_silence_of_ranks_is_allowed_from_order_to_join_until_they_have_joined() -> None:
    """A rank inside MLX's init cannot send: its silence counts again when it reports loading."""
    core = make_core()
    join_orders(core, b"x", HELLO)
    found: list[AllowSilence] = []

    def tell(peer: bytes, message: RankHello | RankLoading) -> None:
        actions = core.handle(RankMessageReceived(PeerId(peer), message), 1.0)
        found.extend(one for one in actions if isinstance(one, AllowSilence))

    tell(b"y", OTHER)
    both = (PeerId(b"x"), PeerId(b"y"))
    assert found == [AllowSilence(both, is_allowed=True)]
    stages: list[Literal["joining", "init"]] = ["joining", "init"]
    for stage in stages:
        tell(b"y", RankLoading(stage=stage, loaded=0.0))
    assert len(found) == 1
    for _ in range(2):
        tell(b"y", RankLoading(stage="loading", loaded=0.0))
    assert found[1:] == [AllowSilence((PeerId(b"y"),), is_allowed=False)]


def test_dismissed_rank_that_is_still_joining_may_not_be_silent_for_ever() -> None:
    """When an epoch ends, the silence of a rank inside MLX's init counts again, so that its link
    ends."""
    core = make_core()
    join_orders(core, b"x", HELLO)
    join_orders(core, b"y", OTHER)
    actions = core.handle(RankLost(PeerId(b"x"), "gone"), 1.0)

    assert AllowSilence((PeerId(b"y"),), is_allowed=False) in actions


def test_cause_of_ended_start_says_which_ranks_are_inside_init() -> None:
    """A missed deadline and a lost rank are reported with the rank's host and place in joining."""
    causes = []
    for event in (TimePassed(), RankLost(PeerId(b"y"), "gone")):
        core = make_core(backend="ring")
        join_orders(core, b"x", HELLO)
        join_orders(core, b"y", OTHER)
        message = RankLoading(stage="init", loaded=0.0)
        core.handle(RankMessageReceived(PeerId(b"y"), message), 1.0)
        for now_s in range(1, 61):
            core.handle(TimePassed(), float(now_s) - 0.5)
        actions = core.handle(event, 61.0)
        (leave,) = {one.message for one in actions if isinstance(one, SendToRanks)}
        assert isinstance(leave, LeaveWorld)
        causes.append(leave.detail)
    host = HELLO.host
    assert causes[0].startswith(
        "The ranks have not joined within 60 s (scheduler.init_deadline_s): "
        f"rank 1 on {host} is inside MLX's init of ring, "
        f"rank 0 on {host} is on the way to MLX's init of ring."
    )
    assert causes[1] == "Rank 1 is lost inside MLX's init of ring (gone)."


def test_status_lists_every_rank_and_reason_for_unready_world(make_world: MakeWorld) -> None:
    """The report lists every rank, also missing ones, and says why the world is not ready."""
    world = make_world(ranks=2)
    assert world.status is not None
    assert [rank.state for rank in world.status.ranks] == ["ready", "ready"]
    assert world.status.ready
    assert world.status.context_tokens_max == 8_192
    core = make_core()
    join_orders(core, b"x", HELLO)
    assert "1 of 2 ranks" in core._world.explain()


def test_request_before_first_ready_world_is_rejected_with_retry_time() -> None:
    """Before any world was ready a request is rejected with a retry time."""
    world = InMemoryWorld(config_from_tree({"world": {"size": 2}}))
    world.submit("a", [1], 1)
    end = world.ends["a"]
    assert isinstance(end, RequestRejected)
    assert (end.cause, end.retry_after_s) == ("not_ready", 5.0)


def test_hello_of_rank_restarted_while_idle_ends_epoch(make_world: MakeWorld) -> None:
    """A rank that was killed while idle is noticed by its successor's hello."""
    world = make_world(ranks=2)
    world.start_rank(1)
    assert len(world.dismissed) == 2
    world.start_rank(0)
    world.submit("a", [1, 2], 3)
    world.settle()
    assert world.tokens["a"] == completion([1, 2], 3)
    assert world.status is not None
    assert world.status.epoch == 2


def test_first_prompt_chunk_follows_prefill_time_of_slowest_rank() -> None:
    """Ranks report how long a prompt took before they were ready, and the first chunks fit the
    slowest of them."""
    core = make_core()
    join_orders(core, b"x", HELLO)
    join_orders(core, b"y", OTHER)
    for peer, rank, milliseconds in ((b"x", 0, 10.0), (b"y", 1, 640.0)):
        ready = msgspec.structs.replace(
            READY, rank=rank, prefill_tokens=64, prefill_ms=milliseconds
        )
        core.handle(RankMessageReceived(PeerId(peer), ready), 1.0)
    assert core._batch.timing.prefill_token_ms() == 10.0
