"""Status reports for tests."""

from typing import Any, Literal

from shared.messages import RankStatus, StatusReported


def status_report(**changes: Any) -> StatusReported:
    """Return the status report of a ready world of two ranks, with changes."""
    fields: dict[str, Any] = {
        "ready": True,
        "reason": "",
        "draining": False,
        "model": "lockstep-demo",
        "model_fingerprint": "f00d",
        "epoch": 1,
        "world_size": 2,
        "backend": "ring",
        "ranks": [rank_status(0), rank_status(1)],
        "running": 3,
        "waiting": 1,
        "kv_tokens_used": 1_024,
        "kv_tokens_max": 81_920,
        "context_tokens_max": 8_192,
        "steps": 1_234,
        "counters": {"tokens_total": 5_000.0},
        "gauges": {"tokens_per_second": 123.456},
    }
    return StatusReported(**{**fields, **changes})


def rank_status(
    number: int,
    state: Literal["missing", "joining", "loading", "ready", "lost"] = "ready",
    loaded: float = 0.0,
) -> RankStatus:
    """Return the status of one rank."""
    return RankStatus(
        rank=number,
        state=state,
        host="mac-1",
        pid=100 + number,
        device="gpu",
        blas="OpenBLAS 0.3",
        mlx_version="0.32.4",
        loaded=loaded,
        memory_bytes=2**30,
    )
