"""One HTTP request and its choices: what was asked, what came back, and how each ended."""

import asyncio
import dataclasses
from typing import Any, Protocol

from services.gateway import cache_report
from services.gateway.completion_text import CompletionText
from services.gateway.logprobs import LogprobEntry
from services.gateway.openai_errors import ApiError
from services.gateway.prompt import Prompt
from services.gateway.tool_calls import ParsedCall, ToolCalls
from shared.messages import CachedPrefix, SubmitRequest, TokenLogprobs


class Outlet(Protocol):
    """Where a generation's text goes: a stream of events, or one body at the end."""

    def add_text(self, choice: "Choice", text: str, logprobs: list[LogprobEntry]) -> None:
        """Take a piece of one choice's text."""
        ...

    def add_call(self, choice: "Choice", number: int, call: ParsedCall) -> None:
        """Take a tool call; `number` counts a choice's calls from 0."""
        ...

    def end_choice(self, choice: "Choice") -> None:
        """Take note that a choice has ended; `choice.finish_reason` is set."""
        ...


@dataclasses.dataclass(slots=True)
class Usage:
    """Token counts of one HTTP request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cache: dict[str, Any] | None
    """What `cache_report` says of the first choice."""


class Choice:
    """One completion: a request of its own to the scheduler. Keeps every token for resuming."""

    __slots__ = (
        "cached",
        "calls",
        "finish_reason",
        "generation",
        "has_logprobs",
        "index",
        "is_accepted",
        "is_accounted",
        "last_token_s",
        "order",
        "submitted_s",
        "text",
        "tokens",
    )

    def __init__(
        self,
        generation: "Generation",
        index: int,
        order: SubmitRequest,
        text: CompletionText,
    ) -> None:
        self.generation = generation
        self.index = index
        self.order = order
        self.text = text
        self.calls: ToolCalls | None = None
        """Set when tools were offered."""
        self.has_logprobs = order.sampling.top_logprobs is not None
        self.tokens: list[int] = []
        """Every token received, in order."""
        self.finish_reason = ""
        """"" while it runs."""
        self.is_accepted = False
        """The scheduler has taken it once, so it waits if a restarted one cannot take it yet."""
        self.is_accounted = False
        """The scheduler has said how it ended."""
        self.cached: CachedPrefix | None = None
        """What the cache had of the prompt when it was first admitted; None before."""
        self.submitted_s = 0.0
        self.last_token_s = 0.0

    def add(self, tokens: list[int], logprobs: list[TokenLogprobs]) -> bool:
        """Take new tokens; True when a stop string has ended the completion."""
        self.tokens += tokens
        text, is_stopped = self.text.add(tokens, logprobs)
        if text:
            entries = self.text.take_logprobs() if self.has_logprobs else []
            if self.calls is None:
                self.generation.outlet.add_text(self, text, entries)
            else:
                self._add_pieces(self.calls, self.calls.push(text))
        if is_stopped:
            self._end("stop")
        return is_stopped

    def finish(self, finish_reason: str) -> None:
        """End the completion: the scheduler says so."""
        text, is_stopped = self.text.finish()
        entries = self.text.take_logprobs(is_final=not is_stopped)
        if self.calls is not None:
            self._add_pieces(self.calls, self.calls.push(text))
        elif text or entries:
            self.generation.outlet.add_text(self, text, entries)
        self._end("stop" if is_stopped else finish_reason)

    def _add_pieces(self, calls: ToolCalls, pieces: list[str | ParsedCall]) -> None:
        number = calls.count - sum(isinstance(piece, ParsedCall) for piece in pieces)
        for piece in pieces:
            if isinstance(piece, str):
                self.generation.outlet.add_text(self, piece, [])
            else:
                self.generation.outlet.add_call(self, number, piece)
                number += 1

    def _end(self, finish_reason: str) -> None:
        if self.calls is not None:
            self._add_pieces(self.calls, self.calls.finish())
            if self.calls.count and finish_reason == "stop":
                finish_reason = "tool_calls"
        self.finish_reason = finish_reason
        self.generation.outlet.end_choice(self)
        self.generation.check_ended()


class Generation:
    """All choices of one HTTP request."""

    def __init__(self, name: str, prompts: list[Prompt], outlet: Outlet) -> None:
        self.name = name
        self.prompts = prompts
        self.prompt_param = "prompt"
        """The field that holds the prompt, for errors."""
        self.outlet = outlet
        self.choices: list[Choice] = []
        self.error: ApiError | None = None
        loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = loop.create_future()
        """Done at the first token of any choice, or at the end."""
        self.ended: asyncio.Future[None] = loop.create_future()
        """Done when every choice has ended, or `error` is set."""
        self.accounted: asyncio.Future[None] = loop.create_future()
        """Done when the scheduler has confirmed every choice's end."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(prompt.ids) for prompt in self.prompts)

    def check_failed(self) -> None:
        """Raise the error that has ended this generation, if one has."""
        if self.error is not None:
            raise self.error

    def begin(self) -> None:
        """Note that there is something to send."""
        if not self.begun.done():
            self.begun.set_result(None)

    def fail(self, error: ApiError) -> None:
        """End all choices with an error; the first one counts."""
        if self.ended.done():
            return
        self.error = error
        self._resolve(self.ended)
        self._resolve(self.accounted)
        self.begin()

    def check_ended(self) -> None:
        """Note when no choice runs any more."""
        if all(choice.finish_reason for choice in self.choices):
            self._resolve(self.ended)
            self.begin()

    def check_accounted(self) -> None:
        """Note when the scheduler has confirmed every end."""
        if all(choice.is_accounted for choice in self.choices):
            self._resolve(self.accounted)

    def usage(self) -> Usage:
        """Return the token counts so far; the prompt of several choices counts once."""
        per_prompt = max(1, len(self.choices) // max(1, len(self.prompts)))
        cached = [choice.cached for choice in self.choices[::per_prompt]]
        first = self.choices[0]
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=sum(len(choice.tokens) for choice in self.choices),
            cached_tokens=sum(
                known.memory_tokens + known.stored_tokens for known in cached if known is not None
            ),
            cache=cache_report.shape(first.cached, len(first.order.prompt)),
        )

    def cache_line(self) -> str:
        """Return what the response's header says of the first choice."""
        first = self.choices[0]
        return cache_report.line(first.cached, len(first.order.prompt))

    @staticmethod
    def _resolve(future: "asyncio.Future[None]") -> None:
        if not future.done():
            future.set_result(None)
