"""Serializer: the bytes that every dialect makes of a generation. Owns no dialect."""

import abc
import dataclasses

from services.gateway.completion.completion_text import LogprobEntry
from services.gateway.completion.generation import Generation
from services.gateway.http.errors import ApiError
from services.gateway.output.events import OutputEvent
from shared.errors import InvariantBroken
from shared.messages import TokenLogprobs

Pieces = list[bytes | bytearray]


@dataclasses.dataclass(frozen=True, slots=True)
class ResponseMetadata:
    """Id, time and model of one response, which every chunk of its stream repeats."""

    response_id: str
    """The response's field `id`."""
    created: int
    """Time of the request in seconds since 1970."""
    model: str
    """The model's name as the client gave it."""
    fingerprint: str | None
    """The response's `system_fingerprint`, None while it is not known."""


@dataclasses.dataclass(slots=True)
class CollectedChoice:
    """One choice of a response that is sent as one body."""

    index: int
    """Number of the choice, counted from 0 over all prompts."""
    logprobs: list[bytearray] | None
    """The JSON elements of each list in its field `logprobs`, None if none were requested."""
    events: list[OutputEvent] = dataclasses.field(default_factory=list)
    """Its output; neighbouring pieces of one kind may be several events."""
    finish_reason: str = ""
    """`stop`, `length` or `tool_calls`; empty before the end."""
    logprob_counts: list[int] = dataclasses.field(default_factory=list)
    """Log probabilities of each text, once neighbouring pieces are joined; [] if none were
    requested."""


class Serializer(abc.ABC):
    """Serializer of one response in one dialect: makes its server-sent events or its whole body.

    Each response has its own, so a format may keep state. `index` is the number of a choice,
    counted from 0 over all prompts.
    """

    logprob_lists = 0
    """Number of lists in which a choice's log probabilities are collected for a whole body."""
    reports_usage = True
    """The end of a stream has token counts, for which it waits until the scheduler says them."""

    def __init__(self, metadata: ResponseMetadata) -> None:
        """Begin a response.

        Args:
            metadata: fields that are the same in the whole response.
        """
        self.metadata = metadata

    @abc.abstractmethod
    def begin(self, generation: Generation) -> list[bytes]:
        """Return the stream's first events, which are sent before any output.

        Args:
            generation: the generation that is answered; its prompts are known.
        """

    @abc.abstractmethod
    def text(self, index: int, text: str, logprobs: list[LogprobEntry]) -> tuple[bytes, ...]:
        """Return an event with text, in parts.

        Args:
            index: number of the choice.
            text: the next piece of the choice's text.
            logprobs: tokens of this piece with their log probabilities; [] if none were requested.
        """

    @abc.abstractmethod
    def event(self, index: int, event: OutputEvent) -> bytes:
        """Return the bytes of an event that is no text; b"" if the dialect does not show it."""

    @abc.abstractmethod
    def end_choice(self, index: int, finish_reason: str) -> bytes:
        """Return the event that ends a choice; b"" if the dialect has none.

        Args:
            index: number of the choice.
            finish_reason: `stop`, `length` or `tool_calls`.
        """

    @abc.abstractmethod
    def keep_alive(self, index: int) -> bytes:
        """Return an event of a choice without effect, to keep the connection open."""

    @abc.abstractmethod
    def end(self, generation: Generation) -> bytes:
        """Return the stream's last events, with the token counts of the generation."""

    @abc.abstractmethod
    def fail(self, error: ApiError) -> bytes:
        """Return the last event of a stream that fails after it has begun."""

    def logprobs_json(
        self, index: int, token: int, start_chars: int, logprobs: TokenLogprobs
    ) -> tuple[bytes, ...]:
        """Return a token's element of each of the `logprob_lists` as JSON; b"" for no element.

        Args:
            index: number of the choice.
            token: id of the token.
            start_chars: characters of the completion before its text.
            logprobs: its log probabilities.
        """
        raise InvariantBroken(f"{index}: {token} at {start_chars} has {logprobs}")

    @abc.abstractmethod
    def body(self, choices: list[CollectedChoice], generation: Generation) -> Pieces:
        """Return the body of a response that is not streamed, in pieces of any length.

        Args:
            choices: output and ends of the choices, in order.
            generation: has the token counts of the request.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a generation so far. A prompt with several choices counts once."""

    prompt_tokens: int
    cached_tokens: int
    """Tokens of the prompts whose KV was in the cache."""
    completion_tokens: int
    reasoning_tokens: int
    """Tokens of the completions whose text is reasoning."""
    accepted_drafts: int
    """Tokens of the completions that were drafts first."""
    rejected_drafts: int
    """Drafts that were verified and are not part of a completion."""


def usage(generation: Generation) -> Usage:
    """Return the token counts of a generation so far."""
    choices = generation.choices
    per_prompt = max(1, len(choices) // max(1, len(generation.prompts)))
    cached = [choice.cached for choice in choices[::per_prompt] if choice.cached is not None]
    return Usage(
        prompt_tokens=generation.prompt_tokens,
        cached_tokens=sum(prompt.memory_tokens + prompt.stored_tokens for prompt in cached),
        completion_tokens=sum(len(choice.tokens) for choice in choices),
        reasoning_tokens=sum(choice.reasoning_tokens for choice in choices),
        accepted_drafts=sum(choice.drafts_accepted for choice in choices),
        rejected_drafts=sum(choice.drafts_rejected for choice in choices),
    )
