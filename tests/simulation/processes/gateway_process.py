"""Simulated gateway: the real scheduler link and table of open requests."""

from collections.abc import Callable

import msgspec

from services.gateway.completion.open_requests import OpenRequests
from services.gateway.completion.streaming import FlushList
from services.gateway.links.scheduler_status import StatusBoard
from services.gateway.metrics.gateway import GatewayMetrics
from shared.configuration.settings import Config
from shared.messages import ToGateway
from shared.transport.links import Dialer
from tests.simulation.environment.event_heap import EventHeap
from tests.simulation.environment.network import Network
from tests.simulation.processes.process import Process

DRAIN_MESSAGES_MAX = 32


class _Timer:
    """A timer that can be cancelled."""

    def __init__(self, callback: Callable[[], object]) -> None:
        self._callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        """Prevent the callback."""
        self._callback = None

    def fire(self) -> None:
        """Call back unless the timer was cancelled."""
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


class GatewayProcess(Process):
    """One life of a gateway."""

    def __init__(self, name: str, heap: EventHeap, network: Network, config: Config) -> None:
        super().__init__(name, heap, network)
        with self.owning_sockets():
            self.link: Dialer[ToGateway] = Dialer(
                config.gateway_address, "gateway", ToGateway, heap
            )
        self.status = StatusBoard(heap)
        self.requests = OpenRequests(
            link=self,
            call_later=self._set_timer,
            clock=heap,
            status=self.status,
            metrics=GatewayMetrics(self.status),
            flush_list=FlushList(),
        )
        self.after_turn: list[Callable[[], object]] = []
        """Callbacks of the clients, called after each turn."""
        self.wake()

    def turn(self) -> None:
        """Handle received messages."""
        events = self.link.poll(0.0, DRAIN_MESSAGES_MAX)
        if events:
            self.requests.handle(events)
            self.wake()
        for callback in list(self.after_turn):
            callback()

    def due_in_s(self) -> float:
        """Return the seconds until the link has work."""
        return self.link.due_in_s(self.heap.now_s)

    def send(self, message: msgspec.Struct) -> None:
        """Send to the scheduler; raises what the link raises."""
        self.link.send(message)
        self.wake()

    def close(self) -> None:
        """Do nothing: a simulated gateway is only ever killed."""

    def _set_timer(
        self, seconds: float, callback: Callable[..., object], /, *args: object
    ) -> _Timer:
        timer = _Timer(lambda: callback(*args))
        self.call_later(seconds, timer.fire)
        return timer
