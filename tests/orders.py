"""Orders that tests give to ranks."""

from typing import Any

from shared.messages import JoinWorld


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
