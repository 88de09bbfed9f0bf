"""Recorded answers and statuses of a real cluster, for tests to change."""

import json
from typing import Any

from services.commands.verify.gateway import HttpAnswer
from shared.messages import CanaryFinding, RankStatus, StatusReported

WORDS = (" red", ",", " yellow", " and", " blue")


def stream_events(
    words: tuple[str, ...] = WORDS, finish: str = "length", **usage: int
) -> list[bytes]:
    """Return the data of a stream's events with the end mark."""
    chunks: list[dict[str, Any]] = [
        {
            "choices": [
                {
                    "index": 0,
                    "text": word,
                    "logprobs": {
                        "tokens": [word],
                        "token_logprobs": [-0.1],
                        "top_logprobs": [{word: -0.1, " green": -2.5}],
                        "text_offset": [0],
                    },
                    "finish_reason": None,
                }
            ],
            "usage": None,
        }
        for word in words
    ]
    last = {"index": 0, "text": "", "logprobs": None, "finish_reason": finish}
    chunks.append({"choices": [last], "usage": None})
    counts = {"prompt_tokens": 6, "completion_tokens": len(words), "total_tokens": 6, **usage}
    chunks.append(
        {
            "choices": [],
            "usage": counts,
            "lockstep": {"cache": {"memory_tokens": 4, "ssd_tokens": 1, "computed_tokens": 1}},
        }
    )
    return [*(json.dumps(one).encode() for one in chunks), b"[DONE]"]


def http_answer(words: tuple[str, ...] = WORDS, **changes: Any) -> HttpAnswer:
    """Return a completion of these tokens, each far likelier than " green"."""
    fields: dict[str, Any] = {
        "text": "".join(words),
        "tokens": list(words),
        "likeliest": [{word: -0.1, " green": -2.5} for word in words],
        "finish_reason": "length",
        "prompt_tokens": 640,
        "completion_tokens": len(words),
        "memory_tokens": 0,
        "stored_tokens": 0,
        "first_s": 0.02,
        "seconds": 0.12,
    }
    return HttpAnswer(**{**fields, **changes})


def canary_finding(name: str = "sum of 1 int32", digest: bytes = bytes(16)) -> CanaryFinding:
    """Return one result of a rank's canary."""
    return CanaryFinding(name=name, digest=digest, bytes=4, microseconds=12.0)


def healthy_rank(number: int, **changes: Any) -> RankStatus:
    """Return the status of a healthy rank."""
    fields: dict[str, Any] = {
        "rank": number,
        "state": "ready",
        "host": f"mac-{number}",
        "pid": 100 + number,
        "device": "metal Apple M5 Max",
        "memory_bytes": 3 * 2**30,
        "shard_bytes": 2**31,
        "canary": [canary_finding()],
    }
    return RankStatus(**{**fields, **changes})


def world_status(*ranks: RankStatus, **changes: Any) -> StatusReported:
    """Return the status of a world of these ranks, by default of two."""
    members = list(ranks) or [healthy_rank(0), healthy_rank(1)]
    fields: dict[str, Any] = {
        "ready": True,
        "reason": "",
        "draining": False,
        "model": "m",
        "model_fingerprint": "f",
        "epoch": 1,
        "world_size": len(members),
        "backend": "jaccl",
        "ranks": members,
        "running": 0,
        "waiting": 0,
        "kv_tokens_used": 0,
        "kv_tokens_max": 1,
        "context_tokens_max": 8_192,
        "steps": 10,
        "counters": {"steps_total": 10.0},
        "gauges": {},
    }
    return StatusReported(**{**fields, **changes})
