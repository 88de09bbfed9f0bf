"""Traces of this gateway. Owns its part in the scheduler's traces, and traces for its clients."""

import asyncio
import contextlib

from services.gateway.links.scheduler_client import Link
from services.gateway.tracing.span_export import SpanExport
from services.gateway.tracing.traced_request import RequestRecorder, TracedRequest
from shared.clock import Clock
from shared.errors import LinkError, UnavailableError
from shared.measurements.trace import MARGIN_S, REPORT_S
from shared.messages import OrderTrace, QueryHttpRequests, QueryTrace, TraceReported

_ANSWER_S = 5.0


class Tracing:
    """Records HTTP requests when the scheduler orders it, and collects traces for clients."""

    def __init__(self, link: Link, clock: Clock, export: SpanExport | None = None) -> None:
        """Begin without requests.

        Args:
            link: sends to the scheduler.
            clock: the time.
            export: makes spans of requests; None: none are exported.
        """
        self.recorder = RequestRecorder(clock)
        self.export = export
        self._link = link
        self._clock = clock
        self._until_s = 0.0
        """When the trace of a client will be complete; 0: none is recorded."""
        self._report: asyncio.Future[TraceReported] | None = None

    @property
    def busy_s(self) -> float:
        """Seconds until the trace that is being recorded for a client is complete; 0: none is."""
        return max(MARGIN_S, self._until_s - self._clock.now()) if self._until_s else 0.0

    def handle(self, message: QueryHttpRequests | TraceReported, now_s: float) -> None:
        """Answer the scheduler's query, or receive its trace.

        Args:
            message: the message.
            now_s: when it arrived.
        """
        if isinstance(message, TraceReported):
            if self._report is not None and not self._report.done():
                self._report.set_result(message)
            return
        # If the session was lost, the query has ended.
        with contextlib.suppress(LinkError):
            self._link.send(self.recorder.answer(message, now_s))

    def end(self, traced: TracedRequest) -> None:
        """End a request now, and its span."""
        self.recorder.end(traced)
        if self.export is not None and traced.span is not None:
            self.export.end(traced)

    async def collect(self, seconds: float) -> TraceReported:
        """Record for some seconds, and return the trace; `busy_s` must be 0.

        Raises:
            UnavailableError: when the scheduler is away or does not answer.
        """
        began_s = self._clock.now()
        self._until_s = began_s + seconds + REPORT_S
        self._report = asyncio.get_running_loop().create_future()
        try:
            self._link.send(OrderTrace(seconds=seconds + REPORT_S))
            await asyncio.sleep(seconds + REPORT_S)
            self._link.send(QueryTrace(seconds=self._clock.now() - began_s + MARGIN_S))
            async with asyncio.timeout(_ANSWER_S):
                return await self._report
        except LinkError as error:
            raise UnavailableError(f"The scheduler cannot be reached: {error}") from None
        except TimeoutError:
            raise UnavailableError("The scheduler does not answer.") from None
        finally:
            self._until_s, self._report = 0.0, None
