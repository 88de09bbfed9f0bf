"""Simulated client. Knows its expected text and checks every piece that it receives."""

import dataclasses
import random

from services.gateway.completion.completion_text import CompletionText, LogprobEntry
from services.gateway.completion.generation import Choice, Generation
from services.gateway.completion.open_requests import CONNECT_WAIT_S
from services.gateway.http.errors import ApiError
from services.gateway.output.events import OutputEvent
from services.gateway.tokenizing.prompt import Prompt
from shared.messages import Sampling, SubmitRequest, token_ids
from tests.simulation.environment.event_heap import EventHeap, Violation
from tests.simulation.processes.gateway_process import GatewayProcess
from tests.unit.scheduler.support.reference_rank import completion

_FIRST_CHARACTER = 0x4E00
RETRY_S = 0.1


class CharacterDetokenizer:
    """A detokenizer with one character for each token id."""

    def add(self, token: int) -> str:
        """Return the token's character."""
        return chr(_FIRST_CHARACTER + token)

    def finish(self) -> str:
        """Return "": no text is held back."""
        return ""


@dataclasses.dataclass(frozen=True)
class PlannedRequest:
    """A request and its expected result."""

    message: SubmitRequest
    stops: tuple[str, ...]
    tokens: tuple[int, ...]
    """Tokens of an undisturbed run, without regard to stop strings."""
    text: str
    """Text that the client must have read at the end."""
    finish_reason: str


def draw_request(
    name: str, prompt: list[int], system_tokens: int, rng: random.Random
) -> PlannedRequest:
    """Draw a request with this prompt, and compute its expected result."""
    length = rng.choice([1, 3, 8, 12, 20, 30])
    tokens = completion(prompt, length)
    stop_ids: tuple[int, ...] = ()
    stops: tuple[str, ...] = ()
    kind = rng.random()
    if kind < 0.2:
        stop_ids = (rng.choice(tokens),)
        tokens = tokens[: tokens.index(stop_ids[0]) + 1]
    text = "".join(chr(_FIRST_CHARACTER + token) for token in tokens if token not in stop_ids)
    reason = "stop" if stop_ids else "length"
    if kind > 0.85 and text:
        at = rng.randrange(len(text))
        stops = (text[at : at + 2],)
        text, reason = text[: text.index(stops[0])], "stop"
    message = SubmitRequest(
        request_id=name,
        prompt=token_ids.pack(prompt),
        max_tokens=length,
        sampling=Sampling(seed=1, temperature=0.0),
        stop_ids=list(stop_ids),
        tenant=f"tenant {len(prompt) % 3}",
        weight=1.0 + len(prompt) % 2,
        priority=rng.choice([0, 0, 0, 1]),
        cache_salt=rng.choice(["", "", "tenant"]),
        system_tokens=system_tokens,
        cache_boundaries=[len(prompt)],
        deadline_s=1.0 if rng.random() < 0.05 else 1_800.0,
        more_requests_expected=len(prompt) % 3 == 0,
    )
    return PlannedRequest(message, stops, tuple(tokens), text, reason)


class Client:
    """One stream from its request to its end."""

    def __init__(self, planned: PlannedRequest, gateway: GatewayProcess, heap: EventHeap) -> None:
        self.planned = planned
        self.name = planned.message.request_id
        self.gateway = gateway
        self.text = ""
        self.outcome = ""
        """How it ended: finished, left, gone (with its gateway), refused (before any output) or
        failed."""
        self.error: ApiError | None = None
        self.choice: Choice | None = None
        self.is_overdue = False
        """The request's own deadline had passed when it ended."""
        self._submitted_at_s = heap.now_s
        self._generation: Generation | None = None
        self._heap = heap
        self._gives_up_s = heap.now_s + CONNECT_WAIT_S
        gateway.call_later(0.0, self._submit)

    def leave(self) -> None:
        """Disconnect, whether the stream has ended or not."""
        self.gateway.call_later(0.0, self._leave)

    def _leave(self) -> None:
        if self.outcome:
            return
        if self._generation is not None:
            self.gateway.requests.close(self._generation)
        self._end("left")

    def lose_gateway(self) -> None:
        """End because the gateway process is gone."""
        if not self.outcome:
            self._end("gone")

    # --- called by the gateway's code -------------------------------------------------------------

    def add_text(self, choice: Choice, text: str, logprobs: list[LogprobEntry]) -> None:
        """Check that a piece of text continues the expected text."""
        if self.outcome or choice.finish_reason:
            raise Violation(f"{self.name} reads {text!r} after its end")
        self.text += text
        if not self.planned.text.startswith(self.text):
            raise Violation(f"{self.name} reads {self.text!r} instead of {self.planned.text!r}")

    def add_event(self, choice: Choice, event: OutputEvent) -> None:
        """Fail: no request offers tools."""
        raise AssertionError

    def end_choice(self, choice: Choice) -> None:
        """Check text and finish reason at the end of the stream."""
        if self.text != self.planned.text:
            raise Violation(f"{self.name} ends with {self.text!r} of {self.planned.text!r}")
        if choice.finish_reason != self.planned.finish_reason:
            raise Violation(f"{self.name} ends by {choice.finish_reason}")

    # --- from request to end ----------------------------------------------------------------------

    def _submit(self) -> None:
        """Submit when the scheduler is connected, as `OpenRequests.submit` does."""
        if self.outcome:
            return
        if not self.gateway.status.is_fresh:
            if self._heap.now_s < self._gives_up_s:
                self.gateway.call_later(RETRY_S, self._submit)
            else:
                self._end("refused")
            return
        message = self.planned.message
        prompt = Prompt(token_ids.unpack(message.prompt).tolist())
        generation = Generation(self.name, [prompt], self)
        text = CompletionText(
            CharacterDetokenizer(),
            frozenset(message.stop_ids),
            list(self.planned.stops),
        )
        self.choice = Choice(generation, 0, message, text)
        generation.choices = [self.choice]
        self._generation = generation
        self._submitted_at_s = self._heap.now_s
        self.gateway.after_turn.append(self._check_end)
        try:
            self.gateway.requests.send(generation)
        except ApiError as error:
            generation.fail(error)
        self._check_end()

    def _check_end(self) -> None:
        """End when the stream has ended, and close the generation as the HTTP handler does."""
        generation = self._generation
        if generation is None or self.outcome or not generation.ended.is_set():
            return
        assert self.choice is not None
        self.error = generation.error
        if self.error is None:
            outcome = "finished"
        elif self.choice.is_accepted or self.choice.tokens:
            outcome = "failed"
        else:
            outcome = "refused"
        self.gateway.requests.close(generation)
        self._end(outcome)

    def _end(self, outcome: str) -> None:
        self.outcome = outcome
        self.is_overdue = self._heap.now_s - self._submitted_at_s >= self.planned.message.deadline_s
        detail = self.error.message if self.error is not None else ""
        self._heap.record(self.name, outcome, len(self.text), detail)
        if self._check_end in self.gateway.after_turn:
            self.gateway.after_turn.remove(self._check_end)
