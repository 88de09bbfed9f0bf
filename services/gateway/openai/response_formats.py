"""How the chunks and bodies of both endpoints look; bytes are prepared once per response."""

from typing import Any

import orjson

from services.gateway.completion.completion_text import LogprobEntry
from services.gateway.completion.generation import Usage
from services.gateway.completion.response_format import FinishedChoice, ResponseMetadata
from services.gateway.openai import logprobs
from services.gateway.tokenizing.tokenizer import Tokenizer
from services.gateway.tokenizing.tool_calls import ParsedCall
from shared.errors import InvariantBroken


class ChatFormat:
    """chat.completion and chat.completion.chunk."""

    def __init__(self, head: ResponseMetadata, tokenizer: Tokenizer) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._chunk = _opening(head, "chat.completion.chunk")
        self._tail = _closing(head)

    def first_event(self, index: int) -> bytes:
        """Return the chunk with the role."""
        delta = b'{"role":"assistant","content":"","refusal":null}'
        return self._event(index, delta)

    def text_frame(self, index: int) -> tuple[bytes, bytes]:
        """Return what stands before and after the JSON text of a chunk."""
        before = b'%b{"index":%d,"delta":{"content":' % (self._chunk, index)
        return before, b'},"logprobs":null,"finish_reason":null}' + self._tail

    def logprobs_event(self, index: int, text: str, entries: list[LogprobEntry]) -> bytes:
        """Return a chunk with log probabilities."""
        shape = orjson.dumps(logprobs.chat_shape(self._tokenizer, entries))
        return self._event(index, b'{"content":%b}' % orjson.dumps(text), shape)

    def call_event(self, index: int, number: int, call: ParsedCall) -> bytes:
        """Return a chunk with a tool call, whole."""
        delta = {"tool_calls": [{"index": number, **_call_shape(call)}]}
        return self._event(index, orjson.dumps(delta))

    def finish_event(self, index: int, finish_reason: str) -> bytes:
        """Return the chunk that ends a choice."""
        return self._event(index, b"{}", finish=b'"%b"' % finish_reason.encode())

    def keepalive_event(self, index: int) -> bytes:
        """Return a chunk with an empty delta."""
        return self._event(index, b'{"content":""}')

    def usage_event(self, usage: Usage) -> bytes:
        """Return the chunk with the token counts and no choices."""
        return _usage_event(self._chunk, usage)

    def body(self, choices: list[FinishedChoice], usage: Usage) -> bytes:
        """Return a chat.completion object."""
        return _whole(self._head, "chat.completion", [self._choice(c) for c in choices], usage)

    def _choice(self, choice: FinishedChoice) -> dict[str, Any]:
        shape = None
        if choice.logprobs is not None:
            shape = logprobs.chat_shape(self._tokenizer, choice.logprobs)
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [_call_shape(call) for call in choice.calls]
        return {
            "index": choice.index,
            "message": message,
            "logprobs": shape,
            "finish_reason": choice.finish_reason,
        }

    def _event(
        self, index: int, delta: bytes, shape: bytes = b"null", finish: bytes = b"null"
    ) -> bytes:
        return b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}%b' % (
            self._chunk, index, delta, shape, finish, self._tail,
        )  # fmt: skip


class CompletionFormat:
    """text_completion, streamed or not; with `echo` the prompts stand before the completions."""

    def __init__(self, head: ResponseMetadata, tokenizer: Tokenizer, echoes: list[str]) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._echoes = echoes
        """Per choice the text to repeat; empty without `echo`."""
        self._chunk = _opening(head, "text_completion")
        self._tail = _closing(head)

    def first_event(self, index: int) -> bytes:
        """Return the echoed prompt."""
        echo = self._echo(index)
        return self._event(index, orjson.dumps(echo)) if echo else b""

    def text_frame(self, index: int) -> tuple[bytes, bytes]:
        """Return what stands before and after the JSON text of a chunk."""
        before = b'%b{"index":%d,"text":' % (self._chunk, index)
        return before, b',"logprobs":null,"finish_reason":null}' + self._tail

    def logprobs_event(self, index: int, text: str, entries: list[LogprobEntry]) -> bytes:
        """Return a chunk with log probabilities."""
        return self._event(index, orjson.dumps(text), orjson.dumps(self._shape(index, entries)))

    def call_event(self, index: int, number: int, call: ParsedCall) -> bytes:
        """Refuse: this endpoint offers no tools, so no text is read as a call."""
        raise InvariantBroken(f"completion {index} has tool call {number}: {call.name}")

    def finish_event(self, index: int, finish_reason: str) -> bytes:
        """Return the chunk that ends a choice."""
        return self._event(index, b'""', finish=b'"%b"' % finish_reason.encode())

    def keepalive_event(self, index: int) -> bytes:
        """Return a chunk with an empty text."""
        return self._event(index, b'""')

    def usage_event(self, usage: Usage) -> bytes:
        """Return the chunk with the token counts and no choices."""
        return _usage_event(self._chunk, usage)

    def body(self, choices: list[FinishedChoice], usage: Usage) -> bytes:
        """Return a text_completion object."""
        shapes = [
            {
                "index": choice.index,
                "text": self._echo(choice.index) + choice.text,
                "logprobs": None
                if choice.logprobs is None
                else self._shape(choice.index, choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            for choice in choices
        ]
        return _whole(self._head, "text_completion", shapes, usage)

    def _echo(self, index: int) -> str:
        return self._echoes[index] if self._echoes else ""

    def _shape(self, index: int, entries: list[LogprobEntry]) -> dict[str, Any]:
        return logprobs.completion_shape(self._tokenizer, entries, len(self._echo(index)))

    def _event(
        self, index: int, text: bytes, shape: bytes = b"null", finish: bytes = b"null"
    ) -> bytes:
        return b'%b{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}%b' % (
            self._chunk, index, text, shape, finish, self._tail,
        )  # fmt: skip


def _opening(head: ResponseMetadata, kind: str) -> bytes:
    fields = {
        "id": head.name,
        "object": kind,
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.fingerprint,
    }
    return b"data: " + orjson.dumps(fields)[:-1] + b',"choices":['


def _closing(head: ResponseMetadata) -> bytes:
    return b'],"usage":null}\n\n' if head.includes_usage else b"]}\n\n"


def _usage_event(opening: bytes, usage: Usage) -> bytes:
    fields = {"usage": _usage_shape(usage), "lockstep": _lockstep_shape(usage)}
    return opening + b"]," + orjson.dumps(fields)[1:] + b"\n\n"


def _whole(head: ResponseMetadata, kind: str, choices: list[dict[str, Any]], usage: Usage) -> bytes:
    return orjson.dumps(
        {
            "id": head.name,
            "object": kind,
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.fingerprint,
            "choices": choices,
            "usage": _usage_shape(usage),
            "lockstep": _lockstep_shape(usage),
        }
    )


def _call_shape(call: ParsedCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}


def _usage_shape(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": usage.drafts_accepted,
            "rejected_prediction_tokens": usage.drafts_rejected,
        },
    }


def _lockstep_shape(usage: Usage) -> dict[str, Any]:
    """Return what OpenAI's API has no field for.

    Beside `usage`, not in it: programs add up what they find there.
    """
    return {"cache": usage.cache}
