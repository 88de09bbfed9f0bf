"""Order to measure steps, and queries of profiles and traces. Owns the link for both."""

import time
from collections.abc import Callable
from typing import Self

from services.supervisor.status.service_queries import ANSWER_DEADLINE_S, no_answer_error
from shared.clock import SystemClock
from shared.configuration.settings import Config
from shared.errors import UnavailableError
from shared.messages import (
    MeasuredStep,
    OrderProfile,
    OrderTrace,
    ProfilesReported,
    QueryProfiles,
    QueryStatus,
    QueryTrace,
    StatusReported,
    ToGateway,
    TraceReported,
)
from shared.transport.links import Connected, Dialer, LinkEvent, Received

_INTERVAL_S = 0.25
"""Seconds between two queries."""


class ProfileQuery:
    """Has the scheduler measure steps, and collects what the ranks report of them."""

    def __init__(self, config: Config) -> None:
        """Open the link.

        Args:
            config: contains the scheduler's address; with keys, this host's key must be an
                operator's.
        """
        self._config = config
        self._clock = SystemClock()
        self._link: Dialer[ToGateway] = Dialer(
            config.gateway_address, "operator", ToGateway, keys_dir=config.keys_dir
        )
        self._status: StatusReported | None = None
        self._after = (0, 0)
        """Epoch and id of the last step that was measured before `begin`."""
        self._reports: list[ProfilesReported] = []
        self._traces: list[TraceReported] = []

    def __enter__(self) -> Self:
        """Return the query."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the link."""
        self._link.close(wait_s=0.0)

    def status(self) -> StatusReported:
        """Return the scheduler's status.

        Raises:
            UnavailableError: when it does not answer.
        """
        until_s = self._clock.now() + ANSWER_DEADLINE_S
        while self._status is None:
            self._poll(until_s)
        return self._status

    def begin(self, steps: int) -> None:
        """Have the next steps measured; those that are planned after the return are among them.

        Args:
            steps: number of steps.

        Raises:
            UnavailableError: when the scheduler does not answer.
        """
        self.status()
        known = self._query(0, 0)
        self._after = (known[-1].epoch, known[-1].step_id) if known else (0, 0)
        self.order(steps, primitives=True)
        # Messages of a link arrive in order, so the order has arrived before this answer.
        self._query(*self._after)

    def collect(
        self, steps: int, deadline_s: float, progress: Callable[[int], object]
    ) -> list[MeasuredStep]:
        """Return the measured steps since `begin` that all ranks have reported, oldest first.

        Args:
            steps: number of steps to wait for.
            deadline_s: longest wait for them. Fewer are returned if not enough steps are executed.
            progress: called with the number of steps so far.

        Raises:
            UnavailableError: when the scheduler does not answer.
        """
        world_size = self.status().world_size
        until_s = self._clock.now() + deadline_s
        found: list[MeasuredStep] = []
        while len(found) < steps and self._clock.now() < until_s:
            time.sleep(_INTERVAL_S)
            reported = self._query(*self._after)
            found = [one for one in reported if len(one.profiles) == world_size]
            progress(len(found))
        return found

    def order(self, steps: int, *, primitives: bool) -> None:
        """Have the next steps measured; `status` must have returned before.

        Args:
            steps: number of steps.
            primitives: count operations too.
        """
        self._link.send(OrderProfile(steps=steps, primitives=primitives))

    def record(self, seconds: float) -> None:
        """Have gateways record their HTTP requests; `status` must have returned before.

        Args:
            seconds: how long.
        """
        self._link.send(OrderTrace(seconds=seconds))

    def wait(self, seconds: float) -> None:
        """Keep the link alive for some seconds: the scheduler forgets a peer that is silent."""
        until_s = self._clock.now() + seconds
        while (left_s := until_s - self._clock.now()) > 0.0:
            self._handle(self._link.poll(min(left_s, _INTERVAL_S)))

    def trace(self, seconds: float) -> TraceReported:
        """Return the trace of the last seconds.

        Raises:
            UnavailableError: when it does not answer.
        """
        self.status()
        self._traces.clear()
        self._link.send(QueryTrace(seconds=seconds))
        until_s = self._clock.now() + ANSWER_DEADLINE_S
        while not self._traces:
            self._poll(until_s)
        return self._traces[-1]

    def _query(self, epoch: int, step_id: int) -> list[MeasuredStep]:
        self._reports.clear()
        until_s = self._clock.now() + ANSWER_DEADLINE_S
        self._link.send(QueryProfiles(epoch=epoch, step_id=step_id))
        while not self._reports:
            self._poll(until_s)
        return self._reports[-1].steps

    def _poll(self, until_s: float) -> None:
        left_s = until_s - self._clock.now()
        if left_s <= 0.0:
            raise self._no_answer()
        self._handle(self._link.poll(left_s))

    def _handle(self, events: list[LinkEvent[ToGateway]]) -> None:
        for event in events:
            match event:
                case Connected():
                    self._link.send(QueryStatus())
                case Received(message=StatusReported() as status):
                    self._status = status
                case Received(message=ProfilesReported() as report):
                    self._reports.append(report)
                case Received(message=TraceReported() as trace):
                    self._traces.append(trace)

    def _no_answer(self) -> UnavailableError:
        return no_answer_error(self._config, self._link.refusal)
