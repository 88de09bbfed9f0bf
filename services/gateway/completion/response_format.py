"""Interface between running completions and the response format of an endpoint."""

import dataclasses
from typing import Protocol

from services.gateway.completion.completion_text import LogprobEntry
from services.gateway.completion.generation import Usage
from services.gateway.tokenizing.tool_calls import ParsedCall


@dataclasses.dataclass(frozen=True, slots=True)
class ResponseMetadata:
    """Id, time, model and options of one response, which every chunk of its stream repeats."""

    name: str
    """Id of the response."""
    created: int
    """Time of the request in seconds since 1970."""
    model: str
    """Name of the served model."""
    fingerprint: str | None
    """The response's `system_fingerprint`, None while it is not known."""
    includes_usage: bool
    """Chunks have "usage": null, and one more chunk at the end has the usage."""


@dataclasses.dataclass(slots=True)
class FinishedChoice:
    """One ended choice of a response that is sent as one body."""

    index: int
    """Number of the choice, counted from 0 over all prompts."""
    text: str
    logprobs: list[LogprobEntry] | None
    """The tokens with their log probabilities, None if none were requested."""
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    calls: list[ParsedCall]
    """Tool calls in order."""


class ResponseFormat(Protocol):
    """Serializer of one endpoint's responses: makes server-sent events and whole bodies.

    In all methods `index` is the number of a choice, counted from 0 over all prompts.
    """

    def first_event(self, index: int) -> bytes:
        """Return the event that begins choice `index`, b"" if the endpoint sends none."""
        ...

    def text_frame(self, index: int) -> tuple[bytes, bytes]:
        """Return the bytes before and after the text in every text event of choice `index`.

        The caller writes the text between them as a JSON string.
        """
        ...

    def logprobs_event(self, index: int, text: str, entries: list[LogprobEntry]) -> bytes:
        """Return an event with text and log probabilities.

        Args:
            index: number of the choice, counted from 0.
            text: the next piece of the choice's text.
            entries: tokens of this piece with their log probabilities.
        """
        ...

    def call_event(self, index: int, number: int, call: ParsedCall) -> bytes:
        """Return an event with a complete tool call.

        Args:
            index: number of the choice, counted from 0.
            number: position of the call among the choice's calls, counted from 0.
            call: the call.
        """
        ...

    def finish_event(self, index: int, finish_reason: str) -> bytes:
        """Return the event that ends choice `index` with its finish reason."""
        ...

    def keepalive_event(self, index: int) -> bytes:
        """Return an event of choice `index` with empty text, to keep the connection open."""
        ...

    def usage_event(self, usage: Usage) -> bytes:
        """Return the event with the request's token counts; its list of choices is empty."""
        ...

    def body(self, choices: list[FinishedChoice], usage: Usage) -> bytes:
        """Return the body of a response that is not streamed."""
        ...
