"""Serializers of chat and text completions: the parts of their JSON in which they differ."""

from typing import Any

import orjson

from services.gateway.completion.serializer import CollectedChoice, ResponseMetadata
from services.gateway.dialects.openai.base_serializer import OpenAISerializer, logprob_element
from services.gateway.output.events import (
    CallArguments,
    CallBegun,
    CallEnded,
    OutputEvent,
    Reasoning,
    Text,
)
from services.gateway.tokenizing.tokenizer import Tokenizer
from shared.errors import InvariantBroken
from shared.messages import TokenLogprobs


class ChatSerializer(OpenAISerializer):
    """JSON of chat responses: chat.completion bodies and chat.completion.chunk events."""

    _body_kind = "chat.completion"
    _event_kind = "chat.completion.chunk"
    _before_text = b'"delta":{"content":'
    _after_text = b"}"
    _no_text = b'"delta":{}'
    _logprob_fields = ((b'{"content":', b"[]"),)
    _after_logprobs = b',"refusal":null}'

    def __init__(
        self, metadata: ResponseMetadata, tokenizer: Tokenizer, *, includes_usage: bool
    ) -> None:
        """Make the bytes that all events repeat.

        Args:
            metadata: fields that every event repeats.
            tokenizer: the model's tokenizer, for the text of tokens with log probabilities.
            includes_usage: as for `OpenAISerializer`.
        """
        super().__init__(metadata, tokenizer, includes_usage=includes_usage)
        self._call_numbers: dict[int, int] = {}
        """Number of the latest tool call of each choice."""

    def _first_event(self, index: int) -> bytes:
        return self._event(index, b'"delta":{"role":"assistant","content":"","refusal":null}')

    def event(self, index: int, event: OutputEvent) -> bytes:
        """Return an event with reasoning, the start of a tool call, or some of its arguments."""
        delta: dict[str, Any]
        match event:
            case Reasoning(text=text):
                # Clients know one name or the other.
                delta = {"reasoning_content": text, "reasoning": text}
            case CallBegun(number=number):
                self._call_numbers[index] = number
                delta = {"tool_calls": [{"index": number, **_tool_call(event, "")}]}
            case CallArguments(text=text):
                number = self._call_numbers[index]
                delta = {"tool_calls": [{"index": number, "function": {"arguments": text}}]}
            case _:
                return b""
        return self._event(index, b'"delta":' + orjson.dumps(delta))

    def _content(self, choice: CollectedChoice) -> dict[str, Any]:
        text = "".join(one.text for one in choice.events if isinstance(one, Text))
        reasoning = "".join(one.text for one in choice.events if isinstance(one, Reasoning))
        calls = _collect_calls(choice.events)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if reasoning:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if calls:
            message["content"] = text or None
            message["tool_calls"] = calls
        return {"message": message}

    def logprobs_json(
        self, _index: int, token: int, _start_chars: int, logprobs: TokenLogprobs
    ) -> tuple[bytes, ...]:
        """Return the token's element of `content`."""
        return (logprob_element(self._tokenizer, token, logprobs),)


class TextCompletionSerializer(OpenAISerializer):
    """JSON of text completions: text_completion bodies and events, with the echoed prompt."""

    _body_kind = _event_kind = "text_completion"
    _before_text = b'"text":'
    _after_text = b""
    _no_text = b'"text":""'
    _logprob_fields = (
        (b'{"text_offset":', b"[]"),
        (b',"token_logprobs":', b"[]"),
        (b',"tokens":', b"[]"),
        (b',"top_logprobs":', b"null"),
    )
    _after_logprobs = b"}"

    def __init__(
        self,
        metadata: ResponseMetadata,
        tokenizer: Tokenizer,
        echoes: list[str],
        *,
        includes_usage: bool,
    ) -> None:
        """Make the bytes that all events repeat.

        Args:
            metadata: fields that every event repeats.
            tokenizer: the model's tokenizer, for the text of tokens with log probabilities.
            echoes: the prompt of each choice; [] without `echo`.
            includes_usage: as for `OpenAISerializer`.
        """
        super().__init__(metadata, tokenizer, includes_usage=includes_usage)
        self._echoes = echoes

    def event(self, index: int, event: OutputEvent) -> bytes:
        """Raise InvariantBroken: this endpoint offers no tools and shows no reasoning."""
        raise InvariantBroken(f"completion {index} has {event}")

    def _first_event(self, index: int) -> bytes:
        echo = self._echo(index)
        return self._text_event(index, echo) if echo else b""

    def _echo(self, index: int) -> str:
        return self._echoes[index] if self._echoes else ""

    def _content(self, choice: CollectedChoice) -> dict[str, Any]:
        text = "".join(one.text for one in choice.events if isinstance(one, Text))
        return {"text": self._echo(choice.index) + text}

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


def _tool_call(call: CallBegun, arguments: str) -> dict[str, Any]:
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.call_id, "type": "function", "function": function}


def _collect_calls(events: list[OutputEvent]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    arguments: list[str] = []
    begun: CallBegun | None = None
    for event in events:
        match event:
            case CallBegun():
                begun, arguments = event, []
            case CallArguments(text=text):
                arguments.append(text)
            case CallEnded() if begun is not None:
                calls.append(_tool_call(begun, "".join(arguments)))
            case _:
                pass
    return calls


def _token_name(tokenizer: Tokenizer, token: int) -> str:
    """Return a token's text; incomplete characters get OpenAI's distinct `bytes:` names."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
