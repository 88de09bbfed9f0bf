"""What ranks hear when an epoch ends for its canary: they take back what they had proven by it."""

import json

import pytest

from services.scheduler.core import SchedulerCore
from services.scheduler.events import Action, RankMessageReceived, SendToRanks
from shared.configuration.loading import config_from_tree
from shared.identifiers import PeerId
from shared.messages import LeaveWorld, RankFailed
from tests.unit.scheduler.rank_failures import rank_hello
from tests.unit.scheduler.world.test_canary import ready

PEERS = [PeerId(b"rank-0"), PeerId(b"rank-1")]


def _farewells(*told: RankMessageReceived) -> list[LeaveWorld]:
    """Return how ranks are told to leave, after two have joined and then said these things."""
    world = {"size": 2, "backend": "jaccl", "jaccl_devices": "x", "jaccl_coordinator": "a:1"}
    matrix = json.dumps([[None, "rdma_en5"], ["rdma_en4", None]])
    core = SchedulerCore(config_from_tree({"world": world}), matrix)
    actions: list[Action] = []
    for rank, peer in enumerate(PEERS):
        actions += core.handle(RankMessageReceived(peer, rank_hello(rank, rank)), 1.0)
    for one in told:
        actions += core.handle(one, 2.0)
    messages = [action.message for action in actions if isinstance(action, SendToRanks)]
    return [one for one in messages if isinstance(one, LeaveWorld)]


def test_findings_that_differ_are_a_failed_canary() -> None:
    """Only the scheduler compares them, so both ranks hear of it from here."""
    told = [
        RankMessageReceived(peer, ready(rank, "a", "bc"[rank])) for rank, peer in enumerate(PEERS)
    ]

    (order,) = _farewells(*told)

    assert order.cause == "canary"
    assert order.detail.startswith("The canary differs: ")


@pytest.mark.parametrize(("cause", "is_canary"), [("canary", True), ("memory", False)])
def test_a_rank_that_fails_is_one_only_by_its_canary(cause: str, is_canary: bool) -> None:
    """A peer's wrong sum counts for all; that its memory was too small does not."""
    failed = RankFailed(
        rank=1,
        epoch=1,
        detail="So it is.",
        permanent=False,
        cause=cause,  # type: ignore[arg-type]
    )

    (order,) = _farewells(RankMessageReceived(PEERS[1], failed))

    assert order.detail.endswith("Rank 1 failed: So it is.")
    assert (order.cause == "canary") == is_canary
