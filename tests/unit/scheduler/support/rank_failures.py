"""Losses, failures and restarts of ranks in a world in memory."""

from typing import Literal

from services.scheduler.events import GatewayMessageReceived, RankLost, RankMessageReceived
from shared.identifiers import PeerId
from shared.messages import QueryStatus, RankFailed, StatusReported
from tests.unit.scheduler.support.in_memory_world import GATEWAY, InMemoryWorld


def lose_rank(world: InMemoryWorld, victim: PeerId | None = None) -> None:
    """End the epoch by the loss of a rank, by default the first one, as after a SIGKILL."""
    victim = victim or next(iter(world.ranks))
    world.ranks.pop(victim)
    world.tell(RankLost(victim, "silent for 10 s"))


def fail_rank(
    world: InMemoryWorld,
    peer: PeerId,
    detail: str,
    *,
    permanent: bool = False,
    cause: Literal["error", "memory", "unavailable"] = "error",
) -> None:
    """Let a rank report its failure."""
    rank = world.ranks.pop(peer, None)
    world.pending_plans.pop(peer, None)
    number = rank.rank if rank else 0
    failed = RankFailed(rank=number, epoch=1, detail=detail, permanent=permanent, cause=cause)
    world.tell(RankMessageReceived(peer, failed))


def restart_ranks(world: InMemoryWorld) -> None:
    """Start a new process for every rank."""
    for rank in range(world.config.world.size):
        world.start_rank(rank)


def query_status(world: InMemoryWorld) -> StatusReported:
    """Return the scheduler's status report."""
    world.tell(GatewayMessageReceived(GATEWAY, QueryStatus()))
    assert world.status is not None
    return world.status
