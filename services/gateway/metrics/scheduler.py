"""Prometheus metrics of the scheduler's report: its state, its counters and the prefix cache.

Reported durations have names that end in `_ms` or `_s`; exposed durations are in seconds.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from shared.messages import DurationCounts, StatusReported
from shared.messages.reported_numbers import meaning
from shared.messages.telemetry.durations import BOUNDS_S

CACHE = "cache_"
"""First part of the names that the prefix cache reports."""
_HITS = re.compile(r"cache_hit_tokens_(\w+)_total")
_MISSES = re.compile(r"cache_miss_tokens_(\w+)_total")
_EPOCH_ENDS = re.compile(r"epochs_ended_(\w+)_total")
_DURATIONS = {
    "step": ("step_duration_seconds", "Duration of a step on the primary rank, by kind.", ["kind"]),
    "queue": ("request_queue_time_seconds", "From acceptance to the first slot.", []),
    "prefill": ("request_prefill_time_seconds", "From the last admission to the first token.", []),
    "decode": ("request_decode_time_seconds", "From the first token to the end.", []),
}
"""By reported name: name, meaning and labels of the metric; those of requests are vLLM's."""
_FORBIDDEN = re.compile(r"[^a-zA-Z0-9_]")
_SCHEDULER = "scheduler_"


def families(prefix: str, status: StatusReported) -> Iterator[Metric]:
    """Yield Prometheus metrics of the scheduler's report, except those of draft tokens.

    In this order: state, counters, cached tokens by kind, gauges.

    Args:
        prefix: first part of every metric's name.
        status: the scheduler's last report.
    """
    yield from _state(prefix, status)
    yield from _counters(prefix, status.counters)
    yield from _cached_tokens(prefix, status.counters)
    yield from _durations(prefix, status.durations)
    for reported, value in sorted(status.gauges.items()):
        name, in_unit = base_unit(reported, value)
        yield GaugeMetricFamily(prefix + name, meaning(reported), value=in_unit)


def base_unit(reported: str, value: float) -> tuple[str, float]:
    """Convert a reported number's name and value to Prometheus' base units, which are seconds.

    Args:
        reported: the scheduler's name, for example `decode_ms`.
        value: the number in the unit of that name.

    Returns:
        (name, value). The name has no prefix and no `_total` and begins with `cache_` or
        `scheduler_`; `decode_ms` becomes `scheduler_decode_seconds`. Only names with `_ms` change
        the value.
    """
    name = _FORBIDDEN.sub("_", reported).removesuffix("_total")
    if name.endswith("_ms"):
        name, value = name.removesuffix("_ms") + "_seconds", value / 1_000
    elif name.endswith("_s"):
        name = name.removesuffix("_s") + "_seconds"
    if name.startswith((CACHE, _SCHEDULER)):
        return name, value
    return _SCHEDULER + name, value


def _state(prefix: str, status: StatusReported) -> Iterator[Metric]:
    used = status.kv_tokens_used / status.kv_tokens_max if status.kv_tokens_max else 0.0
    for name, text, value in (
        ("num_requests_running", "Sequences in the running batch.", status.running),
        ("num_requests_waiting", "Requests that wait for a slot.", status.waiting),
        ("kv_cache_usage_perc", "Share of KV rows in use, 0 to 1.", used),
        ("epoch", "Number of the world's current epoch.", status.epoch),
        ("steps", "Steps finished in this epoch.", status.steps),
    ):
        yield GaugeMetricFamily(prefix + name, text, value=value)


def _durations(prefix: str, durations: Sequence[DurationCounts]) -> Iterator[Metric]:
    for reported, (name, text, labels) in _DURATIONS.items():
        family = HistogramMetricFamily(prefix + name, text, labels=labels)
        for one in durations:
            if one.name == reported:
                bounds = [*map(str, BOUNDS_S[one.name]), "+Inf"]
                buckets = list(zip(bounds, itertools.accumulate(one.counts), strict=True))
                family.add_metric([one.label] if labels else [], buckets, one.sum_s)
        yield family


def _counters(prefix: str, counters: Mapping[str, float]) -> Iterator[Metric]:
    ends = CounterMetricFamily(
        prefix + "scheduler_epochs_ended", meaning("epochs_ended_"), labels=["cause"]
    )
    for reported, value in sorted(counters.items()):
        if end := _EPOCH_ENDS.fullmatch(reported):
            ends.add_metric([end[1]], value)
        elif not (_HITS.fullmatch(reported) or _MISSES.fullmatch(reported)):
            name, in_unit = base_unit(reported, value)
            yield CounterMetricFamily(prefix + name, meaning(reported), value=in_unit)
    yield ends


def _cached_tokens(prefix: str, counters: Mapping[str, float]) -> Iterator[Metric]:
    """Yield prompt tokens by tier and by cause, and vLLM's two totals; nothing without a cache."""
    hits = CounterMetricFamily(
        prefix + "cache_hit_tokens", "Prompt tokens found in the cache.", labels=["tier"]
    )
    misses = CounterMetricFamily(
        prefix + "cache_miss_tokens", "Prompt tokens computed.", labels=["cause"]
    )
    found = computed = 0.0
    for name, value in sorted(counters.items()):
        if hit := _HITS.fullmatch(name):
            hits.add_metric([hit[1]], value)
            found += value
        elif miss := _MISSES.fullmatch(name):
            misses.add_metric([miss[1]], value)
            computed += value
    if not hits.samples and not misses.samples:
        return
    yield hits
    yield misses
    yield CounterMetricFamily(
        prefix + "prefix_cache_queries",
        "Prompt tokens looked up in the cache.",
        value=found + computed,
    )
    yield CounterMetricFamily(
        prefix + "prefix_cache_hits", "Prompt tokens found in the cache.", value=found
    )
