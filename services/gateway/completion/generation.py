"""One HTTP request and its choices. Owns their tokens and ends; sends nothing to the scheduler."""

import asyncio
import dataclasses
from typing import Any, Protocol

import msgspec

from services.gateway.completion.completion_text import CompletionText, LogprobEntry
from services.gateway.http import cache_header
from services.gateway.http.errors import ApiError
from services.gateway.output.completion_parser import CompletionParser
from services.gateway.output.events import CallEnded, OutputEvent, Reasoning, Text
from services.gateway.tokenizing.prompt import Prompt
from services.gateway.tokenizing.replay.recorder import TurnRecorder
from services.gateway.tokenizing.replay.turns import DecodeTokens
from services.gateway.tracing.traced_request import TracedRequest
from shared.messages import CachedPrefix, SubmitRequest, TokenLogprobs, token_ids


class OutputSink(Protocol):
    """Receiver of the output and the ends of a generation's choices.

    `EventStream` sends them as server-sent events; `BodyCollector` keeps them for one body.
    """

    def add_text(self, choice: "Choice", text: str, logprobs: list[LogprobEntry]) -> None:
        """Add a piece of one choice's text.

        Args:
            choice: the choice that the text belongs to.
            text: the next piece, after all pieces added before.
            logprobs: tokens of this piece with their log probabilities; [] if none were requested.
        """
        ...

    def add_event(self, choice: "Choice", event: OutputEvent) -> None:
        """Add an event of one choice that is no text."""
        ...

    def end_choice(self, choice: "Choice") -> None:
        """Receive the end of a choice, after its last text; `choice.finish_reason` is set."""
        ...


@dataclasses.dataclass(slots=True, eq=False)
class Choice:
    """One completion of an HTTP request; to the scheduler it is one request.

    Keeps every token, so that a restarted scheduler can continue the completion.
    """

    generation: "Generation"
    index: int
    """Number of the choice, counted from 0 over all prompts."""
    submit_request: SubmitRequest
    """The request to the scheduler that generates this completion."""
    text: CompletionText
    parser: CompletionParser | None = None
    """Finds reasoning and tool calls in the text; None: all of it is the answer."""
    ends_after_call: bool = False
    """The first tool call ends the completion: the client wants no more in one answer."""
    recorder: TurnRecorder | None = None
    """Remembers the completion for the client's next request; None: it is no turn."""
    tokens: list[int] = dataclasses.field(default_factory=list)
    """Every token received, in order."""
    reasoning_tokens: int = 0
    """Tokens whose text is reasoning; one that begins or ends it counts as its neighbour."""
    silent_tokens: int = 0
    """The last tokens, whose text has made no event yet."""
    calls: int = 0
    """Tool calls in it so far."""
    finish_reason: str = ""
    """Empty while the choice runs."""
    is_accepted: bool = False
    """The scheduler accepted it once, so a restarted scheduler gets it again until it does."""
    is_confirmed: bool = False
    """The scheduler has reported how the choice ended."""
    is_retry_due: bool = False
    """A timer will send it to the scheduler again."""
    cached: CachedPrefix | None = None
    """Cached part of the prompt at its first admission, None before."""
    drafts_accepted: int = 0
    """Tokens of the completion that were drafts first."""
    drafts_rejected: int = 0
    """Drafts that were verified and are not part of the completion."""
    drafts_past_end: int = 0
    """Accepted drafts that came after a stop string had ended the completion."""
    submitted_s: float = 0.0
    """Time at which it was sent to the scheduler first, in monotonic seconds."""
    last_token_s: float = 0.0
    """Time of its latest tokens, in monotonic seconds."""

    @property
    def request_id(self) -> str:
        """Id of the request to the scheduler that generates this completion."""
        return self.submit_request.request_id

    def resumed_request(self, now_s: float) -> SubmitRequest:
        """Return the request with which a restarted scheduler continues the completion."""
        request = self.submit_request
        return msgspec.structs.replace(
            request,
            generated=token_ids.pack(self.tokens),
            deadline_s=max(0.0, request.deadline_s - (now_s - self.submitted_s)),
            more_requests_expected=False,
        )

    def add(self, tokens: list[int], logprobs: list[TokenLogprobs]) -> bool:
        """Add the next tokens and pass their text to the sink.

        Args:
            tokens: token ids of one step.
            logprobs: one entry per token; [] if none were requested.

        Returns:
            Whether a stop string or the first tool call has ended the completion.
        """
        self.tokens += tokens
        text, is_stopped = self.text.add(tokens, logprobs)
        if self.parser is None:
            if text:
                self._add_text(text, self.text.take_logprobs() if logprobs else [])
        else:
            self.silent_tokens += len(tokens)
            if text and self._add_events(self.parser.push(text)):
                self._end_after_call()
                return True
        if is_stopped:
            past_end = self.text.tokens_after_stop
            del self.tokens[len(self.tokens) - past_end :]
            self.count_past_end(past_end)
            self._end("stop")
        return is_stopped

    def count_past_end(self, tokens: int) -> None:
        """Count accepted drafts of one step that came after a stop string had ended the completion.

        Args:
            tokens: number of the step's tokens after the end. The last of them was sampled by the
                model itself, so it is not counted as a draft.
        """
        self.drafts_past_end += max(0, tokens - 1)

    def set_draft_counts(self, drafts_accepted: int, drafts_rejected: int) -> None:
        """Store how many draft tokens were accepted and rejected over the whole completion.

        Accepted drafts after the completion's end count as rejected.

        Args:
            drafts_accepted: draft tokens that the scheduler counted as accepted.
            drafts_rejected: draft tokens that the scheduler counted as rejected.
        """
        past_end = min(self.drafts_past_end, drafts_accepted)
        self.drafts_accepted = drafts_accepted - past_end
        self.drafts_rejected = drafts_rejected + past_end

    def finish(self, finish_reason: str) -> None:
        """Pass the text that was held back to the sink and end the completion.

        Args:
            finish_reason: the scheduler's `stop` or `length`. A stop string in the text that was
                held back makes it `stop`, and tool calls turn `stop` into `tool_calls`.
        """
        text, is_stopped = self.text.finish()
        if self.parser is not None:
            if self._add_events(self.parser.push(text)):
                self._end_after_call()
                return
        elif (entries := self.text.take_logprobs(is_final=not is_stopped)) or text:
            self._add_text(text, entries)
        self._end("stop" if is_stopped else finish_reason)

    def _add_text(self, text: str, entries: list[LogprobEntry]) -> None:
        if self.recorder is not None:
            self.recorder.add(Text(text))
        self.generation.sink.add_text(self, text, entries)

    def _add_events(self, events: list[OutputEvent]) -> bool:
        """Pass the parser's events to the sink; return whether a call has ended the completion.

        Only tokens of the answer have log probabilities, not those of reasoning and calls.
        """
        assert self.parser is not None
        self.calls = self.parser.call_count
        places = iter(self.parser.take_text_places())
        if events:
            if isinstance(events[0], Reasoning):
                self.reasoning_tokens += self.silent_tokens
            self.silent_tokens = 0
        for event in events:
            if self.recorder is not None:
                self.recorder.add(event)
            if isinstance(event, Text):
                has_logprobs = self.text.has_logprobs
                entries = self.text.take_logprobs_of(next(places)) if has_logprobs else []
                self.generation.sink.add_text(self, event.text, entries)
            else:
                self.generation.sink.add_event(self, event)
            if self.ends_after_call and isinstance(event, CallEnded):
                return True
        if self.text.has_logprobs:
            self.text.drop_logprobs(self.parser.final_chars)
        return False

    def _end_after_call(self) -> None:
        # What the parser holds back came after the call.
        self.parser = None
        self._end("tool_calls")

    def _end(self, finish_reason: str) -> None:
        if self.parser is not None:
            self._add_events(self.parser.finish())
            if self.parser.call_count and finish_reason == "stop":
                finish_reason = "tool_calls"
        if self.recorder is not None:
            # Before the client knows the end: it may send the turn back at once.
            self.recorder.finish(self.tokens)
            self.recorder = None
        self.finish_reason = finish_reason
        self.generation.sink.end_choice(self)
        self.generation.update_ended()


@dataclasses.dataclass(slots=True, eq=False)
class Generation:
    """All choices of one HTTP request, with events for their first token, their end and failure."""

    response_id: str
    """Id of the response."""
    prompts: list[Prompt]
    sink: OutputSink
    """Receives the choices' output."""
    prompt_param: str = "prompt"
    """The request field with the prompt, for errors."""
    tenant: str = ""
    """Whom it counts for (`authentication.tenant`)."""
    weight: float = 1.0
    """The tenant's weight when tenants take turns."""
    session: str = ""
    """The client's name of its session (`request_options.session_key`)."""
    decode: DecodeTokens | None = None
    """Decodes tokens of its prompts; None: no text of them is reported."""
    traced: TracedRequest | None = None
    """The HTTP request, whose times are noted; None: they are not."""
    choices: list[Choice] = dataclasses.field(default_factory=list)
    """Empty at first; the caller sets it."""
    error: ApiError | None = None
    # Events need no event loop until a task waits for them; futures do.
    started: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Set at the first token of any choice, or at the end."""
    ended: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Set when every choice has ended, or `error` is set."""
    confirmed: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Set when the scheduler has confirmed every choice's end."""

    @property
    def prompt_tokens(self) -> int:
        """Sum of the lengths of the request's prompts in tokens; each prompt counts once."""
        return sum(len(prompt.ids) for prompt in self.prompts)

    @property
    def log_fields(self) -> dict[str, str]:
        """Fields of all log lines about the request (`TracedRequest.log_fields`)."""
        return self.traced.log_fields if self.traced is not None else {}

    def note_submitted(self, now_s: float) -> None:
        """Note that its choices are being sent to the scheduler."""
        if self.traced is not None:
            self.traced.submitted_s = now_s

    def note_admitted(self, now_s: float) -> None:
        """Note that the scheduler has admitted one of its choices."""
        if self.traced is not None and self.traced.admitted_s is None:
            self.traced.admitted_s = now_s

    def note_first_token(self, now_s: float) -> None:
        """Note that the first token of one of its choices has come."""
        if self.traced is not None and self.traced.first_token_s is None:
            self.traced.first_token_s = now_s
        self.started.set()

    def raise_if_failed(self) -> None:
        """Raise the error that ended this generation, if there is one.

        Raises:
            ApiError: when the generation has failed.
        """
        if self.error is not None:
            raise self.error

    def fail(self, error: ApiError) -> None:
        """Record the error that ends this generation and wake the tasks that wait for it.

        Does nothing if the generation has ended or failed already. Sends no abort to the scheduler.
        """
        if self.ended.is_set():
            return
        self.error = error
        self.ended.set()
        self.confirmed.set()
        self.started.set()

    def update_ended(self) -> None:
        """Set the events `ended` and `started` if every choice has a finish reason."""
        if all(choice.finish_reason for choice in self.choices):
            self.ended.set()
            self.started.set()

    def update_confirmed(self) -> None:
        """Set the event `confirmed` if the scheduler has reported the end of every choice."""
        if all(choice.is_confirmed for choice in self.choices):
            self.confirmed.set()

    def cache_header_value(self) -> str:
        """Return the value of `X-Lockstep-Cache`, which describes the first choice's prompt."""
        first = self.choices[0]
        return cache_header.header_value(
            first.cached, first.submit_request.prompt_tokens, self._texts_at_divergence()
        )

    def cache_fields(self) -> dict[str, Any] | None:
        """Return the same facts as fields of a JSON body; None before the scheduler reported."""
        first = self.choices[0]
        return cache_header.body_fields(
            first.cached, first.submit_request.prompt_tokens, self._texts_at_divergence()
        )

    def _texts_at_divergence(self) -> tuple[str, str] | None:
        """Return the first prompt's own text before and after the place where it diverged."""
        cached = self.choices[0].cached
        if cached is None:
            return None
        ids = cache_header.ids_at_divergence(self.prompts[0].ids, cached)
        return cache_header.texts_at_divergence(ids, self.decode)
