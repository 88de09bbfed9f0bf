"""OpenRequests without event loop and socket: a recording link, and timers under test control."""

import dataclasses
import heapq
import itertools
from collections.abc import Callable

import msgspec

from services.gateway.completion.completion_text import CompletionText, LogprobEntry
from services.gateway.completion.generation import Choice, Generation
from services.gateway.completion.open_requests import OpenRequests
from services.gateway.completion.streaming import FlushList
from services.gateway.links.scheduler_status import StatusBoard
from services.gateway.metrics.gateway import GatewayMetrics
from services.gateway.output.events import OutputEvent
from services.gateway.tokenizing import vocabulary
from services.gateway.tokenizing.detokenizer import ByteLevelDetokenizer
from services.gateway.tokenizing.prompt import Prompt
from shared.clock import ManualClock
from shared.errors import LinkFull, PeerUnknown
from shared.identifiers import PeerId
from shared.messages import Sampling, SubmitRequest, ToGateway, token_ids
from shared.transport.links import Connected, Lost, Received
from tests.unit.gateway.tokenizing import small_tokenizers

STOP_ID = 2
SCHEDULER = PeerId(b"scheduler")


class RecordingLink:
    """Records sent messages; refuses messages as the real link does."""

    def __init__(self) -> None:
        self.sent: list[msgspec.Struct] = []
        self.is_connected = False
        self.is_full = False

    def send(self, message: msgspec.Struct) -> None:
        """Record a message. Raises PeerUnknown, LinkFull."""
        if not self.is_connected:
            raise PeerUnknown("not connected")
        if self.is_full:
            raise LinkFull("full")
        self.sent.append(message)

    def close(self) -> None:
        """Refuse further messages."""
        self.is_connected = False


@dataclasses.dataclass(order=True)
class _Timer:
    at_s: float
    number: int
    callback: Callable[[], object] | None = dataclasses.field(compare=False)

    def cancel(self) -> None:
        """Remove the callback."""
        self.callback = None


class ManualTimers:
    """ManualTimers that fire when the test advances the clock."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self._heap: list[_Timer] = []
        self._numbers = itertools.count()

    def later(self, seconds: float, callback: Callable[..., object], /, *args: object) -> _Timer:
        """Call `callback` after `seconds`."""
        at_s = self._clock.now() + seconds
        timer = _Timer(at_s, next(self._numbers), lambda: callback(*args))
        heapq.heappush(self._heap, timer)
        return timer

    def advance(self, seconds: float) -> None:
        """Advance the clock; timers fire at their due times."""
        end_s = self._clock.now() + seconds
        while self._heap and self._heap[0].at_s <= end_s:
            timer = heapq.heappop(self._heap)
            self._clock.advance(timer.at_s - self._clock.now())
            if timer.callback is not None:
                timer.callback()
        self._clock.advance(end_s - self._clock.now())

    @property
    def pending(self) -> int:
        """The number of timers with a callback."""
        return sum(timer.callback is not None for timer in self._heap)


class RecordingSink:
    """A sink that records the text of each choice."""

    def __init__(self, choice_count: int) -> None:
        self.texts = [""] * choice_count

    def add_text(self, choice: Choice, text: str, _logprobs: list[LogprobEntry]) -> None:
        """Record a piece of text."""
        self.texts[choice.index] += text

    def add_event(self, choice: Choice, event: OutputEvent) -> None:
        """Fail: these requests have no tools."""
        raise AssertionError((choice, event))

    def end_choice(self, choice: Choice) -> None:
        """Do nothing; `choice.finish_reason` has the result."""


class OpenRequestsHarness:
    """OpenRequests and the objects that it depends on."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.timers = ManualTimers(self.clock)
        self.link = RecordingLink()
        self.status = StatusBoard(self.clock)
        self.requests = OpenRequests(
            link=self.link,
            call_later=self.timers.later,
            clock=self.clock,
            status=self.status,
            metrics=GatewayMetrics(self.status),
            flush_list=FlushList(),
        )
        self._names = itertools.count()

    def connect(self) -> None:
        """Start a session with the scheduler."""
        self.link.is_connected = True
        self.requests.handle([Connected(SCHEDULER)])

    def lose(self) -> None:
        """End the session."""
        self.link.is_connected = False
        self.requests.handle([Lost(SCHEDULER, "silent")])

    def receive(self, *messages: ToGateway) -> None:
        """Handle messages from the scheduler."""
        self.requests.handle([Received(SCHEDULER, 0, message) for message in messages])

    def submit(self, max_tokens: int = 8, stops: list[str] | None = None) -> Choice:
        """Submit a request with one choice, and return the choice."""
        prompt = [10, 11, 12]
        generation = Generation(f"r{next(self._names)}", [Prompt(prompt)], RecordingSink(1))
        request = SubmitRequest(
            request_id=f"{generation.response_id}:0",
            prompt=token_ids.pack(prompt),
            sampling=Sampling(seed=1),
            max_tokens=max_tokens,
            stop_ids=[STOP_ID],
            deadline_s=60.0,
        )
        table = vocabulary.read(small_tokenizers.byte_level())
        detokenizer = ByteLevelDetokenizer(table)
        text = CompletionText(detokenizer, frozenset({STOP_ID}), stops or [])
        generation.choices = [Choice(generation, 0, request, text)]
        self.requests.send(generation)
        return generation.choices[0]

    def submitted(self) -> list[SubmitRequest]:
        """Return all submitted requests, resumed ones included."""
        return [message for message in self.link.sent if isinstance(message, SubmitRequest)]
