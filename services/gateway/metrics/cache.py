"""The prefix cache's metrics: what the scheduler reports under names that begin with `cache_`.

Tokens found and computed get one name each with a label, and vLLM's names beside it; the others
keep their names.
"""

import re
from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

REPORTED = "cache_"
_HITS = re.compile(r"cache_hit_tokens_(\w+)_total")
_MISSES = re.compile(r"cache_miss_tokens_(\w+)_total")
_PLAIN_NAME = re.compile(r"[^a-zA-Z0-9_]")


def families(
    prefix: str, counters: Mapping[str, float], gauges: Mapping[str, float]
) -> Iterator[Metric]:
    """Yield a metric for each counter and gauge of the cache; nothing without any.

    Args:
        prefix: what our metrics' names begin with.
        counters: the scheduler's, all of them.
        gauges: as well.
    """
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
        elif name.startswith(REPORTED):
            plain = _PLAIN_NAME.sub("_", name).removesuffix("_total")
            yield CounterMetricFamily(prefix + plain, _words(plain), value=value)
    for name, value in sorted(gauges.items()):
        if name.startswith(REPORTED):
            plain = _PLAIN_NAME.sub("_", name)
            yield GaugeMetricFamily(prefix + plain, _words(plain), value=value)
    if hits.samples or misses.samples:
        yield hits
        yield misses
        yield CounterMetricFamily(
            prefix + "prefix_cache_queries",
            "Prompt tokens looked for in the cache.",
            value=found + computed,
        )
        yield CounterMetricFamily(
            prefix + "prefix_cache_hits", "Prompt tokens found in the cache.", value=found
        )


def _words(name: str) -> str:
    return f"Prefix {name.replace('_', ' ')}, reported by the scheduler."
