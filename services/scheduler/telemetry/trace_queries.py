"""Traces for operators and gateways. Owns the open queries, and what gateways add to them. Pure.

A gateway records its HTTP requests only when it was ordered to, and reports them when a trace is
queried. A query is answered when all gateways have reported, or `GATHER_S` later without the rest.
"""

import dataclasses

from services.scheduler.events import Action, SendToGateway
from services.scheduler.requests.request_table import RequestTable
from services.scheduler.telemetry.clock_offsets import ClockOffsets
from services.scheduler.telemetry.telemetry import Telemetry
from services.scheduler.world.world import World
from shared import limits
from shared.identifiers import PeerId
from shared.messages import (
    HttpRequestsReported,
    OrderTrace,
    QueryHttpRequests,
    QueryTrace,
    RecordedGateway,
    RecordedHttpRequest,
)

GATHER_S = 1.0
"""Longest wait for the reports of gateways."""
QUERIES_MAX = 8
"""Most open queries; of more the oldest is answered at once."""

_GATEWAY = b"gateway"
"""Prefix of the identity of gateways; commands have other ones."""
_HTTP_REQUEST_BYTES = 256
"""About the size of an HTTP request in a message, without its writes."""


@dataclasses.dataclass(slots=True)
class _Query:
    """A trace that is being collected."""

    asker: PeerId
    since_s: float
    asked_at_s: float
    awaited: set[PeerId]
    """Gateways that have not reported."""
    found: list[RecordedGateway] = dataclasses.field(default_factory=list)


class TraceQueries:
    """Has gateways record, collects their reports, and answers queries of traces."""

    def __init__(
        self,
        telemetry: Telemetry,
        requests: RequestTable,
        world: World,
        gateways: set[PeerId],
        actions: list[Action],
    ) -> None:
        """Begin without queries.

        Args:
            telemetry: the history of steps and block transfers.
            requests: the open requests, with the history of others.
            world: the ranks.
            gateways: all connected gateways and commands; the caller adds and removes them.
            actions: receives messages to them.
        """
        self._telemetry = telemetry
        self._requests = requests
        self._world = world
        self._gateways = gateways
        self._actions = actions
        self._queries: list[_Query] = []
        self._clocks: dict[PeerId, ClockOffsets] = {}
        """By gateway: the round trips since the last order."""

    def handle(
        self,
        peer: PeerId,
        message: OrderTrace | QueryTrace | HttpRequestsReported,
        now_s: float,
    ) -> None:
        """Handle an order, a query or a report.

        Args:
            peer: who sent it.
            message: the message.
            now_s: the monotonic time in seconds.
        """
        match message:
            case OrderTrace():
                self._clocks.clear()
                self._ask(message.seconds, now_s)
            case QueryTrace():
                since_s = max(0.0, now_s - message.seconds)
                awaited = self._ask(0.0, now_s)
                self._queries.append(_Query(peer, since_s, now_s, awaited))
                if len(self._queries) > QUERIES_MAX:
                    self._queries[0].awaited.clear()
                self._answer(now_s)
            case HttpRequestsReported():
                self._add_report(peer, message, now_s)

    def answer_late(self, now_s: float) -> None:
        """Answer the queries whose time is over, or that wait for lost gateways only."""
        for query in self._queries:
            query.awaited &= self._gateways
            if now_s - query.asked_at_s >= GATHER_S:
                query.awaited.clear()
        self._answer(now_s)

    def _ask(self, seconds: float, now_s: float) -> set[PeerId]:
        """Ask all gateways for their HTTP requests; return them."""
        gateways = sorted(one for one in self._gateways if one.startswith(_GATEWAY))
        query = QueryHttpRequests(asked_at_s=now_s, seconds=seconds)
        self._actions.extend(SendToGateway(gateway, query) for gateway in gateways)
        return set(gateways)

    def _add_report(self, gateway: PeerId, report: HttpRequestsReported, now_s: float) -> None:
        if gateway not in self._gateways or not 0.0 <= now_s - report.asked_at_s <= GATHER_S:
            return
        clock = self._clocks.setdefault(gateway, ClockOffsets())
        times = report.asked_at_s, report.came_at_s, report.answered_at_s, now_s
        clock.add_report(0, [times])
        best = clock.find(0)
        assert best is not None
        for query in self._queries:
            if gateway not in query.awaited or query.asked_at_s != report.asked_at_s:
                continue
            query.awaited.remove(gateway)
            if _fits(query.found, report.http_requests):
                found = RecordedGateway(
                    name=gateway.decode(errors="replace"),
                    clock_offset_s=best.offset_s,
                    http_requests=report.http_requests,
                )
                query.found.append(found)
        self._answer(now_s)

    def _answer(self, now_s: float) -> None:
        """Answer the queries that wait for no gateway any more."""
        for query in [one for one in self._queries if not one.awaited]:
            self._queries.remove(query)
            if query.asker not in self._gateways:
                continue
            trace = self._telemetry.trace(
                query.since_s, self._requests, self._world, query.found, now_s
            )
            self._actions.append(SendToGateway(query.asker, trace))


def _fits(found: list[RecordedGateway], http_requests: list[RecordedHttpRequest]) -> bool:
    """Return whether the report of another gateway fits the answer."""
    known = [one for gateway in found for one in gateway.http_requests]
    size_bytes = sum(_HTTP_REQUEST_BYTES + len(one.writes) for one in [*known, *http_requests])
    return (
        len(found) < limits.RECORDED_GATEWAYS_MAX
        and size_bytes <= limits.RECORDED_GATEWAYS_BYTES_MAX
    )
