"""A gateway as a simulated process: the real link and the real open requests."""

from collections.abc import Callable

import msgspec

from services.gateway.completion.open_requests import OpenRequests
from services.gateway.completion.streaming import FlushList
from services.gateway.metrics.gateway import GatewayMetrics
from services.gateway.scheduler_client.scheduler_status import StatusBoard
from shared.configuration.settings import Config
from shared.messages import ToGateway
from shared.transport.links import Dialer
from tests.simulation.environment.event_heap import Heap
from tests.simulation.environment.network import Wire
from tests.simulation.processes.process import Process

DRAIN_MESSAGES_MAX = 32


class _Timer:
    """A timer that can be called off."""

    def __init__(self, do: Callable[[], object]) -> None:
        self._do: Callable[[], object] | None = do

    def cancel(self) -> None:
        """Do not call back any more."""
        self._do = None

    def fire(self) -> None:
        """Call back, unless it was called off."""
        do, self._do = self._do, None
        if do is not None:
            do()


class GatewayProcess(Process):
    """One life of a gateway."""

    def __init__(self, name: str, heap: Heap, wire: Wire, config: Config) -> None:
        super().__init__(name, heap, wire)
        with self.opens():
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
        """What looks at the requests after each turn: the clients."""
        self.wake()

    def turn(self) -> None:
        """Take what has arrived."""
        events = self.link.poll(0.0, DRAIN_MESSAGES_MAX)
        if events:
            self.requests.handle(events)
            self.wake()
        for look in list(self.after_turn):
            look()

    def due_in_s(self) -> float:
        """Return when the link has something to say."""
        return self.link.due_in_s(self.heap.now_s)

    def send(self, message: msgspec.Struct) -> None:
        """Send to the scheduler; raises as the link."""
        self.link.send(message)
        self.wake()

    def close(self) -> None:
        """Nothing in a run closes a gateway: it is killed."""

    def _set_timer(
        self, seconds: float, callback: Callable[..., object], /, *args: object
    ) -> _Timer:
        timer = _Timer(lambda: callback(*args))
        self.later(seconds, timer.fire)
        return timer
