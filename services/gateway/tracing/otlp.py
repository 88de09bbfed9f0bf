"""Spans of requests, sent by OTLP over HTTP. The only file that imports OpenTelemetry.

A span per request has the children queue, prefill and decode. Names of attributes are those of
OpenTelemetry's semantic conventions for HTTP and for generative AI. Texts of prompts and answers,
and names of API keys, are not exported.
"""

import importlib.metadata
import logging
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_SERVICE_NAME
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from services.gateway.tracing.trace_context import TraceContext
from services.gateway.tracing.traced_request import TracedRequest
from shared.clock import unix_time_s
from shared.configuration.settings import GatewayConfig
from shared.log import Log

CLOSE_S = 2.0
"""Longest wait for the last spans when the gateway ends."""

_TRACES_PATH = "/v1/traces"
_log = Log("gateway.otlp")


class OtlpExport:
    """Makes spans and sends them to a collector in batches.

    Spans wait in a bounded queue, of which new ones push out the oldest; a collector that is away
    or slow costs requests nothing. Sampling, batches, headers and timeouts follow OpenTelemetry's
    environment variables, such as OTEL_EXPORTER_OTLP_HEADERS.
    """

    def __init__(self, config: GatewayConfig) -> None:
        """Start the thread that sends.

        Args:
            config: contains the endpoint.
        """
        # They would log each failed attempt and each dropped span.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        logging.getLogger("urllib3").setLevel(logging.ERROR)
        version = importlib.metadata.version("lockstep")
        resource = {
            "service.version": version,
            "service.instance.id": f"{socket.gethostname()}:{config.port}",
        }
        if not os.environ.get(OTEL_SERVICE_NAME):
            resource["service.name"] = "lockstep"
        self._provider = TracerProvider(resource=Resource.create(resource), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_ReportingExporter(config)))
        self._tracer = self._provider.get_tracer("lockstep.gateway", version)

    def begin(self, traced: TracedRequest, method: str, route: str) -> None:
        """Begin the span of a request, as `SpanExport.begin`."""
        span = self._tracer.start_span(
            f"{method} {route}",
            _parent(traced.context),
            SpanKind.SERVER,
            {"http.request.method": method, "http.route": route, "url.path": route},
            start_time=_unix_ns(traced.arrived_s, _unix_offset_s(traced)),
        )
        traced.span = span
        if traced.context is None:
            own = span.get_span_context()
            is_sampled = bool(own.trace_flags & TraceFlags.SAMPLED)
            ids = f"{own.trace_id:032x}", f"{own.span_id:016x}"
            traced.context = TraceContext(*ids, is_sampled)

    def end(self, traced: TracedRequest) -> None:
        """End the span of a request with its children, as `SpanExport.end`."""
        span = traced.span
        if not span.is_recording():
            return
        assert traced.ended_s is not None
        offset_s = _unix_offset_s(traced)
        span.set_attributes(traced.attributes)
        if traced.status:
            span.set_attribute("http.response.status_code", traced.status)
        if traced.status >= 500 or (traced.failure and traced.status < 400):
            span.set_attribute("error.type", traced.failure or str(traced.status))
            span.set_status(Status(StatusCode.ERROR))
        within = set_span_in_context(span, Context())
        for name, began_s, ended_s in _phases(traced, traced.ended_s):
            child = self._tracer.start_span(name, within, start_time=_unix_ns(began_s, offset_s))
            child.end(_unix_ns(ended_s, offset_s))
        span.end(_unix_ns(traced.ended_s, offset_s))

    def close(self) -> None:
        """Send the last spans for at most `CLOSE_S`."""
        # The provider itself would wait for a dead collector for half a minute.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_S)


class _ReportingExporter(SpanExporter):
    """Sends spans; logs the first failure, and the first success after failures."""

    def __init__(self, config: GatewayConfig) -> None:
        self._endpoint = config.otlp_endpoint
        base = config.otlp_endpoint.rstrip("/").removesuffix(_TRACES_PATH)
        self._exporter = OTLPSpanExporter(base + _TRACES_PATH)
        self._is_failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans; return whether the collector has taken them."""
        try:
            result = self._exporter.export(spans)
        except Exception:  # noqa: BLE001  # an unknown failure of the library must not be repeated
            result = SpanExportResult.FAILURE
        has_failed = result is not SpanExportResult.SUCCESS
        if has_failed and not self._is_failing:
            detail = "The collector cannot be reached or refuses spans, which are dropped."
            _log.warning("otlp_export_failed", endpoint=self._endpoint, detail=detail)
        elif self._is_failing and not has_failed:
            _log.info("otlp_export_works", endpoint=self._endpoint)
        self._is_failing = has_failed
        return result

    def shutdown(self) -> None:
        """End the connection."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]


def _parent(context: TraceContext | None) -> Context:
    """Return the client's span as the parent; without one, the beginning of a new trace."""
    if context is None:
        return Context()
    parent = SpanContext(
        trace_id=int(context.trace_id, 16),
        span_id=int(context.span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED if context.is_sampled else TraceFlags.DEFAULT),
        trace_state=TraceState.from_header([context.state]),
    )
    return set_span_in_context(NonRecordingSpan(parent), Context())


def _phases(traced: TracedRequest, ended_s: float) -> Iterator[tuple[str, float, float]]:
    """Yield name, begin and end of what a request waited for, by the monotonic clock."""
    submitted_s, first_s = traced.submitted_s, traced.first_token_s
    admitted_s = traced.admitted_s
    if submitted_s is None:
        return
    begins: list[tuple[str, Any]] = [
        ("queue", submitted_s), ("prefill", admitted_s), ("decode", first_s)
    ]  # fmt: skip
    known = [(name, began_s) for name, began_s in begins if began_s is not None]
    ends = [began_s for _, began_s in known[1:]] + [ended_s]
    for (name, began_s), until_s in zip(known, ends, strict=True):
        yield name, began_s, max(began_s, until_s)


def _unix_offset_s(traced: TracedRequest) -> float:
    return unix_time_s() - traced.recorder.clock.now()


def _unix_ns(time_s: float, offset_s: float) -> int:
    return round((time_s + offset_s) * 1e9)
