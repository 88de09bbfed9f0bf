"""One HTTP request and its choices: what was asked, what came back, and how each ended."""

import asyncio
import dataclasses
from typing import Any, Protocol

from services.gateway.completion.completion_text import CompletionText, LogprobEntry
from services.gateway.http import cache_header
from services.gateway.http.errors import ApiError
from services.gateway.tokenizing.prompt import Prompt
from services.gateway.tokenizing.tool_calls import ParsedCall, ToolCalls
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
    drafts_accepted: int
    """Of the completion's tokens."""
    drafts_rejected: int
    """Verified, and not part of the completion."""


class Choice:
    """One completion: a request of its own to the scheduler. Keeps every token for resuming."""

    __slots__ = (
        "cached",
        "calls",
        "drafts_accepted",
        "drafts_past_end",
        "drafts_rejected",
        "finish_reason",
        "generation",
        "has_logprobs",
        "index",
        "is_accepted",
        "is_accounted",
        "is_retry_due",
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
        self.is_retry_due = False
        """A timer is set that offers it to the scheduler again."""
        self.cached: CachedPrefix | None = None
        """What the cache had of the prompt when it was first admitted; None before."""
        self.drafts_accepted = 0
        self.drafts_rejected = 0
        self.drafts_past_end = 0
        """Accepted drafts that came after a stop string had ended the completion."""
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
            past_end = self.text.tokens_past_stop
            del self.tokens[len(self.tokens) - past_end :]
            self.add_past_end(past_end)
            self._end("stop")
        return is_stopped

    def add_past_end(self, tokens: int) -> None:
        """Note that so many of one step's tokens came after the end; a step's last is no draft."""
        self.drafts_past_end += max(0, tokens - 1)

    def account(self, drafts_accepted: int, drafts_rejected: int) -> None:
        """Take what the scheduler has counted. Drafts past the end are none of the completion."""
        past_end = min(self.drafts_past_end, drafts_accepted)
        self.drafts_accepted = drafts_accepted - past_end
        self.drafts_rejected = drafts_rejected + past_end

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
        # Events, not futures: without anybody who waits they need no event loop.
        self.begun = asyncio.Event()
        """Set at the first token of any choice, or at the end."""
        self.ended = asyncio.Event()
        """Set when every choice has ended, or `error` is set."""
        self.accounted = asyncio.Event()
        """Set when the scheduler has confirmed every choice's end."""

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
        self.begun.set()

    def fail(self, error: ApiError) -> None:
        """End all choices with an error; the first one counts."""
        if self.ended.is_set():
            return
        self.error = error
        self.ended.set()
        self.accounted.set()
        self.begin()

    def check_ended(self) -> None:
        """Note when no choice runs any more."""
        if all(choice.finish_reason for choice in self.choices):
            self.ended.set()
            self.begin()

    def check_accounted(self) -> None:
        """Note when the scheduler has confirmed every end."""
        if all(choice.is_accounted for choice in self.choices):
            self.accounted.set()

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
            cache=cache_header.shape(first.cached, len(first.order.prompt)),
            drafts_accepted=sum(choice.drafts_accepted for choice in self.choices),
            drafts_rejected=sum(choice.drafts_rejected for choice in self.choices),
        )

    def cache_line(self) -> str:
        """Return what the response's header says of the first choice."""
        first = self.choices[0]
        return cache_header.line(first.cached, len(first.order.prompt))
