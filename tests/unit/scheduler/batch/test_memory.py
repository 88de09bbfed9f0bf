"""Running out of device memory: every cut of the KV budget leaves less than there was."""

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
from shared.messages import QueryStatus, RankFailed, RankReady, StatusReported
from tests.unit.scheduler.in_memory_world import GATEWAY
from tests.unit.scheduler.rank_failures import rank_hello

READY = RankReady(
    rank=0,
    model_fingerprint="same",
    kv_bytes_per_token=10,
    kv_bytes_per_row=0,
    kv_budget_bytes=100_000,
    context_tokens_max=8_192,
    vocab_size=10,
    can_roll_back=True,
    draft_method="draft_model",
    draft_bytes_per_token=10,
    blas="",
)
OTHER = msgspec.structs.replace(READY, rank=1, kv_bytes_per_token=1, kv_budget_bytes=11_000)
"""With almost nothing of the model, and as much of the draft model as everybody."""


def begin(core: SchedulerCore, epoch: int) -> tuple[int, float]:
    """Bring up both ranks; return how many tokens fit, and the budget in bytes."""
    for rank in range(2):
        core.handle(
            RankMessageReceived(peer(rank, epoch), rank_hello(rank, 2 * epoch + rank)), float(epoch)
        )
    for rank, report in enumerate((READY, OTHER)):
        core.handle(RankMessageReceived(peer(rank, epoch), report), float(epoch))
    actions = core.handle(GatewayMessageReceived(GATEWAY, QueryStatus()), float(epoch))
    (status,) = (one.message for one in actions if isinstance(one, SendToGateway))
    assert isinstance(status, StatusReported)
    assert status.ready, status.reason
    return status.kv_tokens_max, status.gauges["kv_budget_bytes"]


def peer(rank: int, epoch: int) -> PeerId:
    """Return the rank process of an epoch."""
    return PeerId(b"rank-%d-%d" % (rank, epoch))


def test_a_cut_counts_where_drafts_leave_less_room_than_the_model() -> None:
    """The rank that draft rows fill first is another than the one that has least for the model."""
    speculation = {"method": "draft_model", "draft_model": "small"}
    core = SchedulerCore(config_from_tree({"world": {"size": 2}, "speculation": speculation}))
    core.handle(GatewayConnected(GATEWAY), 0.0)
    found = []
    for epoch in range(1, 5):
        found.append(begin(core, epoch))
        for rank in range(2):
            failed = RankFailed(rank=rank, epoch=epoch, detail="x", permanent=False, cause="memory")
            core.handle(RankMessageReceived(peer(rank, epoch), failed), float(epoch))
    assert [tokens for tokens, _ in found] == [1_000, 800, 640, 512]
    assert [budget for _, budget in found] == [20_000, 16_000, 12_800, 10_240]
