"""An OpenTelemetry collector for tests: receives spans by OTLP over HTTP."""

import asyncio
import threading
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.support.ports import free_port


class OtlpCollector:
    """A server in a thread that keeps the spans it gets."""

    def __init__(self) -> None:
        """Listen."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.spans: list[Span] = []
        self.resource: dict[str, Any] = {}
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._started.wait(10.0)

    def named(self, name: str) -> list[Span]:
        """Return the spans with a name, in the order of their arrival."""
        return [span for span in self.spans if span.name == name]

    def close(self) -> None:
        """Stop listening."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.router.add_post("/v1/traces", self._receive)
        runner = web.AppRunner(app)
        self._loop.run_until_complete(runner.setup())
        self._loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", self.port).start())
        self._loop.call_soon(self._started.set)
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _receive(self, request: web.Request) -> web.Response:
        assert request.content_type == "application/x-protobuf"
        message = ExportTraceServiceRequest.FromString(await request.read())
        for resource in message.resource_spans:
            self.resource = attributes(resource.resource)
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        return web.Response(
            body=ExportTraceServiceResponse().SerializeToString(),
            content_type="application/x-protobuf",
        )


def attributes(holder: Any) -> dict[str, Any]:
    """Return the attributes of a span or a resource."""
    return {one.key: _value(one.value) for one in holder.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return [_value(one) for one in found.values] if kind == "array_value" else found
