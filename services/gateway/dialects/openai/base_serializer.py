"""JSON that endpoints of OpenAI's API have in common.

Bytes that all events repeat are made once per response.
"""

import abc
from collections.abc import Sequence
from typing import Any, ClassVar

import orjson

from services.gateway.completion.completion_text import LogprobEntry
from services.gateway.completion.generation import Generation
from services.gateway.completion.serializer import (
    CollectedChoice,
    Pieces,
    ResponseMetadata,
    Serializer,
    usage,
)
from services.gateway.http.errors import ApiError
from services.gateway.tokenizing.tokenizer import Tokenizer
from shared.messages import TokenLogprobs

DONE = b"data: [DONE]\n\n"


class OpenAISerializer(Serializer):
    """Responses of the two completion endpoints of OpenAI's API."""

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
    _logprob_fields: ClassVar[tuple[tuple[bytes, bytes], ...]]
    """For each list in the field `logprobs` the bytes before it, and the value of an empty one."""
    _after_logprobs: ClassVar[bytes]
    """Bytes after the last of them."""

    def __init__(
        self, metadata: ResponseMetadata, tokenizer: Tokenizer, *, includes_usage: bool
    ) -> None:
        """Make the bytes that all events repeat.

        Args:
            metadata: fields that every event repeats.
            tokenizer: the model's tokenizer, for the text of tokens with log probabilities.
            includes_usage: chunks have "usage": null, and one more chunk at the end has the usage.
        """
        super().__init__(metadata)
        self.logprob_lists = len(self._logprob_fields)
        self._tokenizer = tokenizer
        self._includes_usage = self.reports_usage = includes_usage
        first_fields = orjson.dumps(self._first_fields(self._event_kind))
        self._start = b"data: " + first_fields[:-1] + b',"choices":['
        self._end = b'],"usage":null}\n\n' if includes_usage else b"]}\n\n"
        self._after = b'%b,"logprobs":null,"finish_reason":null}%b' % (self._after_text, self._end)
        self._before: dict[int, bytes] = {}
        """Bytes before the text in every text event of a choice, by its number."""

    def begin(self, generation: Generation) -> list[bytes]:
        """Return the event that begins each choice, if there is one."""
        return [self._first_event(choice.index) for choice in generation.choices]

    def text(self, index: int, text: str, logprobs: list[LogprobEntry]) -> tuple[bytes, ...]:
        """Return an event with text, and log probabilities if there are any."""
        if logprobs:
            return (self._logprobs_event(index, text, logprobs),)
        before = self._before.get(index)
        if before is None:
            before = b'%b{"index":%d,%b' % (self._start, index, self._before_text)
            self._before[index] = before
        return before, orjson.dumps(text), self._after

    def end_choice(self, index: int, finish_reason: str) -> bytes:
        """Return the event that ends a choice with its finish reason."""
        return self._event(index, self._no_text, finish=b'"%b"' % finish_reason.encode())

    def keep_alive(self, index: int) -> bytes:
        """Return an event of a choice with empty text."""
        return self._text_event(index, "")

    def end(self, generation: Generation) -> bytes:
        """Return the event with the token counts, if requested, and the end of the stream."""
        if not self._includes_usage:
            return DONE
        return self._start + b"]," + orjson.dumps(_last_fields(generation))[1:] + b"\n\n" + DONE

    def fail(self, error: ApiError) -> bytes:
        """Return an event with the error's body."""
        return b"data: %b\n\n" % error.body()

    def body(self, choices: list[CollectedChoice], generation: Generation) -> Pieces:
        """Return the body of a response that is not streamed, in pieces of any length."""
        first_fields = orjson.dumps(self._first_fields(self._body_kind))
        pieces: Pieces = [first_fields[:-1], b',"choices":[']
        for choice in choices:
            content = orjson.dumps({"index": choice.index, **self._content(choice)})
            pieces += [b"," if choice.index else b"", content[:-1], b',"logprobs":']
            pieces += [b"null"] if choice.logprobs is None else self._logprobs(choice.logprobs)
            pieces.append(b',"finish_reason":"%b"}' % choice.finish_reason.encode())
        return [*pieces, b"],", orjson.dumps(_last_fields(generation))[1:]]

    @abc.abstractmethod
    def _first_event(self, index: int) -> bytes:
        """Return the event that begins a choice, b"" if it has none."""

    @abc.abstractmethod
    def _content(self, choice: CollectedChoice) -> dict[str, Any]:
        """Return the field of a body's choice that has its output."""

    def _logprobs_event(self, index: int, text: str, entries: list[LogprobEntry]) -> bytes:
        lists = [
            b",".join(filter(None, elements))
            for elements in zip(*(entry.json for entry in entries), strict=True)
        ]
        return self._text_event(index, text, b"".join(self._logprobs(lists)))

    def _logprobs(self, lists: Sequence[bytes | bytearray]) -> Pieces:
        """Return the field `logprobs` of a body's choice or of an event, in pieces.

        Args:
            lists: the elements of each of the `_logprob_fields`, with commas between them.
        """
        pieces: Pieces = []
        for (before, empty), elements in zip(self._logprob_fields, lists, strict=True):
            pieces.append(before)
            pieces += [b"[", elements, b"]"] if elements else [empty]
        return [*pieces, self._after_logprobs]

    def _first_fields(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.metadata.response_id,
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


def logprob_element(tokenizer: Tokenizer, token: int, logprobs: TokenLogprobs) -> bytes:
    """Return a token's log probabilities and those of its alternatives as JSON.

    Chat and the Responses API have lists of such elements.

    Args:
        tokenizer: the model's tokenizer, for the text of tokens.
        token: id of the token.
        logprobs: its log probabilities.
    """
    element = {
        **_token_entry(tokenizer, token, logprobs.logprob),
        "top_logprobs": [
            _token_entry(tokenizer, other, logprob)
            for other, logprob in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
        ],
    }
    return orjson.dumps(element)


def _token_entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}


def _last_fields(generation: Generation) -> dict[str, Any]:
    """Return the token counts, and facts that OpenAI's API has no field for.

    The facts are not in `usage`, because clients add up all numbers there.
    """
    counts = usage(generation)
    return {
        "usage": {
            "prompt_tokens": counts.prompt_tokens,
            "completion_tokens": counts.completion_tokens,
            "total_tokens": counts.prompt_tokens + counts.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": counts.cached_tokens},
            "completion_tokens_details": {
                "reasoning_tokens": counts.reasoning_tokens,
                "accepted_prediction_tokens": counts.accepted_drafts,
                "rejected_prediction_tokens": counts.rejected_drafts,
            },
        },
        "lockstep": {"cache": generation.cache_fields()},
    }
