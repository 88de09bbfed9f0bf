"""Response formats of both endpoints. Owns their JSON; makes repeated bytes once per response."""

from typing import Any

import orjson

from services.gateway.completion.completion_text import LogprobEntry
from services.gateway.completion.generation import Usage
from services.gateway.completion.response_format import FinishedChoice, ResponseMetadata
from services.gateway.tokenizing.tokenizer import Tokenizer
from services.gateway.tokenizing.tool_calls import ParsedCall
from shared.errors import InvariantBroken


class ChatFormat:
    """JSON of chat responses: chat.completion bodies and chat.completion.chunk events."""

    def __init__(self, metadata: ResponseMetadata, tokenizer: Tokenizer) -> None:
        self._metadata = metadata
        self._tokenizer = tokenizer
        self._start = _event_start(metadata, "chat.completion.chunk")
        self._end = _event_end(metadata)

    def first_event(self, index: int) -> bytes:
        """Return the first event of choice `index`, which has the role and no text."""
        delta = b'{"role":"assistant","content":"","refusal":null}'
        return self._event(index, delta)

    def text_frame(self, index: int) -> tuple[bytes, bytes]:
        """Return the bytes before and after the JSON string in a text event of choice `index`."""
        before = b'%b{"index":%d,"delta":{"content":' % (self._start, index)
        return before, b'},"logprobs":null,"finish_reason":null}' + self._end

    def logprobs_event(self, index: int, text: str, entries: list[LogprobEntry]) -> bytes:
        """Return an event with a piece of text and its tokens' log probabilities."""
        logprobs = orjson.dumps(_chat_logprobs(self._tokenizer, entries))
        return self._event(index, b'{"content":%b}' % orjson.dumps(text), logprobs)

    def call_event(self, index: int, number: int, call: ParsedCall) -> bytes:
        """Return an event with one complete tool call of choice `index`.

        Args:
            index: number of the choice, counted from 0.
            number: position of the call among the choice's calls, counted from 0.
            call: the call.
        """
        delta = {"tool_calls": [{"index": number, **_tool_call(call)}]}
        return self._event(index, orjson.dumps(delta))

    def finish_event(self, index: int, finish_reason: str) -> bytes:
        """Return the event that ends choice `index` with its finish reason."""
        return self._event(index, b"{}", finish=b'"%b"' % finish_reason.encode())

    def keepalive_event(self, index: int) -> bytes:
        """Return an event of choice `index` with empty text, to keep the connection open."""
        return self._event(index, b'{"content":""}')

    def usage_event(self, usage: Usage) -> bytes:
        """Return the event with the request's token counts; its list of choices is empty."""
        return _usage_event(self._start, usage)

    def body(self, choices: list[FinishedChoice], usage: Usage) -> bytes:
        """Return the body of a chat.completion, with all choices and the token counts."""
        return _whole_body(
            self._metadata, "chat.completion", [self._choice(c) for c in choices], usage
        )

    def _choice(self, choice: FinishedChoice) -> dict[str, Any]:
        logprobs = None
        if choice.logprobs is not None:
            logprobs = _chat_logprobs(self._tokenizer, choice.logprobs)
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [_tool_call(call) for call in choice.calls]
        return {
            "index": choice.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }

    def _event(
        self, index: int, delta: bytes, logprobs: bytes = b"null", finish: bytes = b"null"
    ) -> bytes:
        return b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}%b' % (
            self._start, index, delta, logprobs, finish, self._end,
        )  # fmt: skip


class CompletionFormat:
    """JSON of text completions: text_completion bodies and events, with the echoed prompt."""

    def __init__(self, metadata: ResponseMetadata, tokenizer: Tokenizer, echoes: list[str]) -> None:
        """Make the bytes that all events repeat.

        Args:
            metadata: fields that every event repeats.
            tokenizer: the model's tokenizer, for the text of tokens with log probabilities.
            echoes: the prompt of each choice; [] without `echo`.
        """
        self._metadata = metadata
        self._tokenizer = tokenizer
        self._echoes = echoes
        """The prompt of each choice; empty without `echo`."""
        self._start = _event_start(metadata, "text_completion")
        self._end = _event_end(metadata)

    def first_event(self, index: int) -> bytes:
        """Return an event with the prompt of choice `index`; b"" unless the request set `echo`."""
        echo = self._echo(index)
        return self._event(index, orjson.dumps(echo)) if echo else b""

    def text_frame(self, index: int) -> tuple[bytes, bytes]:
        """Return the bytes before and after the JSON string in a text event of choice `index`."""
        before = b'%b{"index":%d,"text":' % (self._start, index)
        return before, b',"logprobs":null,"finish_reason":null}' + self._end

    def logprobs_event(self, index: int, text: str, entries: list[LogprobEntry]) -> bytes:
        """Return an event with a piece of text and its tokens' log probabilities."""
        return self._event(index, orjson.dumps(text), orjson.dumps(self._logprobs(index, entries)))

    def call_event(self, index: int, number: int, call: ParsedCall) -> bytes:
        """Raise InvariantBroken: this endpoint offers no tools, so there are no calls."""
        raise InvariantBroken(f"completion {index} has tool call {number}: {call.name}")

    def finish_event(self, index: int, finish_reason: str) -> bytes:
        """Return the event that ends choice `index` with its finish reason."""
        return self._event(index, b'""', finish=b'"%b"' % finish_reason.encode())

    def keepalive_event(self, index: int) -> bytes:
        """Return an event of choice `index` with empty text, to keep the connection open."""
        return self._event(index, b'""')

    def usage_event(self, usage: Usage) -> bytes:
        """Return the event with the request's token counts; its list of choices is empty."""
        return _usage_event(self._start, usage)

    def body(self, choices: list[FinishedChoice], usage: Usage) -> bytes:
        """Return the body of a text_completion, with all choices and the token counts."""
        bodies = [
            {
                "index": choice.index,
                "text": self._echo(choice.index) + choice.text,
                "logprobs": None
                if choice.logprobs is None
                else self._logprobs(choice.index, choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            for choice in choices
        ]
        return _whole_body(self._metadata, "text_completion", bodies, usage)

    def _echo(self, index: int) -> str:
        return self._echoes[index] if self._echoes else ""

    def _logprobs(self, index: int, entries: list[LogprobEntry]) -> dict[str, Any]:
        return _completion_logprobs(self._tokenizer, entries, len(self._echo(index)))

    def _event(
        self, index: int, text: bytes, logprobs: bytes = b"null", finish: bytes = b"null"
    ) -> bytes:
        return b'%b{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}%b' % (
            self._start, index, text, logprobs, finish, self._end,
        )  # fmt: skip


def _event_start(metadata: ResponseMetadata, kind: str) -> bytes:
    fields = {
        "id": metadata.name,
        "object": kind,
        "created": metadata.created,
        "model": metadata.model,
        "system_fingerprint": metadata.fingerprint,
    }
    return b"data: " + orjson.dumps(fields)[:-1] + b',"choices":['


def _event_end(metadata: ResponseMetadata) -> bytes:
    return b'],"usage":null}\n\n' if metadata.includes_usage else b"]}\n\n"


def _usage_event(start: bytes, usage: Usage) -> bytes:
    fields = {"usage": _usage(usage), "lockstep": _extension(usage)}
    return start + b"]," + orjson.dumps(fields)[1:] + b"\n\n"


def _whole_body(
    metadata: ResponseMetadata, kind: str, choices: list[dict[str, Any]], usage: Usage
) -> bytes:
    return orjson.dumps(
        {
            "id": metadata.name,
            "object": kind,
            "created": metadata.created,
            "model": metadata.model,
            "system_fingerprint": metadata.fingerprint,
            "choices": choices,
            "usage": _usage(usage),
            "lockstep": _extension(usage),
        }
    )


def _tool_call(call: ParsedCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}


def _usage(usage: Usage) -> dict[str, Any]:
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


def _extension(usage: Usage) -> dict[str, Any]:
    """Return facts that OpenAI's API has no field for.

    They are not in `usage`, because clients add up all numbers there.
    """
    return {"cache": usage.cache}


def _chat_logprobs(tokenizer: Tokenizer, entries: list[LogprobEntry]) -> dict[str, Any]:
    """Return the `logprobs` object of a chat choice or chunk."""
    return {"content": [_chat_entry(tokenizer, entry) for entry in entries], "refusal": None}


def _completion_logprobs(
    tokenizer: Tokenizer, entries: list[LogprobEntry], offset_chars: int
) -> dict[str, Any]:
    """Return the `logprobs` object of a completion choice or chunk.

    Args:
        tokenizer: the model's tokenizer.
        entries: the tokens with their log probabilities.
        offset_chars: characters of the echoed prompt before the completion's text.
    """
    top = [
        {
            _token_name(tokenizer, token): logprob
            for token, logprob in zip(
                entry.logprobs.top_ids, entry.logprobs.top_logprobs, strict=True
            )
        }
        for entry in entries
    ]
    return {
        "text_offset": [offset_chars + entry.start_chars for entry in entries],
        "token_logprobs": [entry.logprobs.logprob for entry in entries],
        "tokens": [_token_name(tokenizer, entry.token) for entry in entries],
        "top_logprobs": top if any(top) else None,
    }


def _chat_entry(tokenizer: Tokenizer, entry: LogprobEntry) -> dict[str, Any]:
    top = zip(entry.logprobs.top_ids, entry.logprobs.top_logprobs, strict=True)
    return {
        **_token_entry(tokenizer, entry.token, entry.logprobs.logprob),
        "top_logprobs": [_token_entry(tokenizer, token, logprob) for token, logprob in top],
    }


def _token_entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}


def _token_name(tokenizer: Tokenizer, token: int) -> str:
    """Return a token's text; incomplete characters get OpenAI's distinct `bytes:` names."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
