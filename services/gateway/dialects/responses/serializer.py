"""Response format of the Responses API: server-sent events, or one body. Stores nothing."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

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
from services.gateway.dialects.openai.base_serializer import logprob_element
from services.gateway.dialects.responses.output_items import Json, OutputItems
from services.gateway.dialects.responses.tools import Toolbox
from services.gateway.http.errors import ApiError
from services.gateway.output.events import OutputEvent, Text, joined
from services.gateway.tokenizing.tokenizer import Tokenizer
from shared.clock import unix_seconds
from shared.messages import TokenLogprobs

COMMENT = b": keep-alive\n\n"
RETRY_S = 5.0
"""Time in a failed stream's "try again in" if the error itself has none."""

_SHORT_ECHO = orjson.dumps(
    {
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
    }
)
"""Fields that readers expect in every response. A request's own may take megabytes, too much to
repeat every few seconds."""
_FIRST_EVENTS = ("response.created", "response.in_progress")

Keep = Callable[[bytes], None]
"""Function that stores a complete response, given its JSON."""


@dataclasses.dataclass(frozen=True, slots=True)
class ResponseOptions:
    """Parts of a response that follow from its request."""

    echo: bytes
    """Fields that the response repeats from its request, as a JSON object."""
    toolbox: Toolbox
    """The request's tools."""
    has_summaries: bool
    """Reasoning goes to the summary of its item."""


class ResponsesSerializer(Serializer):
    """Serializer of one response of the Responses API."""

    logprob_lists = 1

    def __init__(
        self,
        metadata: ResponseMetadata,
        tokenizer: Tokenizer,
        options: ResponseOptions,
        keep: Keep | None,
    ) -> None:
        """Begin a response.

        Args:
            metadata: id, time and model of the response.
            tokenizer: the model's tokenizer, for the text of tokens with log probabilities.
            options: the parts that follow from the request.
            keep: stores the complete response; None: it is not stored.
        """
        super().__init__(metadata)
        self._tokenizer = tokenizer
        self._options = options
        self._keep = keep
        self._items = OutputItems(
            metadata.response_id, options.toolbox, has_summaries=options.has_summaries
        )
        self._sequence_number = len(_FIRST_EVENTS)
        self._is_cut_off = False
        """The completion ended because of its length."""

    def begin(self, _generation: Generation) -> list[bytes]:
        """Return the events `response.created` and `response.in_progress`."""
        # Text may have arrived already, but its events are sent after these.
        response = orjson.Fragment(self._response("in_progress", output=[]))
        kinds = enumerate(_FIRST_EVENTS)
        return [_serialized({"type": kind, "response": response}, number) for number, kind in kinds]

    def text(self, _index: int, text: str, logprobs: list[LogprobEntry]) -> tuple[bytes, ...]:
        """Return the events of a piece of text; it opens a message if none is open."""
        entries = [orjson.Fragment(entry.json[0]) for entry in logprobs]
        return self._events(self._items.add(Text(text), entries))

    def event(self, _index: int, event: OutputEvent) -> bytes:
        """Return the events of reasoning or of a part of a call."""
        return b"".join(self._events(self._items.add(event)))

    def end_choice(self, _index: int, finish_reason: str) -> bytes:
        """Return the events that close the last item."""
        return b"".join(self._events(self._close(finish_reason)))

    def keep_alive(self, _index: int) -> bytes:
        """Return an event that changes nothing, since Codex's timer for silence counts only events.

        Between items it is `response.in_progress`. Some clients take its `output` for all output so
        far, so that within an item it is an empty delta instead.
        """
        if self._items.has_open:
            return b"".join(self._events(self._items.idle())) or COMMENT
        response = orjson.Fragment(self._response("in_progress", echo=_SHORT_ECHO))
        return self._event({"type": "response.in_progress", "response": response})

    def end(self, generation: Generation) -> bytes:
        """Return `response.completed`, or `response.incomplete` after too long a completion.

        The response in it is stored if the request asks for it.
        """
        kind = "incomplete" if self._is_cut_off else "completed"
        response = orjson.Fragment(self._complete(generation))
        return self._event({"type": f"response.{kind}", "response": response})

    def fail(self, error: ApiError) -> bytes:
        """Return `response.failed` with a code that clients know."""
        closing = b"".join(self._events(self._items.close("incomplete")))
        response = orjson.Fragment(self._response("failed", error=failure(error)))
        return closing + self._event({"type": "response.failed", "response": response})

    def logprobs_json(
        self, _index: int, token: int, _start_chars: int, logprobs: TokenLogprobs
    ) -> tuple[bytes, ...]:
        """Return the token's element of the part's `logprobs`."""
        return (logprob_element(self._tokenizer, token, logprobs),)

    def body(self, choices: list[CollectedChoice], generation: Generation) -> Pieces:
        """Return the complete response, and store it if the request asks for it."""
        [choice] = choices
        elements = choice.logprobs[0] if choice.logprobs else b""
        logprobs = iter(orjson.loads(b"[%b]" % bytes(elements)))
        counts = iter(choice.logprob_counts)
        for event in joined(choice.events):
            count = next(counts, 0) if isinstance(event, Text) else 0
            self._items.add(event, list(itertools.islice(logprobs, count)))
        self._close(choice.finish_reason)
        return [self._complete(generation)]

    def _close(self, finish_reason: str) -> list[Json]:
        self._is_cut_off = finish_reason == "length"
        return self._items.close("incomplete" if self._is_cut_off else "completed")

    def _complete(self, generation: Generation) -> bytes:
        status = "incomplete" if self._is_cut_off else "completed"
        response = self._response(status, generation=generation)
        if self._keep is not None:
            self._keep(response)
        return response

    def _response(
        self,
        status: str,
        *,
        output: list[Json] | None = None,
        generation: Generation | None = None,
        error: Json | None = None,
        echo: bytes = b"",
    ) -> bytes:
        is_cut_off = status == "incomplete"
        fields: Json = {
            "id": self.metadata.response_id,
            "object": "response",
            "created_at": self.metadata.created,
            "status": status,
            "completed_at": unix_seconds() if status == "completed" else None,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut_off else None,
            "model": self.metadata.model,
            "output": self._items.done if output is None else output,
            "usage": None,
        }
        if generation is not None:
            fields |= _counts(generation)
        return orjson.dumps(fields)[:-1] + b"," + (echo or self._options.echo)[1:]

    def _events(self, events: list[Json]) -> tuple[bytes, ...]:
        return tuple(map(self._event, events))

    def _event(self, event: Json) -> bytes:
        number = self._sequence_number
        self._sequence_number += 1
        return _serialized(event, number)


def failure(error: ApiError) -> dict[str, Any]:
    """Return the `error` of a failed response.

    Clients repeat a request after `server_error` and `rate_limit_exceeded`, not after
    `context_length_exceeded` and `invalid_prompt`. They read the time to wait from the message of
    `rate_limit_exceeded`.
    """
    message = error.message
    if error.code == "context_length_exceeded":
        code = "context_length_exceeded"
    elif error.status in (429, 503):
        code = "rate_limit_exceeded"
        seconds = math.ceil(RETRY_S if error.retry_after_s is None else error.retry_after_s)
        message = f"{message} Please try again in {max(1, seconds)}s."
    else:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
    return {"code": code, "message": message}


def _serialized(event: Json, number: int) -> bytes:
    event["sequence_number"] = number
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event))


def _counts(generation: Generation) -> Json:
    counts = usage(generation)
    return {
        "usage": {
            "input_tokens": counts.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": counts.cached_tokens,
                "cache_write_tokens": counts.prompt_tokens - counts.cached_tokens,
            },
            "output_tokens": counts.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
            "total_tokens": counts.prompt_tokens + counts.completion_tokens,
        },
        "lockstep": {"cache": generation.cache_fields()},
    }
