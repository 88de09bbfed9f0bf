"""Response formats of both endpoints: the parts of their JSON in which they differ."""

from typing import Any

import orjson

from services.gateway.completion.response_format import (
    CollectedChoice,
    ResponseFormat,
    ResponseMetadata,
)
from services.gateway.tokenizing.tokenizer import Tokenizer
from services.gateway.tokenizing.tool_calls import ParsedCall
from shared.messages import TokenLogprobs


class ChatFormat(ResponseFormat):
    """JSON of chat responses: chat.completion bodies and chat.completion.chunk events."""

    _body_kind = "chat.completion"
    _event_kind = "chat.completion.chunk"
    _before_text = b'"delta":{"content":'
    _after_text = b"}"
    _no_text = b'"delta":{}'
    logprob_lists = ((b'{"content":', b"[]"),)
    _after_logprobs = b',"refusal":null}'

    def first_event(self, index: int) -> bytes:
        """Return the first event of choice `index`, which has the role and no text."""
        return self._event(index, b'"delta":{"role":"assistant","content":"","refusal":null}')

    def call_event(self, index: int, call: ParsedCall) -> bytes:
        """Return an event with one complete tool call of choice `index`."""
        delta = {"tool_calls": [{"index": call.number, **_tool_call(call)}]}
        return self._event(index, b'"delta":' + orjson.dumps(delta))

    def _content(self, choice: CollectedChoice) -> dict[str, Any]:
        text = "".join(choice.texts)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if choice.calls:
            message["content"] = text or None
            message["tool_calls"] = [_tool_call(call) for call in choice.calls]
        return {"message": message}

    def logprobs_json(
        self, _index: int, token: int, _start_chars: int, logprobs: TokenLogprobs
    ) -> tuple[bytes, ...]:
        """Return the token's element of `content`."""
        element = {
            **_token_entry(self._tokenizer, token, logprobs.logprob),
            "top_logprobs": [
                _token_entry(self._tokenizer, other, logprob)
                for other, logprob in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
            ],
        }
        return (orjson.dumps(element),)


class CompletionFormat(ResponseFormat):
    """JSON of text completions: text_completion bodies and events, with the echoed prompt."""

    _body_kind = _event_kind = "text_completion"
    _before_text = b'"text":'
    _after_text = b""
    _no_text = b'"text":""'
    logprob_lists = (
        (b'{"text_offset":', b"[]"),
        (b',"token_logprobs":', b"[]"),
        (b',"tokens":', b"[]"),
        (b',"top_logprobs":', b"null"),
    )
    _after_logprobs = b"}"

    def __init__(self, metadata: ResponseMetadata, tokenizer: Tokenizer, echoes: list[str]) -> None:
        """Make the bytes that all events repeat.

        Args:
            metadata: fields that every event repeats.
            tokenizer: the model's tokenizer, for the text of tokens with log probabilities.
            echoes: the prompt of each choice; [] without `echo`.
        """
        super().__init__(metadata, tokenizer)
        self._echoes = echoes

    def first_event(self, index: int) -> bytes:
        """Return an event with the prompt of choice `index`; b"" unless the request set `echo`."""
        echo = self._echo(index)
        return self._text_event(index, echo) if echo else b""

    def _echo(self, index: int) -> str:
        return self._echoes[index] if self._echoes else ""

    def _content(self, choice: CollectedChoice) -> dict[str, Any]:
        return {"text": self._echo(choice.index) + "".join(choice.texts)}

    def logprobs_json(
        self, index: int, token: int, start_chars: int, logprobs: TokenLogprobs
    ) -> tuple[bytes, ...]:
        """Return the token's elements of `text_offset`, `token_logprobs`, `tokens`, and the rest.

        The last is b"" without alternatives.
        """
        top = {
            _token_name(self._tokenizer, other): logprob
            for other, logprob in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
        }
        return (
            b"%d" % (len(self._echo(index)) + start_chars),
            orjson.dumps(logprobs.logprob),
            orjson.dumps(_token_name(self._tokenizer, token)),
            orjson.dumps(top) if top else b"",
        )


def _tool_call(call: ParsedCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}


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
