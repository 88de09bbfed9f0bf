"""The interface between completions in progress and an API's response format."""

import dataclasses
from typing import Protocol

from services.gateway.completion.completion_text import LogprobEntry
from services.gateway.completion.generation import Usage
from services.gateway.tokenizing.tool_calls import ParsedCall


@dataclasses.dataclass(frozen=True, slots=True)
class ResponseMetadata:
    """What all chunks of one response repeat."""

    name: str
    created: int
    model: str
    fingerprint: str | None
    includes_usage: bool
    """Chunks carry "usage": null, and one more chunk at the end has it."""


@dataclasses.dataclass(slots=True)
class FinishedChoice:
    """One choice of a response that is sent as one body."""

    index: int
    text: str
    logprobs: list[LogprobEntry] | None
    finish_reason: str
    calls: list[ParsedCall]


class ResponseFormat(Protocol):
    """The shape of one endpoint's answers."""

    def first_event(self, index: int) -> bytes:
        """Return what opens a choice, b"" when nothing does."""
        ...

    def text_frame(self, index: int) -> tuple[bytes, bytes]:
        """Return what stands before and after the JSON text of a chunk."""
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
        """Return a chunk that says nothing."""
        ...

    def usage_event(self, usage: Usage) -> bytes:
        """Return the chunk with the token counts."""
        ...

    def body(self, choices: list[FinishedChoice], usage: Usage) -> bytes:
        """Return the whole answer at once."""
        ...
