"""Feed of the page: one snapshot a second for all viewers together, and no work without any."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec

from services.gateway.completion.open_requests import OpenRequests, PageReport
from services.gateway.endpoints.page.percentiles import RecentPercentiles
from services.gateway.endpoints.page.snapshot import (
    describe_activity,
    describe_experts,
    describe_steps,
)
from services.gateway.links.scheduler_status import StatusBoard
from services.gateway.metrics.gateway import GatewayMetrics
from shared import limits
from shared.clock import Clock, unix_time_s
from shared.errors import LinkError
from shared.log import Log
from shared.messages import ActivityReported, QueryActivity, QueryExperts, RecordedStep

INTERVAL_S = 1.0
"""Time between two snapshots."""
EXPERTS_INTERVAL_S = 10.0
"""Time between two tables of the experts' loads, which are large."""
ANSWER_S = 1.0
"""Time for the scheduler's answer; a snapshot without it says that the scheduler is away."""
EVENTS_UNREAD_MAX = 4
"""Events that wait for a slow viewer; of more the oldest are dropped."""

_log = Log("gateway.page")


class Viewer:
    """One page that is open: the events that it has not been sent yet."""

    def __init__(self) -> None:
        self._events: deque[bytes] = deque(maxlen=EVENTS_UNREAD_MAX)
        self._arrived = asyncio.Event()

    def add(self, event: bytes) -> None:
        """Add an event; of too many unread ones the oldest is dropped."""
        self._events.append(event)
        self._arrived.set()

    def end(self) -> None:
        """Let `next` return b"", after which there are no events."""
        self._events.clear()
        self._arrived.set()

    async def next(self) -> bytes:
        """Wait for the next events and return them together; b"" at the end."""
        await self._arrived.wait()
        self._arrived.clear()
        data = b"".join(self._events)
        self._events.clear()
        return data


class Feed:
    """Asks the scheduler once a second while there are viewers, and gives all the same events."""

    def __init__(
        self, requests: OpenRequests, status: StatusBoard, metrics: GatewayMetrics, clock: Clock
    ) -> None:
        """Begin without viewers.

        Args:
            requests: the open requests, over whose link the scheduler is asked.
            status: the scheduler's last status.
            metrics: counts tokens and durations.
            clock: the time.
        """
        self._requests = requests
        self._status = status
        self._metrics = metrics
        self._clock = clock
        self._viewers: set[Viewer] = set()
        self._task: asyncio.Task[None] | None = None
        self._answer: asyncio.Future[ActivityReported] | None = None
        self._steps: deque[RecordedStep] = deque(maxlen=limits.ACTIVITY_STEPS_MAX)
        """The last steps, which a new viewer gets first."""
        self._experts = b""
        """The last event with the loads of experts; b"": none has come."""
        requests.on_page_report = self._receive

    def __len__(self) -> int:
        """Return the number of viewers."""
        return len(self._viewers)

    @contextlib.contextmanager
    def viewer(self) -> Iterator[Viewer]:
        """Yield a new viewer, which gets events until the block ends."""
        viewer = Viewer()
        if self._steps:
            viewer.add(event("steps", describe_steps(self._steps)))
        if self._experts:
            viewer.add(self._experts)
        self._viewers.add(viewer)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        try:
            yield viewer
        finally:
            self._viewers.discard(viewer)

    def end(self) -> None:
        """End the events of all viewers. They may connect again."""
        for viewer in self._viewers:
            viewer.end()

    def _receive(self, report: PageReport) -> None:
        if not isinstance(report, ActivityReported):
            self._experts = event("experts", describe_experts(report))
            self._publish(self._experts)
        elif self._answer is not None and not self._answer.done():
            self._answer.set_result(report)

    async def _run(self) -> None:
        first_token = RecentPercentiles(self._metrics.first_token)
        next_token = RecentPercentiles(self._metrics.next_token)
        experts_at_s = 0.0
        try:
            while self._viewers:
                began_s = self._clock.now()
                if began_s >= experts_at_s:
                    experts_at_s = began_s + EXPERTS_INTERVAL_S
                    self._send(QueryExperts())
                activity = await self._ask()
                if activity is not None and activity.steps:
                    self._steps.extend(activity.steps)
                    self._publish(event("steps", describe_steps(activity.steps)))
                content = self._snapshot(activity)
                content["latency"] = {
                    "first_token_s": first_token.observe(began_s),
                    "next_token_s": next_token.observe(began_s),
                }
                self._publish(event("snapshot", content))
                await asyncio.sleep(max(0.0, INTERVAL_S - (self._clock.now() - began_s)))
        except Exception:  # noqa: BLE001  # viewers connect again when their events have ended
            _log.exception("page_feed_failed")
            self.end()
        finally:
            self._task = None
            self._steps.clear()
            self._experts = b""

    async def _ask(self) -> ActivityReported | None:
        """Return the scheduler's activity; None if it does not answer in time."""
        last = self._steps[-1] if self._steps else None
        query = QueryActivity(epoch=last.epoch, step_id=last.step_id) if last else QueryActivity()
        self._answer = asyncio.get_running_loop().create_future()
        self._send(query)
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._answer
        except TimeoutError:
            return None
        finally:
            self._answer = None

    def _send(self, query: QueryActivity | QueryExperts) -> None:
        with contextlib.suppress(LinkError):
            # Without a session there is no answer.
            self._requests.link.send(query)

    def _snapshot(self, activity: ActivityReported | None) -> dict[str, Any]:
        return {
            "at_s": unix_time_s(),
            "open_requests": len(self._requests),
            "generation_tokens": self._metrics.generation_tokens,
            "status": self._status.as_json(),
            "activity": describe_activity(activity) if activity is not None else None,
        }

    def _publish(self, data: bytes) -> None:
        for viewer in self._viewers:
            viewer.add(data)


def event(name: str, content: object) -> bytes:
    """Return a server-sent event with JSON content."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(content))
