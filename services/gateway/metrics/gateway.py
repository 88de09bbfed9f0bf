"""The page of /metrics. Owns this gateway's counts and durations; relays the scheduler's report.

Names are vLLM's with another prefix, and units are Prometheus' base units. The hot path counts in
plain numbers; Prometheus objects are made only when the page is requested.
"""

import bisect
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from services.gateway.metrics import drafts, scheduler
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


class Histogram:
    """Counts of durations, one count per range between ascending bounds, and their sum."""

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        """Begin with counts of 0.

        Args:
            bounds_s: ascending upper bounds of the ranges in seconds; the last range has none.
        """
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Add one duration in seconds to its range's count and to the sum."""
        self._counts[bisect.bisect_left(self._bounds_s, seconds)] += 1
        self._sum_s += seconds

    def family(self, name: str, documentation: str) -> HistogramMetricFamily:
        """Return the counts, cumulated over ascending ranges, as a Prometheus histogram.

        Args:
            name: name of the metric, with its prefix and unit.
            documentation: meaning of the metric, shown on /metrics.
        """
        bounds = [*map(str, self._bounds_s), "+Inf"]
        total = 0
        buckets = []
        for bound, count in zip(bounds, self._counts, strict=True):
            total += count
            buckets.append((bound, total))
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
        self._first_token = Histogram(_FIRST_TOKEN_BOUNDS_S)
        self._token = Histogram(_TOKEN_BOUNDS_S)
        self._request = Histogram(_REQUEST_BOUNDS_S)
        self._ends: dict[str, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self._rejections: dict[str, int] = {}
        self._responses: dict[int, int] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def exposition(self) -> bytes:
        """Return the page /metrics in Prometheus' text format, encoded."""
        page: bytes = generate_latest(self._registry)
        return page

    def observe_first_token(self, seconds: float, tokens: int) -> None:
        """Record that a completion received its first tokens.

        Args:
            seconds: time since the completion was submitted.
            tokens: number of tokens received.
        """
        self.generation_tokens += tokens
        self._first_token.observe(seconds)

    def observe_tokens(self, seconds: float, tokens: int) -> None:
        """Record that a completion received tokens after its first ones.

        Args:
            seconds: time since the completion's previous tokens.
            tokens: number of tokens received.
        """
        self.generation_tokens += tokens
        self._token.observe(seconds)

    def observe_end(self, finish_reason: str, seconds: float) -> None:
        """Record that a completion ended because it was finished or had reached its length.

        Args:
            finish_reason: `stop` or `length`.
            seconds: time since the completion was submitted.
        """
        self._request.observe(seconds)
        self.count_end(finish_reason)

    def count_end(self, finish_reason: str) -> None:
        """Count an ended completion by its reason: `stop`, `length`, `abort` or `error`."""
        self._ends[finish_reason] = self._ends.get(finish_reason, 0) + 1

    def count_rejection(self, cause: str) -> None:
        """Count a rejected request by the scheduler's cause, such as `queue_full`.

        It counts, too, when the gateway repeats the scheduler's rejection by itself.

        Args:
            cause: the cause in the scheduler's message.
        """
        self._rejections[cause] = self._rejections.get(cause, 0) + 1

    def count_response(self, status: int) -> None:
        """Count an HTTP response by its status."""
        self._responses[status] = self._responses.get(status, 0) + 1

    def collect(self) -> Iterator[Metric]:
        """Yield every metric of the page /metrics; prometheus_client calls this method."""
        yield from self._own()
        ready = not self._status.unready_reason()
        yield _gauge("ready", "1 when new requests are served, else 0.", ready)
        last = self._status.last
        if last is not None:
            yield from scheduler.families(PREFIX, last)
            yield from drafts.families(PREFIX, last.drafts)

    def _own(self) -> Iterator[Metric]:
        yield _counter("prompt_tokens", "Prompt tokens of submitted requests.", self.prompt_tokens)
        yield _counter("generation_tokens", "Tokens generated.", self.generation_tokens)
        yield self._first_token.family(
            PREFIX + "time_to_first_token_seconds", "From submitting to the first token."
        )
        yield self._token.family(
            PREFIX + "inter_token_latency_seconds", "Between two tokens of one completion."
        )
        yield self._token.family(
            PREFIX + "time_per_output_token_seconds",
            "The same as inter_token_latency_seconds, under vLLM's older name.",
        )
        yield self._request.family(
            PREFIX + "e2e_request_latency_seconds", "From submitting to the end."
        )
        success = CounterMetricFamily(
            PREFIX + "request_success", "Completions by finish reason.",
            labels=["finished_reason"],
        )  # fmt: skip
        for reason, count in self._ends.items():
            success.add_metric([reason], count)
        yield success
        rejected = CounterMetricFamily(
            PREFIX + "request_rejected", "Requests that the scheduler rejected, by cause.",
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
        yield _counter(
            "slow_clients_closed",
            "Streams closed because the client did not read them.",
            self.slow_clients_closed,
        )
        yield _gauge(
            "gateway_open_requests", "Completions open in this gateway.", self.open_requests
        )


def _counter(name: str, documentation: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, documentation, value=value)


def _gauge(name: str, documentation: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, documentation, value=value)
