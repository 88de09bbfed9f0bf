"""Streams and whole messages of the Messages API, from the same events."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.completion.completion_text import CompletionText
from services.gateway.completion.generation import Choice, Generation
from services.gateway.completion.serializer import CollectedChoice, ResponseMetadata
from services.gateway.conversation.conversation import Tool
from services.gateway.dialects.messages import reading
from services.gateway.dialects.messages.request_types import CountTokensRequest
from services.gateway.dialects.messages.serializer import MessagesSerializer
from services.gateway.http.errors import ApiError, unavailable
from services.gateway.output.events import (
    CallArguments,
    CallBegun,
    CallEnded,
    OutputEvent,
    Reasoning,
    Text,
)
from services.gateway.output.families import OutputFormat
from services.gateway.tokenizing.detokenizer import WindowDetokenizer
from services.gateway.tokenizing.prompt import Prompt
from shared.messages import CachedPrefix, Sampling, SubmitRequest, token_ids


class _NoSink:
    def add_text(self, *_: Any) -> None: ...

    def add_event(self, *_: Any) -> None: ...

    def end_choice(self, *_: Any) -> None: ...


def _generation(finish_reason: str = "stop", prompt_tokens: int = 70) -> Generation:
    ids = list(range(prompt_tokens))
    generation = Generation("msg_1", [Prompt(ids)], _NoSink())
    submitted = SubmitRequest(
        request_id="msg_1:0", prompt=token_ids.pack(ids), sampling=Sampling(seed=1), max_tokens=9
    )
    text = CompletionText(WindowDetokenizer(lambda _: ""), frozenset(), [])
    choice = Choice(generation, 0, submitted, text)
    choice.cached = CachedPrefix(memory_tokens=32)
    choice.tokens = [1, 2, 3]
    choice.finish_reason = finish_reason
    generation.choices = [choice]
    return generation


def _format(block_tokens: int = 0) -> MessagesSerializer:
    return MessagesSerializer(ResponseMetadata("msg_1", 0, "m", None), block_tokens)


def _send(made: MessagesSerializer, event: OutputEvent) -> bytes:
    if isinstance(event, Text):
        return b"".join(made.text(0, event.text, []))
    return made.event(0, event)


def _stream(
    events: list[OutputEvent], begun_after: int = 0, reason: str = "stop"
) -> list[dict[str, Any]]:
    """Return the events of a stream whose headers are sent after some of the output."""
    made, generation = _format(32), _generation(reason)
    early = [_send(made, event) for event in events[:begun_after]]
    parts = [*made.begin(generation), *early]
    parts += [_send(made, event) for event in events[begun_after:]]
    parts += [made.end_choice(0, reason), made.end(generation)]
    return _parsed(b"".join(parts))


def _parsed(data: bytes) -> list[dict[str, Any]]:
    found = []
    for block in data.decode().removesuffix("\n\n").split("\n\n"):
        name, _, line = block.partition("\n")
        fields = json.loads(line.removeprefix("data: "))
        assert name == f"event: {fields['type']}"
        found.append(fields)
    return found


def _collected(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a client builds from a stream, checking the order of events."""
    message: dict[str, Any] = {}
    texts: dict[int, str] = {}
    is_open = False
    for event in events:
        match event["type"]:
            case "message_start":
                assert not message
                message = event["message"]
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(message["content"])
                message["content"].append(dict(event["content_block"]))
                is_open = True
            case "content_block_delta":
                assert is_open
                block, delta = message["content"][event["index"]], event["delta"]
                assert event["index"] == len(message["content"]) - 1
                match delta["type"]:
                    case "text_delta":
                        block["text"] += delta["text"]
                    case "thinking_delta":
                        block["thinking"] += delta["thinking"]
                    case "signature_delta":
                        block["signature"] += delta["signature"]
                    case "input_json_delta":
                        texts.setdefault(event["index"], "")
                        texts[event["index"]] += delta["partial_json"]
            case "content_block_stop":
                assert is_open
                is_open = False
            case "message_delta":
                assert not is_open
                message |= event["delta"] | {"usage": event["usage"]}
            case "message_stop":
                assert event is events[-1]
    for index, text in texts.items():
        message["content"][index]["input"] = json.loads(text)
    return message


_OUTPUT: list[OutputEvent] = [
    Reasoning("I "),
    Reasoning("look."),
    Text("Look"),
    Text("ing."),
    CallBegun(0, "call_1", "Read"),
    CallArguments('{"path":'),
    CallArguments('"a\\nb"}'),
    CallEnded(),
    CallBegun(1, "call_2", "List"),
    CallArguments("{}"),
    CallEnded(),
]


def test_stream_has_the_order_of_events_that_clients_expect() -> None:
    """Pings come before the message's start, blocks do not overlap, counts come at the end."""
    events = _stream(_OUTPUT, reason="tool_calls")
    block = ["content_block_start", "content_block_delta"]
    assert [event["type"] for event in events] == [
        "ping", "message_start", "ping",
        *block, "content_block_delta", "content_block_delta", "content_block_stop",
        *block, "content_block_delta", "content_block_stop",
        *block, "content_block_delta", "content_block_stop",
        *block, "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    start = events[1]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    counts = {
        "input_tokens": 6, "cache_creation_input_tokens": 32, "cache_read_input_tokens": 32,
    }  # fmt: skip
    assert start["usage"] == {**counts, "output_tokens": 0}
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"] == {**counts, "output_tokens": 3}
    called = [event for event in events if event["type"] == "content_block_start"][2]
    assert called["content_block"] == {
        "type": "tool_use", "id": "call_1", "name": "Read", "input": {},
    }  # fmt: skip


@pytest.mark.parametrize("after", ["\nDone.", " Done.", "Done."])
def test_message_that_a_client_sends_back_is_the_turn_that_the_model_wrote(after: str) -> None:
    """Text after a call, and thoughts in several blocks, have the white space that they had."""
    output: list[OutputEvent] = [
        *(Reasoning("I look."), Text("Looking."), CallBegun(0, "call_1", "Read"), CallEnded()),
        *(Reasoning("\n\nAgain."), Text(after)),
    ]
    message = _collected(_stream(output))
    turn = {"role": "assistant", "content": message["content"]}
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}, turn]}
    found = reading.read(msgspec.convert(body, CountTokensRequest), []).conversation.messages[1]
    assert found.text == f"Looking.{after}"
    assert found.reasoning == "I look.\n\nAgain."


_text = st.text(min_size=1, max_size=4)


@st.composite
def _outputs(draw: st.DrawFn) -> list[OutputEvent]:
    """Return output whose pieces are cut anywhere."""
    events: list[OutputEvent] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from("trc"), max_size=6)):
        if kind == "t":
            events += [Text(text) for text in draw(st.lists(_text, max_size=3))]
        elif kind == "r":
            events += [Reasoning(text) for text in draw(st.lists(_text, max_size=3))]
        else:
            arguments = json.dumps(draw(st.dictionaries(_text, _text, max_size=2)))
            cut = draw(st.integers(0, len(arguments)))
            pieces = [piece for piece in (arguments[:cut], arguments[cut:]) if piece]
            events += [CallBegun(calls, f"call_{calls}", "f"), *map(CallArguments, pieces)]
            events.append(CallEnded())
            calls += 1
    return events


@given(_outputs(), st.data())
def test_stream_and_whole_message_are_equal_however_the_output_is_cut(
    output: list[OutputEvent], data: st.DataObject
) -> None:
    """A client builds from any stream the message that it would get in one piece."""
    begun_after = data.draw(st.integers(0, len(output)))
    streamed = _collected(_stream(output, begun_after))
    choice = CollectedChoice(0, None, list(output), "stop")
    whole = json.loads(b"".join(_format(32).body([choice], _generation())))
    assert streamed == whole


def test_answer_without_output_still_has_start_and_end() -> None:
    """A completion without text is a message without content."""
    events = _stream([])
    assert [event["type"] for event in events] == [
        "ping", "message_start", "message_delta", "message_stop",
    ]  # fmt: skip
    assert _collected(events)["content"] == []


def test_usage_of_request_without_cache_control_counts_nothing_as_created() -> None:
    """Without marks only reads are counted apart."""
    made = _format()
    body = json.loads(b"".join(made.body([CollectedChoice(0, None)], _generation("length"))))
    assert body["usage"] == {
        "input_tokens": 38, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 32,
        "output_tokens": 3,
    }  # fmt: skip
    assert body["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("arguments", ['{"path": a.txt}', '["a"]', '"a.txt"', '{"path": "a" b}'])
def test_broken_arguments_are_the_same_object_in_stream_and_whole_message(arguments: str) -> None:
    """Anthropic's client reads arguments while they arrive, and fails on other text than JSON."""
    parser = OutputFormat("hermes").parser([Tool("read")], "")
    assert parser is not None
    call = f'<tool_call>{{"name": "read", "arguments": {arguments}}}</tool_call>'
    output = [event for char in call for event in parser.push(char)] + parser.finish()

    streamed = _collected(_stream(output))["content"]

    choice = CollectedChoice(0, None, output, "tool_calls")
    assert json.loads(b"".join(_format().body([choice], _generation())))["content"] == streamed
    assert "invalid_arguments" in streamed[0]["input"]


def test_arguments_that_were_cut_off_stay_visible_in_whole_message() -> None:
    """A call that was cut off is not turned into a call without arguments."""
    events: list[OutputEvent] = [CallBegun(0, "c", "f"), CallArguments('{"a":'), CallEnded()]
    choice = CollectedChoice(0, None, events, "tool_calls")
    body = json.loads(b"".join(_format().body([choice], _generation("tool_calls"))))
    assert body["content"][0]["input"] == {"invalid_arguments": '{"a":'}


def test_failure_inside_a_stream_is_an_error_event() -> None:
    """Clients repeat a request whose stream ends with the event `error`."""
    failed = _parsed(_format().fail(unavailable("The world is lost.", 1.0)))
    assert failed == [
        {
            "type": "error",
            "error": {"type": "overloaded_error", "message": "The world is lost."},
            "request_id": "msg_1",
        }
    ]
    other = _parsed(_format().fail(ApiError(500, "No.")))[0]
    assert other["error"]["type"] == "api_error"
