"""Response format of an endpoint: the JSON that chat and text completions have in common.

Bytes that all events repeat are made once per response.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import orjson

from services.gateway.completion.completion_text import LogprobEntry
from services.gateway.completion.generation import Generation
from services.gateway.http import cache_header
from services.gateway.tokenizing.tokenizer import Tokenizer
from services.gateway.tokenizing.tool_calls import ParsedCall
from shared.errors import InvariantBroken
from shared.messages import TokenLogprobs

Pieces = list[bytes | bytearray]


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
class CollectedChoice:
    """One choice of a response that is sent as one body."""

    index: int
    """Number of the choice, counted from 0 over all prompts."""
    logprobs: list[bytearray] | None
    """The JSON elements of each list in its field `logprobs`, None if none were requested."""
    texts: list[str] = dataclasses.field(default_factory=list)
    """Pieces of its text, in order."""
    calls: list[ParsedCall] = dataclasses.field(default_factory=list)
    """Tool calls, in order."""
    finish_reason: str = ""
    """`stop`, `length` or `tool_calls`; empty before the end."""


class ResponseFormat(abc.ABC):
    """Serializer of one endpoint's responses: makes server-sent events and whole bodies.

    In all methods `index` is the number of a choice, counted from 0 over all prompts.
    """

    _body_kind: ClassVar[str]
    """The field `object` of bodies."""
    _event_kind: ClassVar[str]
    """The field `object` of events."""
    _before_text: ClassVar[bytes]
    """Bytes between an event's `index` and the JSON string with its text."""
    _after_text: ClassVar[bytes]
    """Bytes between that string and the event's `logprobs`."""
    _no_text: ClassVar[bytes]
    """The same place in the event that ends a choice, which has no text."""

    logprob_lists: ClassVar[tuple[tuple[bytes, bytes], ...]]
    """For each list in the field `logprobs` the bytes before it, and the value of an empty one."""
    _after_logprobs: ClassVar[bytes]
    """Bytes after the last of them."""

    def __init__(self, metadata: ResponseMetadata, tokenizer: Tokenizer) -> None:
        """Make the bytes that all events repeat.

        Args:
            metadata: fields that every event repeats.
            tokenizer: the model's tokenizer, for the text of tokens with log probabilities.
        """
        self.metadata = metadata
        self._tokenizer = tokenizer
        first_fields = orjson.dumps(self._first_fields(self._event_kind))
        self._start = b"data: " + first_fields[:-1] + b',"choices":['
        self._end = b'],"usage":null}\n\n' if metadata.includes_usage else b"]}\n\n"

    @abc.abstractmethod
    def first_event(self, index: int) -> bytes:
        """Return the event that begins choice `index`, b"" if it has none."""

    def text_frame(self, index: int) -> tuple[bytes, bytes]:
        """Return the bytes before and after the text in every text event of choice `index`.

        The caller writes the text between them as a JSON string.
        """
        before = b'%b{"index":%d,%b' % (self._start, index, self._before_text)
        after = b'%b,"logprobs":null,"finish_reason":null}%b' % (self._after_text, self._end)
        return before, after

    def logprobs_event(self, index: int, text: str, entries: list[LogprobEntry]) -> bytes:
        """Return an event with text and log probabilities.

        Args:
            index: number of the choice, counted from 0.
            text: the next piece of the choice's text.
            entries: tokens of this piece with their log probabilities.
        """
        lists = [
            b",".join(filter(None, elements))
            for elements in zip(*(entry.json for entry in entries), strict=True)
        ]
        return self._text_event(index, text, b"".join(self._logprobs(lists)))

    def call_event(self, index: int, call: ParsedCall) -> bytes:
        """Return an event with a complete tool call of choice `index`.

        Raises:
            InvariantBroken: this endpoint offers no tools, so there are no calls.
        """
        raise InvariantBroken(f"completion {index} has tool call {call.number}: {call.name}")

    def finish_event(self, index: int, finish_reason: str) -> bytes:
        """Return the event that ends choice `index` with its finish reason."""
        return self._event(index, self._no_text, finish=b'"%b"' % finish_reason.encode())

    def keepalive_event(self, index: int) -> bytes:
        """Return an event of choice `index` with empty text, to keep the connection open."""
        return self._text_event(index, "")

    def usage_event(self, generation: Generation) -> bytes:
        """Return the event with the request's token counts so far; its list of choices is empty."""
        return self._start + b"]," + orjson.dumps(_last_fields(generation))[1:] + b"\n\n"

    @abc.abstractmethod
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

    def body(self, choices: list[CollectedChoice], generation: Generation) -> Pieces:
        """Return the body of a response that is not streamed, in pieces of any length.

        Args:
            choices: text and ends of the choices, in order.
            generation: has the token counts of the request.
        """
        first_fields = orjson.dumps(self._first_fields(self._body_kind))
        pieces: Pieces = [first_fields[:-1], b',"choices":[']
        for choice in choices:
            content = orjson.dumps({"index": choice.index, **self._content(choice)})
            pieces += [b"," if choice.index else b"", content[:-1], b',"logprobs":']
            pieces += [b"null"] if choice.logprobs is None else self._logprobs(choice.logprobs)
            pieces.append(b',"finish_reason":"%b"}' % choice.finish_reason.encode())
        return [*pieces, b"],", orjson.dumps(_last_fields(generation))[1:]]

    @abc.abstractmethod
    def _content(self, choice: CollectedChoice) -> dict[str, Any]:
        """Return the field of a body's choice that has its text."""

    def _logprobs(self, lists: Sequence[bytes | bytearray]) -> Pieces:
        """Return the field `logprobs` of a body's choice or of an event, in pieces.

        Args:
            lists: the elements of each of the `logprob_lists`, with commas between them.
        """
        pieces: Pieces = []
        for (before, empty), elements in zip(self.logprob_lists, lists, strict=True):
            pieces.append(before)
            pieces += [b"[", elements, b"]"] if elements else [empty]
        return [*pieces, self._after_logprobs]

    def _first_fields(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.metadata.name,
            "object": kind,
            "created": self.metadata.created,
            "model": self.metadata.model,
            "system_fingerprint": self.metadata.fingerprint,
        }

    def _text_event(self, index: int, text: str, logprobs: bytes = b"null") -> bytes:
        content = self._before_text + orjson.dumps(text) + self._after_text
        return self._event(index, content, logprobs)

    def _event(
        self, index: int, content: bytes, logprobs: bytes = b"null", finish: bytes = b"null"
    ) -> bytes:
        return b'%b{"index":%d,%b,"logprobs":%b,"finish_reason":%b}%b' % (
            self._start, index, content, logprobs, finish, self._end,
        )  # fmt: skip


def _last_fields(generation: Generation) -> dict[str, Any]:
    """Return the token counts, and facts that OpenAI's API has no field for.

    A prompt with several choices counts once in `prompt_tokens` and `cached_tokens`. The facts are
    not in `usage`, because clients add up all numbers there.
    """
    choices = generation.choices
    prompt_tokens = generation.prompt_tokens
    completion_tokens = sum(len(choice.tokens) for choice in choices)
    per_prompt = max(1, len(choices) // max(1, len(generation.prompts)))
    cached = [choice.cached for choice in choices[::per_prompt] if choice.cached is not None]
    cached_tokens = sum(prompt.memory_tokens + prompt.stored_tokens for prompt in cached)
    return {
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": sum(choice.drafts_accepted for choice in choices),
                "rejected_prediction_tokens": sum(choice.drafts_rejected for choice in choices),
            },
        },
        "lockstep": {
            "cache": cache_header.body_fields(
                choices[0].cached, choices[0].submit_request.prompt_tokens
            )
        },
    }
