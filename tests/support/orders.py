"""Messages between scheduler and ranks, with defaults for tests."""

from typing import Any

from shared.messages import JoinWorld, RankHello


def join_order(rank: int = 0, size: int = 1, **changes: Any) -> JoinWorld:
    """Return the order to join a world: over the ring, or without a backend for one rank.

    Args:
        rank: number of the rank that receives the order.
        size: number of ranks in the world.
        changes: fields that differ from the defaults here.
    """
    fields: dict[str, Any] = {
        "epoch": 1,
        "rank": rank,
        "world_size": size,
        "backend": "ring" if size > 1 else "off",
        "environment": {},
        "files": {},
        "synchronization": "broadcast",
        "receipt_logits": True,
        "init_deadline_s": 1.0,
        "load_deadline_s": 1.0,
        "step_deadline_max_s": 1.0,
        **changes,
    }
    return JoinWorld(**fields)


def rank_hello(rank: int = 0, **changes: Any) -> RankHello:
    """Return the hello of a rank on a CPU that no launcher started.

    Args:
        rank: number of the rank; -1: none yet.
        changes: fields that differ from the defaults here.
    """
    fields: dict[str, Any] = {
        "rank": rank,
        "host": "h",
        "pid": 1,
        "data_address": "",
        "launched": False,
        "device": "cpu",
        "mlx_version": "0",
        "memory_bytes": 1,
        **changes,
    }
    return RankHello(**fields)
