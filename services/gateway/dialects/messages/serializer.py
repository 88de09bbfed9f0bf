"""Responses of the Messages API: the order of a stream's events, and the whole message.

Both are made from the same blocks: text, thinking and tool calls, one after another.
"""

import base64
import hashlib
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
from services.gateway.conversation.conversation import INVALID_ARGUMENTS
from services.gateway.dialects.messages import errors
from services.gateway.http.errors import ApiError
from services.gateway.output.events import (
    CallArguments,
    CallBegun,
    OutputEvent,
    Reasoning,
    Text,
    joined,
)

PING = b'event: ping\ndata: {"type":"ping"}\n\n'

_DELTAS = {
    "text": b'"type":"text_delta","text"',
    "thinking": b'"type":"thinking_delta","thinking"',
    "tool_use": b'"type":"input_json_delta","partial_json"',
}
_DELTA_END = b"}}\n\n"
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesSerializer(Serializer):
    """Response to one request of the Messages API, which has one choice."""

    def __init__(self, metadata: ResponseMetadata, block_tokens: int) -> None:
        """Begin a response.

        Args:
            metadata: id, time and model.
            block_tokens: tokens in a block of the cache, to count the tokens that are new in it; 0:
                they are not counted apart.
        """
        super().__init__(metadata)
        self._block_tokens = block_tokens
        self._generation: Generation | None = None
        """Known once the stream has begun."""
        self._has_output = False
        """Some output was made."""
        self._blocks = 0
        """Blocks begun so far."""
        self._open = ""
        """Kind of the block that is not ended; "": none."""
        self._before = b""
        """Bytes before the text in every further event of the open block."""
        self._signature = hashlib.blake2b(digest_size=32)

    def begin(self, generation: Generation) -> list[bytes]:
        """Return the message's start if it has output, else a ping: its token counts come later."""
        self._generation = generation
        return [self._message_start(generation), PING] if self._has_output else [PING]

    def text(self, _index: int, text: str, _logprobs: list[LogprobEntry]) -> tuple[bytes, ...]:
        """Return an event with text, and the start of its block if it is a new one."""
        return (*self._block("text"), self._before, orjson.dumps(text), _DELTA_END)

    def event(self, _index: int, event: OutputEvent) -> bytes:
        """Return an event with reasoning or a part of a tool call."""
        match event:
            case Reasoning(text=text):
                start = self._block("thinking")
                self._signature.update(text.encode(errors="surrogatepass"))
                return b"".join((*start, self._before, orjson.dumps(text), _DELTA_END))
            case CallBegun(call_id=call_id, name=name):
                block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                first = self._first_output()
                return b"".join((*first, self._stop_block(), self._start_block("tool_use", block)))
            case CallArguments(text=text):
                return b"".join((self._before, orjson.dumps(text), _DELTA_END))
            case _:
                return self._stop_block()

    def end_choice(self, _index: int, _finish_reason: str) -> bytes:
        """Return `content_block_stop` of the open block; b"" if none is open."""
        return self._stop_block()

    def keep_alive(self, _index: int) -> bytes:
        """Return a ping."""
        return PING

    def end(self, generation: Generation) -> bytes:
        """Return the events with the stop reason and the token counts, and of the message's end."""
        delta = {"type": "message_delta", **self._end_fields(generation)}
        start = b"" if self._has_output else self._message_start(generation)
        return start + _event(delta) + _event({"type": "message_stop"})

    def fail(self, error: ApiError) -> bytes:
        """Return the event `error`, after which clients repeat the request."""
        return b"event: error\ndata: %b\n\n" % errors.body(error, self.metadata.response_id)

    def body(self, choices: list[CollectedChoice], generation: Generation) -> Pieces:
        """Return the whole message."""
        fields = self._message(_content(choices[0].events))
        end = self._end_fields(generation)
        return [orjson.dumps({**fields, **end["delta"], "usage": end["usage"]})]

    def _block(self, kind: str) -> tuple[bytes, ...]:
        """Return what begins a block of text or thinking; () if one is open."""
        if self._open == kind:
            return ()
        fields = {"type": kind, kind: ""}
        if kind == "thinking":
            fields["signature"] = ""
        return (*self._first_output(), self._stop_block(), self._start_block(kind, fields))

    def _first_output(self) -> tuple[bytes, ...]:
        """Return the message's start before its first output, unless `begin` returns it."""
        is_first = not self._has_output
        self._has_output = True
        if not is_first or self._generation is None:
            return ()
        return (self._message_start(self._generation), PING)

    def _message_start(self, generation: Generation) -> bytes:
        counts = {**self._prompt_usage(generation), "output_tokens": 0}
        message = {**self._message([]), "stop_reason": None, "stop_sequence": None, "usage": counts}
        return _event({"type": "message_start", "message": message})

    def _start_block(self, kind: str, block: dict[str, Any]) -> bytes:
        number = self._blocks
        self._blocks += 1
        self._open = kind
        self._before = (
            b"event: content_block_delta\ndata: "
            b'{"type":"content_block_delta","index":%d,"delta":{%b:' % (number, _DELTAS[kind])
        )
        start = {"type": "content_block_start", "index": number, "content_block": block}
        return _event(start)

    def _stop_block(self) -> bytes:
        """Return the end of the open block; b"" if none is open."""
        if not self._open:
            return b""
        number = self._blocks - 1
        signed = b""
        if self._open == "thinking":
            delta = {"type": "signature_delta", "signature": _encoded(self._signature.digest())}
            signed = _event({"type": "content_block_delta", "index": number, "delta": delta})
            self._signature = hashlib.blake2b(digest_size=32)
        self._open = ""
        return signed + _event({"type": "content_block_stop", "index": number})

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.metadata.response_id,
            "type": "message",
            "role": "assistant",
            "model": self.metadata.model,
            "content": content,
        }

    def _end_fields(self, generation: Generation) -> dict[str, Any]:
        choice = generation.choices[0]
        reason = _STOP_REASONS[choice.finish_reason]
        stop = choice.text.found_stop if reason == "end_turn" else ""
        output_tokens = usage(generation).completion_tokens
        return {
            "delta": {
                "stop_reason": "stop_sequence" if stop else reason,
                "stop_sequence": stop or None,
            },
            "usage": {**self._prompt_usage(generation), "output_tokens": output_tokens},
        }

    def _prompt_usage(self, generation: Generation) -> dict[str, int]:
        """Return the counts of the prompt's tokens, which add up to its length."""
        counts = usage(generation)
        created_tokens = 0
        if self._block_tokens:
            # Only full blocks are kept.
            kept_tokens = counts.prompt_tokens // self._block_tokens * self._block_tokens
            created_tokens = max(0, kept_tokens - counts.cached_tokens)
        return {
            "input_tokens": counts.prompt_tokens - counts.cached_tokens - created_tokens,
            "cache_creation_input_tokens": created_tokens,
            "cache_read_input_tokens": counts.cached_tokens,
        }


def _content(events: list[OutputEvent]) -> list[dict[str, Any]]:
    """Return the blocks of a whole message."""
    content: list[dict[str, Any]] = []
    arguments: dict[int, str] = {}
    for event in joined(events):
        match event:
            case Text(text=text):
                content.append({"type": "text", "text": text})
            case Reasoning(text=text):
                content.append(_thinking(text))
            case CallBegun(call_id=call_id, name=name):
                content.append({"type": "tool_use", "id": call_id, "name": name, "input": {}})
            case CallArguments(text=text):
                arguments[len(content) - 1] = text
            case _:
                pass
    for number, text in arguments.items():
        content[number]["input"] = _input(text)
    return content


def _thinking(text: str) -> dict[str, Any]:
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=32).digest()
    return {"type": "thinking", "thinking": text, "signature": _encoded(digest)}


def _input(text: str) -> Any:
    """Return a call's arguments as JSON; those that were cut off stay visible in an object."""
    try:
        is_object = isinstance(orjson.loads(text), dict)
    except orjson.JSONDecodeError:
        is_object = False
    return orjson.Fragment(text) if is_object else {INVALID_ARGUMENTS: text}


def _encoded(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


def _event(fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (fields["type"].encode(), orjson.dumps(fields))
