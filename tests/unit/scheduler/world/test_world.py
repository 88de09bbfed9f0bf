"""Rendezvous, loading and the end of an epoch."""

from typing import Literal

import msgspec

from services.scheduler.core import SchedulerCore
from services.scheduler.events import RankMessageReceived, SendToRanks, TimePassed
from shared.configuration.loading import config_from_tree
from shared.identifiers import PeerId
from shared.messages import (
    JoinWorld,
    LeaveWorld,
    RankHello,
    RankLoading,
    RankReady,
    RequestRejected,
)
from tests.unit.scheduler.in_memory_world import InMemoryWorld, completion
from tests.unit.scheduler.world_factory import MakeWorld

HELLO = RankHello(
    rank=-1,
    host="a",
    pid=1,
    data_address="127.0.0.1:5000",
    launched=False,
    device="cpu",
    mlx_version="1",
    memory_bytes=1,
)
READY = RankReady(
    rank=0,
    model_fingerprint="same",
    kv_bytes_per_token=10,
    kv_bytes_per_row=0,
    kv_budget_bytes=10_000,
    context_tokens_max=100,
    vocab_size=10,
    can_roll_back=True,
    blas="",
)


def joins(core: SchedulerCore, peer: bytes, hello: RankHello) -> dict[bytes, JoinWorld]:
    """Say hello as a peer; return who is told to join as what."""
    actions = core.handle(RankMessageReceived(PeerId(peer), hello), 0.0)
    return {
        bytes(action.peers[0]): action.message
        for action in actions
        if isinstance(action, SendToRanks) and isinstance(action.message, JoinWorld)
    }


OTHER = msgspec.structs.replace(HELLO, pid=2, data_address="127.0.0.1:5001")


def two_ranks(**world: object) -> SchedulerCore:
    """Return a core that waits for two ranks."""
    return SchedulerCore(config_from_tree({"world": {"size": 2, **world}}))


def test_epoch_begins_when_all_are_there() -> None:
    """The first hello starts nothing, the second makes both join, each with its environment."""
    core = two_ranks()
    assert joins(core, b"x", HELLO) == {}
    told = joins(core, b"y", OTHER)
    assert {message.rank for message in told.values()} == {0, 1}
    assert {message.epoch for message in told.values()} == {1}
    for message in told.values():
        assert message.environment["MLX_RANK"] == str(message.rank)
        assert message.files["MLX_HOSTFILE"] == '[["127.0.0.1:5000"], ["127.0.0.1:5001"]]'


def test_a_rank_started_as_a_number_gets_it() -> None:
    """`--rank` and mlx.launch decide the rank, whatever the order of arrival."""
    core = two_ranks()
    joins(core, b"x", msgspec.structs.replace(HELLO, rank=1))
    told = joins(core, b"y", msgspec.structs.replace(HELLO, rank=0))
    assert told[b"x"].rank == 1
    assert told[b"y"].rank == 0


def test_launched_ranks_keep_their_environment() -> None:
    """A rank started by MLX's launcher is not given another environment."""
    core = two_ranks()
    launched = msgspec.structs.replace(HELLO, launched=True)
    joins(core, b"x", msgspec.structs.replace(launched, rank=0))
    told = joins(core, b"y", msgspec.structs.replace(launched, rank=1))
    assert all(not message.environment and not message.files for message in told.values())


def test_receipts_hold_logits_only_where_devices_are_alike() -> None:
    """Unlike devices need not agree in the last bit, so the digest leaves the logits out."""
    for device, expected in (("cpu", True), ("gpu", False)):
        core = two_ranks()
        joins(core, b"x", HELLO)
        told = joins(core, b"y", msgspec.structs.replace(OTHER, device=device))
        assert {message.receipt_logits for message in told.values()} == {expected}


def test_different_models_do_not_start() -> None:
    """Ranks with unequal fingerprints are all sent away, with a reason."""
    core = two_ranks()
    joins(core, b"x", HELLO)
    joins(core, b"y", OTHER)
    core.handle(RankMessageReceived(PeerId(b"x"), READY), 1.0)
    other = msgspec.structs.replace(READY, rank=1, model_fingerprint="other")
    actions = core.handle(RankMessageReceived(PeerId(b"y"), other), 1.0)
    leaves = [
        action.message
        for action in actions
        if isinstance(action, SendToRanks) and isinstance(action.message, LeaveWorld)
    ]
    assert len(leaves) == 1
    assert "different models (rank 0 on a same, rank 1 on a other)" in leaves[0].detail
    # They would load the same again, which may take very long.
    assert core._world.recovery.failure == "configuration"
    assert core._world.explain() == leaves[0].detail
    third = msgspec.structs.replace(HELLO, pid=3)
    assert (
        joins(core, b"z", third) == joins(core, b"w", msgspec.structs.replace(OTHER, pid=4)) == {}
    )


def test_joining_and_loading_have_deadlines() -> None:
    """Ranks that do not join, or never finish loading, end the epoch by the scheduler's clock."""
    stages: list[tuple[Literal["joining", "loading"], float]]
    stages = [("joining", 61.0), ("loading", 3_661.0)]
    for stage, after_s in stages:
        core = two_ranks()
        joins(core, b"x", HELLO)
        joins(core, b"y", OTHER)
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


def test_status_tells_each_rank(make_world: MakeWorld) -> None:
    """The report names every rank, the missing ones too, and why the world is not ready."""
    world = make_world(ranks=2)
    assert world.status is not None
    assert [rank.state for rank in world.status.ranks] == ["ready", "ready"]
    assert world.status.ready
    assert world.status.context_tokens_max == 8_192
    core = two_ranks()
    joins(core, b"x", HELLO)
    assert "1 of 2 ranks" in core._world.explain()


def test_requests_before_the_first_world_are_refused() -> None:
    """Before any world was ready a request is rejected with a retry time, not kept waiting."""
    world = InMemoryWorld(config_from_tree({"world": {"size": 2}}))
    world.submit("a", [1], 1)
    end = world.ends["a"]
    assert isinstance(end, RequestRejected)
    assert (end.cause, end.retry_after_s) == ("not_ready", 5.0)


def test_a_rank_that_was_started_again_ends_the_epoch(make_world: MakeWorld) -> None:
    """A rank killed while nothing runs is noticed by its successor's hello, not after a silence."""
    world = make_world(ranks=2)
    world.start_rank(1)
    assert len(world.dismissed) == 2
    world.start_rank(0)
    world.submit("a", [1, 2], 3)
    world.settle()
    assert world.tokens["a"] == completion([1, 2], 3)
    assert world.status is not None
    assert world.status.epoch == 2
