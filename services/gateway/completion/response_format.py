"""Interface between running completions and the response format of an endpoint."""

import dataclasses
from typing import Protocol

from services.gateway.completion.completion_text import LogprobEntry
from services.gateway.completion.generation import Usage
from services.gateway.tokenizing.tool_calls import ParsedCall


@dataclasses.dataclass(frozen=True, slots=True)
class ResponseMetadata:
    """Fields that every chunk of one response repeats."""

    name: str
    created: int
    model: str
    fingerprint: str | None
    includes_usage: bool
    """Chunks have "usage": null, and one more chunk at the end has the usage."""


@dataclasses.dataclass(slots=True)
class FinishedChoice:
    """One choice of a response that is not streamed."""

    index: int
    text: str
    logprobs: list[LogprobEntry] | None
    finish_reason: str
    calls: list[ParsedCall]


class ResponseFormat(Protocol):
    """Serializer of one endpoint's responses to JSON bytes."""

    def first_event(self, index: int) -> bytes:
        """Return the first chunk of a choice, b"" for no chunk."""
        ...

    def text_frame(self, index: int) -> tuple[bytes, bytes]:
        """Return the bytes before and after the JSON string of a text chunk."""
        ...

    def logprobs_event(self, index: int, text: str, entries: list[LogprobEntry]) -> bytes:
        """Return a chunk with log probabilities."""
        ...

    def call_event(self, index: int, number: int, call: ParsedCall) -> bytes:
        """Return a chunk with a tool call."""
        ...

    def finish_event(self, index: int, finish_reason: str) -> bytes:
        """Return the chunk that ends a choice."""
        ...

    def keepalive_event(self, index: int) -> bytes:
        """Return a chunk without content."""
        ...

    def usage_event(self, usage: Usage) -> bytes:
        """Return the chunk with the token counts."""
        ...

    def body(self, choices: list[FinishedChoice], usage: Usage) -> bytes:
        """Return the complete response body."""
        ...
