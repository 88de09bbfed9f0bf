"""What /metrics shows: this gateway's counts and times, and what the scheduler reports.

Names are vLLM's with another prefix. Tokens are counted in plain numbers on the hot path;
Prometheus objects are made only when somebody asks.
"""

import bisect
import re
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from services.gateway.metrics import cache, drafts
from services.gateway.scheduler_client.scheduler_status import StatusBoard

PREFIX = "lockstep_"

_FIRST_TOKEN_BOUNDS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKEN_BOUNDS_S = (
    0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0,
    7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST_BOUNDS_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
    240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_PLAIN_NAME = re.compile(r"[^a-zA-Z0-9_]")


class Histogram:
    """Counts of times in buckets, as cheap as one search in a short list."""

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count one time."""
        self._counts[bisect.bisect_left(self._bounds_s, seconds)] += 1
        self._sum_s += seconds

    def family(self, name: str, documentation: str) -> HistogramMetricFamily:
        """Return what Prometheus reads."""
        bounds = [*map(str, self._bounds_s), "+Inf"]
        total = 0
        buckets = []
        for bound, count in zip(bounds, self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        return HistogramMetricFamily(name, documentation, buckets=buckets, sum_value=self._sum_s)


class GatewayMetrics(Collector):
    """All counts of one gateway."""

    def __init__(self, status: StatusBoard) -> None:
        self._status = status
        self.open_requests = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.cut_off = 0
        self._first_token = Histogram(_FIRST_TOKEN_BOUNDS_S)
        self._token = Histogram(_TOKEN_BOUNDS_S)
        self._request = Histogram(_REQUEST_BOUNDS_S)
        self._ends: dict[str, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self._rejections: dict[str, int] = {}
        self._responses: dict[int, int] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def exposition(self) -> bytes:
        """Return the page for Prometheus."""
        page: bytes = generate_latest(self._registry)
        return page

    def observe_first_token(self, seconds: float, tokens: int) -> None:
        """Count a completion's first tokens, and how long they took."""
        self.generation_tokens += tokens
        self._first_token.observe(seconds)

    def observe_tokens(self, seconds: float, tokens: int) -> None:
        """Count a completion's next tokens, and how long after the last ones they came."""
        self.generation_tokens += tokens
        self._token.observe(seconds)

    def observe_end(self, finish_reason: str, seconds: float) -> None:
        """Count a completion that ended well."""
        self._request.observe(seconds)
        self.count_end(finish_reason)

    def count_end(self, finish_reason: str) -> None:
        """Count a completion that ended."""
        self._ends[finish_reason] = self._ends.get(finish_reason, 0) + 1

    def count_rejection(self, cause: str) -> None:
        """Count a request that the scheduler did not take."""
        self._rejections[cause] = self._rejections.get(cause, 0) + 1

    def count_response(self, status: int) -> None:
        """Count an HTTP response."""
        self._responses[status] = self._responses.get(status, 0) + 1

    def collect(self) -> Iterator[Metric]:
        """Yield every metric; called by prometheus_client."""
        yield from self._own()
        yield from self._relayed()

    def _own(self) -> Iterator[Metric]:
        yield _counter("prompt_tokens", "Prompt tokens of requests taken.", self.prompt_tokens)
        yield _counter("generation_tokens", "Tokens generated.", self.generation_tokens)
        yield self._first_token.family(
            PREFIX + "time_to_first_token_seconds", "From submitting to the first token."
        )
        yield self._token.family(
            PREFIX + "inter_token_latency_seconds", "Between two tokens of one completion."
        )
        yield self._token.family(
            PREFIX + "time_per_output_token_seconds",
            "The same under vLLM's older name.",
        )
        yield self._request.family(
            PREFIX + "e2e_request_latency_seconds", "From submitting to the end."
        )
        success = CounterMetricFamily(
            PREFIX + "request_success", "Completions by reason of their end.",
            labels=["finished_reason"],
        )  # fmt: skip
        for reason, count in self._ends.items():
            success.add_metric([reason], count)
        yield success
        rejected = CounterMetricFamily(
            PREFIX + "request_rejected", "Requests that the scheduler did not take.",
            labels=["cause"],
        )  # fmt: skip
        for cause, count in self._rejections.items():
            rejected.add_metric([cause], count)
        yield rejected
        responses = CounterMetricFamily(
            PREFIX + "http_responses", "HTTP responses by status.", labels=["status"]
        )
        for status, count in self._responses.items():
            responses.add_metric([str(status)], count)
        yield responses
        yield _counter("clients_cut_off", "Streams whose client did not read.", self.cut_off)
        yield _gauge("gateway_open_requests", "Requests open here.", self.open_requests)

    def _relayed(self) -> Iterator[Metric]:
        yield _gauge("ready", "1 when requests are served.", not self._status.unready_reason())
        last = self._status.last
        if last is None:
            return
        yield _gauge("num_requests_running", "Sequences in the running batch.", last.running)
        yield _gauge("num_requests_waiting", "Requests that wait for a slot.", last.waiting)
        used = last.kv_tokens_used / last.kv_tokens_max if last.kv_tokens_max else 0.0
        yield _gauge("kv_cache_usage_perc", "Share of KV rows in use, 0 to 1.", used)
        yield _gauge("epoch", "Number of the world's current life.", last.epoch)
        yield _gauge("steps", "Steps finished in this epoch.", last.steps)
        yield from cache.families(PREFIX, last.counters, last.gauges)
        yield from drafts.families(PREFIX, last.counters)
        for name, value in _others(last.counters):
            plain = _PLAIN_NAME.sub("_", name).removeprefix(PREFIX).removesuffix("_total")
            yield _counter(f"scheduler_{plain}", "Reported by the scheduler.", value)
        for name, value in _others(last.gauges):
            plain = _PLAIN_NAME.sub("_", name).removeprefix(PREFIX)
            yield _gauge(f"scheduler_{plain}", "Reported by the scheduler.", value)


def _others(reported: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return what is neither the cache's nor of drafts, by name."""
    return sorted(
        (name, value)
        for name, value in reported.items()
        if not name.startswith(cache.REPORTED) and not drafts.is_drafts(name)
    )


def _counter(name: str, documentation: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, documentation, value=value)


def _gauge(name: str, documentation: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, documentation, value=value)
