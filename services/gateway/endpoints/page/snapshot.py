"""What the page shows, as JSON. Pure."""

from collections.abc import Iterable
from typing import Any

import msgspec

from shared.measurements.expert_balance import (
    expert_imbalance,
    loads_of_ranges,
    rank_imbalance,
)
from shared.messages import ActivityReported, ExpertLayer, ExpertsReported, RecordedStep
from shared.messages.telemetry.step_times import unpack


def describe_activity(activity: ActivityReported) -> dict[str, Any]:
    """Return the scheduler's report as fields of a JSON object, without its steps.

    Times become ages in seconds, because the page does not know the scheduler's clock.
    """
    content: dict[str, Any] = msgspec.to_builtins(activity)
    now_s = activity.now_s
    return {
        "requests": [_request(one, now_s) for one in content["requests"]],
        "requests_omitted": activity.requests_omitted,
        "recoveries": [
            {
                "epoch": one.epoch,
                "cause": one.cause,
                "age_s": round(now_s - one.ended_at_s, 1),
                "seconds": None
                if one.ready_at_s is None
                else round(one.ready_at_s - one.ended_at_s, 2),
            }
            for one in activity.ended_epochs
        ],
        "events": [
            {"age_s": round(now_s - one.at_s, 1), "level": one.level, "text": one.text}
            for one in activity.events
        ],
        "loss": activity.loss,
    }


def describe_steps(steps: Iterable[RecordedStep]) -> list[dict[str, Any]]:
    """Return steps as JSON objects. Times are milliseconds after the plan of the step was sent.

    `ranks` has, by rank, when the plan came, the graph was built, handed over to the device, the
    device began and ended, and the receipt left.
    """
    return [
        {
            "epoch": one.epoch,
            "step": one.step_id,
            "kind": one.kind,
            "prompt_tokens": one.prefill_tokens,
            "decodes": one.decodes,
            "drafts": one.drafts,
            "sent_ms": round(one.sent_at_s * 1e3, 3),
            "ranks": [
                [round((time_s - one.sent_at_s) * 1e3, 3) for time_s in times]
                for packed in one.ranks
                for times in unpack(packed, one.sent_at_s)
            ],
        }
        for one in steps
    ]


def describe_experts(report: ExpertsReported) -> list[dict[str, Any]]:
    """Return the layers whose experts got tokens as JSON objects; [] for a model without experts.

    `counts` has how many tokens each expert got, `ranks` the load of what each rank holds. Both
    imbalances are those of `expert_balance`; that of ranks is None where one rank holds all, or
    none has any load.
    """
    return [_experts_of_layer(one) for one in report.layers if any(one.counts)]


def _experts_of_layer(layer: ExpertLayer) -> dict[str, Any]:
    loads = loads_of_ranges(layer.counts, layer.ranges)
    is_shared = len(loads) > 1 and any(loads)
    return {
        "layer": layer.layer,
        "counts": layer.counts,
        "load": sum(layer.counts),
        "busiest_expert": layer.counts.index(max(layer.counts)),
        "expert_imbalance": round(expert_imbalance(layer.counts), 3),
        "ranks": [
            {"rank": one.rank, "load": load} for one, load in zip(layer.ranges, loads, strict=True)
        ],
        "rank_imbalance": round(rank_imbalance([loads]), 3) if is_shared else None,
    }


def _request(request: dict[str, Any], now_s: float) -> dict[str, Any]:
    """Return a request with ages in place of times."""
    record = request.pop("record")
    started_s, first_s = record["started_at_s"], record["first_token_at_s"]
    return {
        "id": record["request_id"],
        "prompt_tokens": record["prompt_tokens"],
        "completion_tokens": record["completion_tokens"],
        "age_s": round(now_s - record["accepted_at_s"], 2),
        "running_s": None if started_s is None else round(now_s - started_s, 2),
        "generating_s": None if first_s is None else round(now_s - first_s, 3),
        **request,
    }
