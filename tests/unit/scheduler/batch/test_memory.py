"""Ranks that run out of device memory: every cut of the KV budget reduces the tokens that fit."""

import msgspec

from services.scheduler.core import SchedulerCore
from services.scheduler.events import (
    GatewayConnected,
    GatewayMessageReceived,
    RankMessageReceived,
    SendToGateway,
)
from shared.configuration.loading import config_from_tree
from shared.identifiers import PeerId
from shared.messages import QueryStatus, RankFailed, StatusReported
from tests.unit.scheduler.support.in_memory_world import GATEWAY
from tests.unit.scheduler.support.rank_messages import READY, rank_hello

LARGE_RANK = msgspec.structs.replace(
    READY,
    kv_budget_bytes=100_000,
    context_tokens_max=8_192,
    draft_method="draft_model",
    draft_bytes_per_token=10,
)
SMALL_RANK = msgspec.structs.replace(
    LARGE_RANK, rank=1, kv_bytes_per_token=1, kv_budget_bytes=11_000
)
"""A rank with little of the model and an equal share of the draft model."""


def start_epoch(core: SchedulerCore, epoch: int) -> tuple[int, float]:
    """Start both ranks; return how many tokens fit, and the budget in bytes."""
    for rank in range(2):
        core.handle(
            RankMessageReceived(peer(rank, epoch), rank_hello(rank, 2 * epoch + rank)), float(epoch)
        )
    for rank, report in enumerate((LARGE_RANK, SMALL_RANK)):
        core.handle(RankMessageReceived(peer(rank, epoch), report), float(epoch))
    actions = core.handle(GatewayMessageReceived(GATEWAY, QueryStatus()), float(epoch))
    (status,) = (one.message for one in actions if isinstance(one, SendToGateway))
    assert isinstance(status, StatusReported)
    assert status.ready, status.reason
    return status.kv_tokens_max, status.gauges["kv_budget_bytes"]


def peer(rank: int, epoch: int) -> PeerId:
    """Return the peer id of a rank in an epoch."""
    return PeerId(b"rank-%d-%d" % (rank, epoch))


def test_each_memory_failure_cuts_kv_budget_to_four_fifths_with_draft_rows() -> None:
    """Each memory failure cuts the KV budget to four fifths when draft rows limit one rank and the
    model's rows limit another."""
    speculation = {"method": "draft_model", "draft_model": "small"}
    core = SchedulerCore(config_from_tree({"world": {"size": 2}, "speculation": speculation}))
    core.handle(GatewayConnected(GATEWAY), 0.0)
    budgets = []
    for epoch in range(1, 5):
        budgets.append(start_epoch(core, epoch))
        for rank in range(2):
            failed = RankFailed(rank=rank, epoch=epoch, detail="x", permanent=False, cause="memory")
            core.handle(RankMessageReceived(peer(rank, epoch), failed), float(epoch))
    assert [tokens for tokens, _ in budgets] == [1_000, 800, 640, 512]
    assert [budget for _, budget in budgets] == [20_000, 16_000, 12_800, 10_240]
