"""The page of /metrics. Owns this gateway's counts and durations; relays the scheduler's report.

Names are vLLM's with another prefix, and units are Prometheus' base units. The hot path counts in
plain numbers; Prometheus objects are made only when the page is requested.
"""

import bisect
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from services.gateway.links.scheduler_status import StatusBoard
from services.gateway.metrics import drafts, ranks, scheduler

PREFIX = "lockstep_"
IGNORED_FIELDS_MAX = 200
"""Names of ignored fields that are counted apart."""

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


class Histogram:
    """Counts of durations, one count per range between ascending bounds, and their sum."""

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        """Begin with counts of 0.

        Args:
            bounds_s: ascending upper bounds of the ranges in seconds; the last range has none.
        """
        self.bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float, count: int = 1) -> None:
        """Add `count` equal durations, in seconds each, to their range's count and to the sum."""
        self._counts[bisect.bisect_left(self.bounds_s, seconds)] += count
        self._sum_s += seconds * count

    @property
    def counts(self) -> list[int]:
        """A copy of the counts by range, one more than there are bounds."""
        return list(self._counts)

    def family(self, name: str, documentation: str) -> HistogramMetricFamily:
        """Return the counts, cumulated over ascending ranges, as a Prometheus histogram.

        Args:
            name: name of the metric, with its prefix and unit.
            documentation: meaning of the metric, shown on /metrics.
        """
        bounds = [*map(str, self.bounds_s), "+Inf"]
        buckets = list(zip(bounds, itertools.accumulate(self._counts), strict=True))
        return HistogramMetricFamily(name, documentation, buckets=buckets, sum_value=self._sum_s)


class GatewayMetrics(Collector):
    """Counts and durations of one gateway since its start, and its page /metrics."""

    def __init__(self, status: StatusBoard) -> None:
        self._status = status
        self.open_requests = 0
        """Completions that are open now; set before each page."""
        self.prompt_tokens = 0
        """Tokens of submitted prompts."""
        self.generation_tokens = 0
        """Tokens received from the scheduler."""
        self.slow_clients_closed = 0
        """Connections closed because the client did not read its stream."""
        self.first_token = Histogram(_FIRST_TOKEN_BOUNDS_S)
        """Seconds from submitting a completion to its first tokens."""
        self.next_token = Histogram(_TOKEN_BOUNDS_S)
        """Seconds from a completion's previous tokens to its next ones."""
        self._request = Histogram(_REQUEST_BOUNDS_S)
        self.ends = Counter({"stop": 0, "length": 0, "abort": 0, "error": 0})
        """Ended completions by reason."""
        self.failures: Counter[str] = Counter({"grammar": 0, "grammar_deadline": 0})
        """Accepted requests that failed, by the scheduler's cause."""
        self.tool_calls = 0
        """Tool calls in finished completions."""
        self.rejections: Counter[str] = Counter()
        """Rejected requests by the scheduler's cause, such as `queue_full`; those included that the
        gateway rejects itself by repeating the scheduler's rejection."""
        self.responses: Counter[int] = Counter()
        """HTTP responses by status."""
        self.ignored_fields: Counter[str] = Counter()
        """Requests by ignored field; see `count_ignored`."""
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def exposition(self) -> bytes:
        """Return the page /metrics in Prometheus' text format, encoded."""
        page: bytes = generate_latest(self._registry)
        return page

    def observe_end(self, finish_reason: str, seconds: float, tool_calls: int) -> None:
        """Record that a completion ended because it was finished or had reached its length.

        Args:
            finish_reason: `stop` or `length`.
            seconds: time since the completion was submitted.
            tool_calls: tool calls in it.
        """
        self._request.observe(seconds)
        self.tool_calls += tool_calls
        self.ends[finish_reason] += 1

    def count_ignored(self, field: str) -> None:
        """Count a request with a field that has no effect.

        Clients choose the names, so beyond `IGNORED_FIELDS_MAX` they count as `other`.
        """
        if field not in self.ignored_fields and len(self.ignored_fields) >= IGNORED_FIELDS_MAX:
            field = "other"
        self.ignored_fields[field] += 1

    def collect(self) -> Iterator[Metric]:
        """Yield every metric of the page /metrics; prometheus_client calls this method."""
        yield from self._own()
        ready = not self._status.unready_reason()
        yield _gauge("ready", "1 when new requests are served, else 0.", ready)
        last = self._status.last
        if last is not None:
            yield from scheduler.families(PREFIX, last)
            yield from ranks.families(PREFIX, last.ranks)
            yield from drafts.families(PREFIX, last.model, last.drafts)

    def _own(self) -> Iterator[Metric]:
        yield _counter("prompt_tokens", "Prompt tokens of submitted requests.", self.prompt_tokens)
        yield _counter("generation_tokens", "Tokens generated.", self.generation_tokens)
        older_name = "The same as inter_token_latency_seconds, under vLLM's older name."
        for name, text, histogram in (
            ("time_to_first_token", "From submitting to the first token.", self.first_token),
            ("inter_token_latency", "Between two tokens of one completion.", self.next_token),
            ("time_per_output_token", older_name, self.next_token),
            ("e2e_request_latency", "From submitting to the end.", self._request),
        ):
            yield histogram.family(f"{PREFIX}{name}_seconds", text)
        yield _by_label(
            "request_success", "Completions by finish reason.", "finished_reason", self.ends
        )
        yield _by_label(
            "request_failed", "Accepted requests that failed, by cause.", "cause", self.failures
        )
        yield _counter("tool_calls", "Tool calls in finished completions.", self.tool_calls)
        yield _by_label(
            "request_rejected", "Requests that the scheduler rejected, by cause.", "cause",
            self.rejections,
        )  # fmt: skip
        yield _by_label("http_responses", "HTTP responses by status.", "status", self.responses)
        yield _by_label(
            "gateway_ignored_fields", "Requests by field that was ignored.", "field",
            self.ignored_fields,
        )  # fmt: skip
        yield _counter(
            "slow_clients_closed",
            "Streams closed because the client did not read them.",
            self.slow_clients_closed,
        )
        yield _gauge(
            "gateway_open_requests", "Completions open in this gateway.", self.open_requests
        )


def _by_label(
    name: str, documentation: str, label: str, counts: Mapping[Any, int]
) -> CounterMetricFamily:
    family = CounterMetricFamily(PREFIX + name, documentation, labels=[label])
    for value, count in counts.items():
        family.add_metric([str(value)], count)
    return family


def _counter(name: str, documentation: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, documentation, value=value)


def _gauge(name: str, documentation: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, documentation, value=value)
