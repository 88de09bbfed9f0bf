"""A client that knows what it must get, and looks at every piece that it gets."""

import dataclasses
import random

from services.gateway.completion.completion_text import CompletionText, LogprobEntry
from services.gateway.completion.generation import Choice, Generation
from services.gateway.completion.open_requests import CONNECT_WAIT_S
from services.gateway.http.errors import ApiError
from services.gateway.tokenizing.prompt import Prompt
from services.gateway.tokenizing.tool_calls import ParsedCall
from shared.messages import Sampling, SubmitRequest
from tests.simulation.environment.event_heap import Heap, Violation
from tests.simulation.processes.gateway_process import GatewayProcess
from tests.unit.scheduler.reference_rank import completion

_FIRST_CHARACTER = 0x4E00
ASK_AGAIN_S = 0.1


class OneCharacterPerToken:
    """A detokenizer for token ids that are no text."""

    def add(self, token: int) -> str:
        """Return the token's character."""
        return chr(_FIRST_CHARACTER + token)

    def finish(self) -> str:
        """Nothing is ever held back."""
        return ""


@dataclasses.dataclass(frozen=True)
class Wish:
    """What a client asks for."""

    order: SubmitRequest
    stops: tuple[str, ...]
    tokens: tuple[int, ...]
    """What an undisturbed run generates, stop strings aside."""
    text: str
    """What the client must read in the end."""
    finish_reason: str


def draw_wish(name: str, prompt: list[int], system_tokens: int, chance: random.Random) -> Wish:
    """Return a request with this prompt, and what must come of it."""
    length = chance.choice([1, 3, 8, 12, 20, 30])
    tokens = completion(prompt, length)
    stop_ids: tuple[int, ...] = ()
    stops: tuple[str, ...] = ()
    kind = chance.random()
    if kind < 0.2:
        stop_ids = (chance.choice(tokens),)
        tokens = tokens[: tokens.index(stop_ids[0]) + 1]
    text = "".join(chr(_FIRST_CHARACTER + token) for token in tokens if token not in stop_ids)
    reason = "stop" if stop_ids else "length"
    if kind > 0.85 and text:
        at = chance.randrange(len(text))
        stops = (text[at : at + 2],)
        text, reason = text[: text.index(stops[0])], "stop"
    order = SubmitRequest(
        request_id=name,
        prompt=prompt,
        max_tokens=length,
        sampling=Sampling(seed=1, temperature=0.0),
        stop_ids=list(stop_ids),
        priority=chance.choice([0, 0, 0, 1]),
        cache_salt=chance.choice(["", "", "tenant"]),
        system_tokens=system_tokens,
        cache_boundaries=[len(prompt)],
        deadline_s=1.0 if chance.random() < 0.05 else 1_800.0,
        more_requests_expected=len(prompt) % 3 == 0,
    )
    return Wish(order, stops, tuple(tokens), text, reason)


class Client:
    """One stream, from its question to its end."""

    def __init__(self, wish: Wish, gateway: GatewayProcess, heap: Heap) -> None:
        self.wish = wish
        self.name = wish.order.request_id
        self.gateway = gateway
        self.text = ""
        self.outcome = ""
        """How it ended: finished, left, gone (with its gateway), refused (nothing was begun), or
        failed."""
        self.error: ApiError | None = None
        self.choice: Choice | None = None
        self.is_overdue = False
        """Its own deadline had passed when it ended."""
        self._asked_at_s = heap.now_s
        self._generation: Generation | None = None
        self._heap = heap
        self._gives_up_s = heap.now_s + CONNECT_WAIT_S
        gateway.later(0.0, self._ask)

    def leave(self) -> None:
        """The client goes away, whether its stream has ended or not."""
        self.gateway.later(0.0, self._leave)

    def _leave(self) -> None:
        if self.outcome:
            return
        if self._generation is not None:
            self.gateway.requests.close(self._generation)
        self._end("left")

    def lose_gateway(self) -> None:
        """Its gateway's process is gone."""
        if not self.outcome:
            self._end("gone")

    # --- what the real code calls ---------------------------------------------------------------

    def add_text(self, choice: Choice, text: str, logprobs: list[LogprobEntry]) -> None:
        """Read a piece of text: it must go on where the last one ended, and be right."""
        if self.outcome or choice.finish_reason:
            raise Violation(f"{self.name} reads {text!r} after its end")
        self.text += text
        if not self.wish.text.startswith(self.text):
            raise Violation(f"{self.name} reads {self.text!r} instead of {self.wish.text!r}")

    def add_call(self, choice: Choice, number: int, call: ParsedCall) -> None:
        """Nobody offers tools here."""
        raise AssertionError

    def end_choice(self, choice: Choice) -> None:
        """The stream ends: everything must be there."""
        if self.text != self.wish.text:
            raise Violation(f"{self.name} ends with {self.text!r} of {self.wish.text!r}")
        if choice.finish_reason != self.wish.finish_reason:
            raise Violation(f"{self.name} ends by {choice.finish_reason}")

    # --- its life -------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Ask as soon as the scheduler is there, as `OpenRequests.submit` does."""
        if self.outcome:
            return
        if not self.gateway.status.is_fresh:
            if self._heap.now_s < self._gives_up_s:
                self.gateway.later(ASK_AGAIN_S, self._ask)
            else:
                self._end("refused")
            return
        order = self.wish.order
        generation = Generation(self.name, [Prompt(order.prompt)], self)
        text = CompletionText(
            OneCharacterPerToken(),
            frozenset(order.stop_ids),
            list(self.wish.stops),
            has_logprobs=False,
        )
        self.choice = Choice(generation, 0, order, text)
        generation.choices = [self.choice]
        self._generation = generation
        self._asked_at_s = self._heap.now_s
        self.gateway.after_turn.append(self._look)
        try:
            self.gateway.requests.send(generation, "prompt")
        except ApiError as error:
            generation.fail(error)
        self._look()

    def _look(self) -> None:
        """End when the stream has: the handler's `finally` closes the generation."""
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
        self.is_overdue = self._heap.now_s - self._asked_at_s >= self.wish.order.deadline_s
        detail = self.error.message if self.error is not None else ""
        self._heap.note(self.name, outcome, len(self.text), detail)
        if self._look in self.gateway.after_turn:
            self.gateway.after_turn.remove(self._look)
