"""Streamed and whole responses of one completion, whose tokens arrive one by one or several."""

import functools
import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.completion.completion_text import CompletionText, LogprobEntry
from services.gateway.completion.generation import Choice, Generation
from services.gateway.completion.serializer import ResponseMetadata
from services.gateway.completion.streaming import BodyCollector
from services.gateway.dialects.responses.serializer import ResponseOptions, ResponsesSerializer
from services.gateway.dialects.responses.tools import Toolbox
from services.gateway.output.events import OutputEvent
from services.gateway.output.families import OutputFormat
from services.gateway.tokenizing import vocabulary
from services.gateway.tokenizing.detokenizer import ByteLevelDetokenizer
from shared.messages import Sampling, SubmitRequest, TokenLogprobs, token_ids
from tests.unit.gateway.tokenizing import small_tokenizers

Json = dict[str, Any]
TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "run",
        "parameters": {
            "type": "object",
            "properties": {"cmd": {"type": "string"}, "wait": {"type": "integer"}},
        },
    },
    {"type": "custom", "name": "apply_patch"},
]
PATCH = '*** Begin Patch\n@@\n-a = "\\n"\n+b = "ü 🎉"\n*** End Patch'
OUTPUTS = {
    "hermes": (
        "<think>Let me think: 漢字.</think>\n\nI run it: 🎉.\n"
        '<tool_call>\n{"name": "run", "arguments": {"cmd": "ls \\"ü\\" 🎉", "wait": 5}}\n'
        "</tool_call>\n<tool_call>\n"
        + json.dumps({"name": "apply_patch", "arguments": {"input": PATCH}})
        + "\n</tool_call>"
    ),
    "qwen_xml": (
        "<think>Let me think.</think>\n\n<tool_call>\n<function=run>\n<parameter=cmd>\n"
        'ls "ü" 🎉\n</parameter>\n<parameter=wait>\n5\n</parameter>\n</function>\n</tool_call>\n'
        f"<tool_call>\n<function=apply_patch>\n<parameter=input>\n{PATCH}\n</parameter>\n"
        "</function>\n</tool_call>\nDone."
    ),
    "broken": 'Text <tool_call>\n{"name": "run", "arguments": {"cmd": "ls',
}
_TOKENIZER = small_tokenizers.byte_level()
_TABLE = vocabulary.read(_TOKENIZER)


class _TokenBytes:
    """Part of the tokenizer that log probabilities need."""

    def token_bytes(self, token: int) -> bytes:
        return _TABLE.token_bytes[token]


class _Streamed:
    """Sink that keeps the bytes of a stream."""

    def __init__(self, response_format: ResponsesSerializer) -> None:
        self.format = response_format
        self.data = b""

    def add_text(self, _choice: Choice, text: str, logprobs: list[LogprobEntry]) -> None:
        self.data += b"".join(self.format.text(0, text, logprobs))

    def add_event(self, _choice: Choice, event: OutputEvent) -> None:
        self.data += self.format.event(0, event)

    def end_choice(self, choice: Choice) -> None:
        self.data += self.format.end_choice(0, choice.finish_reason)


def response_format() -> ResponsesSerializer:
    """Return the format of one response."""
    toolbox = Toolbox()
    toolbox.read(TOOLS, "tools")
    return ResponsesSerializer(
        ResponseMetadata("resp_0", 0, "tiny", None),
        _TokenBytes(),  # type: ignore[arg-type]
        ResponseOptions(b'{"store":false}', toolbox, has_summaries=False),
        None,
    )


def complete(sink: Any, tool_format: str, text: str, sizes: list[int], reason: str) -> Generation:
    """Pass a completion to a sink, in batches of tokens of these sizes, repeated.

    The log probability of a token is its position.
    """
    toolbox = Toolbox()
    tools = toolbox.read(TOOLS, "tools")
    generation = Generation("resp_0", [], sink)
    request = SubmitRequest(
        request_id="resp_0:0",
        prompt=token_ids.pack([1, 2]),
        sampling=Sampling(seed=0),
        tenant="t",
        max_tokens=9_999,
        stop_ids=[],
        deadline_s=1.0,
    )
    logprobs_json = functools.partial(response_format().logprobs_json, 0)
    reader = CompletionText(ByteLevelDetokenizer(_TABLE), frozenset(), [], logprobs_json)
    choice = Choice(generation, 0, request, reader)
    choice.parser = OutputFormat(tool_format, "think").parser(tools, "assistant\n")
    generation.choices = [choice]
    tokens = _TOKENIZER.encode(text).ids
    place = number = 0
    while place < len(tokens):
        size = sizes[number % len(sizes)]
        batch = tokens[place : place + size]
        choice.add(batch, [TokenLogprobs(logprob=float(place + n)) for n in range(len(batch))])
        place, number = place + size, number + 1
    choice.finish(reason)
    return generation


def comparable(response: Json) -> Json:
    """Return a response without its time, with call ids by order: they are random."""
    ids = [item["call_id"] for item in response["output"] if "call_id" in item]
    text = json.dumps({**response, "completed_at": None})
    for number, call_id in enumerate(ids):
        text = text.replace(call_id, f"call {number}")
    found: Json = json.loads(text)
    # A token at a border counts as reasoning or not, depending on the tokens beside it.
    found["usage"]["output_tokens_details"] = None
    return found


@pytest.mark.parametrize("name", OUTPUTS)
@given(
    st.lists(st.integers(min_value=1, max_value=12), min_size=1, max_size=12),
    st.sampled_from(["stop", "length"]),
)
def test_response_does_not_depend_on_how_many_tokens_arrive_at_once(
    name: str, sizes: list[int], reason: str
) -> None:
    """Speculation gives several tokens at once; streamed and whole responses stay the same."""
    tool_format = "qwen_xml" if name == "qwen_xml" else "hermes"
    streamed = _Streamed(response_format())
    generation = complete(streamed, tool_format, OUTPUTS[name], sizes, reason)
    last = streamed.format.end(generation)
    expected_format = response_format()
    collector = BodyCollector(expected_format, 1, has_logprobs=True)
    generation = complete(collector, tool_format, OUTPUTS[name], [1], reason)
    expected = orjson.loads(b"".join(expected_format.body(collector._choices, generation)))
    final = orjson.loads(last.partition(b"data: ")[2])["response"]
    assert comparable(final) == comparable(expected)
    for message in (item for item in final["output"] if item["type"] == "message"):
        [part] = message["content"]
        data = b"".join(bytes(one["bytes"]) for one in part["logprobs"])
        assert part["text"].strip() == data.decode().strip()
        places = [one["logprob"] for one in part["logprobs"]]
        assert places == [places[0] + n for n in range(len(places))]
    if name != "broken" and reason == "stop":
        calls = [item for item in final["output"] if "call_id" in item]
        assert json.loads(calls[0]["arguments"]) == {"cmd": 'ls "ü" 🎉', "wait": 5}
        assert calls[1]["input"] == PATCH
