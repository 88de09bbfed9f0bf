"""Responses of the Responses API: their events and bodies, made from events of a completion."""

import json
from collections import Counter
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.completion.completion_text import CompletionText, LogprobEntry
from services.gateway.completion.generation import Choice, Generation
from services.gateway.completion.serializer import CollectedChoice, ResponseMetadata
from services.gateway.dialects.responses.serializer import (
    COMMENT,
    ResponseOptions,
    ResponsesSerializer,
)
from services.gateway.dialects.responses.tools import Toolbox
from services.gateway.http.errors import ApiError, PromptTooLong, failed, invalid, unavailable
from services.gateway.output.events import (
    CallArguments,
    CallBegun,
    CallEnded,
    OutputEvent,
    Reasoning,
    Text,
)
from shared.messages import Sampling, SubmitRequest, token_ids

Json = dict[str, Any]
TOOLS = [
    {"type": "function", "name": "run"},
    {"type": "custom", "name": "apply_patch"},
    {"type": "tool_search", "execution": "client"},
    {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn"}]},
]
OUTPUT: list[OutputEvent] = [
    Reasoning("I must look. "),
    Text("Let me see.\n"),
    CallBegun(0, "call_a", "run"),
    CallArguments('{"cmd": "ls ü"}'),
    CallEnded(),
    CallBegun(1, "call_b", "apply_patch"),
    CallArguments(json.dumps({"input": "*** Begin Patch\n+🎉\n*** End Patch"})),
    CallEnded(),
    Reasoning("And then?"),
    CallBegun(2, "call_c", "agents__spawn"),
    CallEnded(),
    CallBegun(3, "call_d", "tool_search"),
    CallArguments('{"query": "mail"}'),
    CallEnded(),
    Text("Done."),
]


def response_format(*, has_summaries: bool = False, kept: list[bytes] | None = None) -> Any:
    """Return the format of a response with all kinds of tools."""
    toolbox = Toolbox()
    toolbox.read(TOOLS, "tools")
    return ResponsesSerializer(
        ResponseMetadata("resp_0123", 1_000, "tiny", None),
        None,  # type: ignore[arg-type]
        ResponseOptions(b'{"metadata":{"a":"b"},"store":true}', toolbox, has_summaries),
        None if kept is None else kept.append,
    )


def generation() -> Generation:
    """Return a generation of five tokens after a prompt of three."""
    made = Generation("resp_0123", [], None)  # type: ignore[arg-type]
    request = SubmitRequest(
        request_id="resp_0123:0",
        prompt=token_ids.pack([1, 2, 3]),
        sampling=Sampling(seed=0),
        tenant="t",
        max_tokens=9,
        stop_ids=[],
        deadline_s=1.0,
    )
    text = CompletionText(None, frozenset(), [])  # type: ignore[arg-type]
    made.choices = [Choice(made, 0, request, text, tokens=[1] * 5)]
    return made


def cut(events: list[OutputEvent], places: list[int]) -> list[OutputEvent]:
    """Return the same output with its pieces of text cut at some places."""
    found: list[OutputEvent] = []
    for event in events:
        if not isinstance(event, Text | Reasoning | CallArguments):
            found.append(event)
            continue
        ends = sorted({place % (len(event.text) + 1) for place in places} | {len(event.text)})
        starts = [0, *ends]
        found += [type(event)(event.text[a:b]) for a, b in zip(starts, ends, strict=False) if a < b]
    return found


def streamed(
    made: Any, events: list[OutputEvent], reason: str = "tool_calls", *, is_slow: bool = False
) -> list[Json]:
    """Return the server-sent events of a response, of a slow one with keep-alives everywhere."""
    data = b"".join(made.begin(generation()))
    for event in events:
        data += made.keep_alive(0) if is_slow else b""
        if isinstance(event, Text):
            data += b"".join(made.text(0, event.text, []))
        else:
            data += made.event(0, event)
    data += made.end_choice(0, reason) + made.end(generation())
    return parse(data)


def parse(data: bytes) -> list[Json]:
    """Return the events in bytes; each has its type as name too."""
    found = []
    for block in data.decode().split("\n\n")[:-1]:
        if block == COMMENT.decode().strip():
            continue
        name, _, content = block.partition("\n")
        event = json.loads(content.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def whole(made: Any, events: list[OutputEvent], reason: str = "tool_calls") -> Json:
    """Return the body of a response."""
    choice = CollectedChoice(0, None, events, reason)
    body: Json = orjson.loads(b"".join(made.body([choice], generation())))
    return body


def without_time(response: Json) -> Json:
    """Return a response without the time at which it was completed."""
    return {**response, "completed_at": None}


@pytest.mark.parametrize("has_summaries", [False, True])
@given(st.lists(st.integers(min_value=0, max_value=60), max_size=12))
def test_streamed_and_whole_responses_are_equal_however_the_output_is_cut(
    has_summaries: bool, places: list[int]
) -> None:
    """The last event of a stream has the response that a whole answer has."""
    events = streamed(response_format(has_summaries=has_summaries), cut(OUTPUT, places))
    expected = whole(response_format(has_summaries=has_summaries), OUTPUT)
    assert events[-1]["type"] == "response.completed"
    assert without_time(events[-1]["response"]) == without_time(expected)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == expected["output"]


@given(st.lists(st.integers(min_value=0, max_value=60), max_size=12))
def test_events_for_display_build_the_same_items(places: list[int]) -> None:
    """Deltas joined are the done texts, items do not overlap, and numbers have no gaps."""
    events = streamed(response_format(), cut(OUTPUT, places))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    deltas: Counter[tuple[int, str]] = Counter()
    texts: dict[tuple[int, str], str] = {}
    open_index = -1
    for event in events[2:-1]:
        kind, index = event["type"], event["output_index"]
        if kind == "response.output_item.added":
            assert open_index == -1
            open_index = index
            assert event["item"]["id"]
        assert index == open_index
        if kind.endswith(".delta"):
            key = (index, kind.removesuffix(".delta"))
            texts[key] = texts.get(key, "") + event["delta"]
            deltas[key] += 1
        elif kind.endswith(".done") and kind.removesuffix(".done") in {k for _, k in texts}:
            final = event.get("text", event.get("arguments", event.get("input")))
            if (index, kind.removesuffix(".done")) in texts:
                assert texts[index, kind.removesuffix(".done")] == final
        if kind == "response.output_item.done":
            open_index = -1
    assert open_index == -1


@given(st.lists(st.integers(min_value=0, max_value=60), max_size=12))
def test_keep_alives_change_nothing_for_any_reader(places: list[int]) -> None:
    """They repeat finished items and never an open one, which some readers would then lose.

    The response of the last event and the texts of all items are those without keep-alives.
    """
    events = streamed(response_format(), cut(OUTPUT, places), is_slow=True)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    done: list[Json] = []
    is_open = False
    for event in events[:-1]:
        kind = event["type"]
        if kind in ("response.created", "response.in_progress"):
            assert not is_open
            assert event["response"]["output"] == done
        elif kind == "response.output_item.added":
            is_open = True
        elif kind == "response.output_item.done":
            is_open = False
            done.append(event["item"])
    expected = whole(response_format(), OUTPUT)
    assert without_time(events[-1]["response"]) == without_time(expected)
    assert done == expected["output"]


@pytest.mark.parametrize("begun", range(len(OUTPUT)))
def test_every_keep_alive_is_an_event(begun: int) -> None:
    """Codex waits for events: comments do not stop its timer for silence.

    Only a search for tools has no event of its own; its arguments are short.
    """
    made = response_format()
    for event in OUTPUT[:begun]:
        made.event(0, event) if not isinstance(event, Text) else made.text(0, event.text, [])
    is_searching = "tool_search" in [
        one.name for one in OUTPUT[max(0, begun - 2) : begun] if isinstance(one, CallBegun)
    ]
    assert made.keep_alive(0).startswith(b"event: ") != is_searching


def test_stream_begins_without_output_even_if_the_answer_is_there_already() -> None:
    """A fast answer may be complete before the stream begins; its items still come one by one."""
    made = response_format()
    later = made.event(0, OUTPUT[0]) + made.end_choice(0, "length")
    events = parse(b"".join(made.begin(generation())) + later)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["response"]["output"] == []
    assert events[1]["response"]["incomplete_details"] is None


def test_items_have_ids_call_ids_names_and_namespaces() -> None:
    """Each item is complete: readers break on a missing id, call id or name."""
    output = whole(response_format(), OUTPUT)["output"]
    assert [item["type"] for item in output] == [
        "reasoning",
        "message",
        "function_call",
        "custom_tool_call",
        "reasoning",
        "function_call",
        "tool_search_call",
        "message",
    ]
    assert len({item["id"] for item in output}) == len(output)
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "I must look. "}]
    assert output[0]["summary"] == []
    assert output[0]["encrypted_content"] is None
    assert output[1]["content"][0]["text"] == "Let me see.\n"
    assert (output[2]["call_id"], output[2]["name"]) == ("call_a", "run")
    assert json.loads(output[2]["arguments"]) == {"cmd": "ls ü"}
    assert output[3]["input"] == "*** Begin Patch\n+🎉\n*** End Patch"
    assert (output[5]["namespace"], output[5]["name"]) == ("agents", "spawn")
    assert output[5]["arguments"] == "{}"
    assert output[6]["arguments"] == {"query": "mail"}
    assert output[6]["execution"] == "client"


def test_event_order_of_message_reasoning_and_call_is_that_of_openai() -> None:
    """Clients that display a response rely on this order."""
    kinds = [event["type"] for event in streamed(response_format(), OUTPUT[:5])]
    assert [kind.removeprefix("response.") for kind in kinds] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]


def test_requested_summary_has_the_reasoning_and_its_own_events() -> None:
    """A client that asked for a summary gets the reasoning there, and nowhere else."""
    events = streamed(response_format(has_summaries=True), OUTPUT[:1], "stop")
    kinds = [event["type"].removeprefix("response.") for event in events[2:-1]]
    assert kinds == [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
    ]
    assert all(event["summary_index"] == 0 for event in events[3:-2])
    [item] = events[-1]["response"]["output"]
    assert item["summary"] == [{"type": "summary_text", "text": "I must look. "}]
    assert "content" not in item


def test_custom_tool_call_streams_raw_input() -> None:
    """Deltas of a custom tool's call are its raw text, not JSON."""
    events = streamed(response_format(), cut(OUTPUT[5:8], list(range(40))))
    deltas = [e["delta"] for e in events if e["type"] == "response.custom_tool_call_input.delta"]
    assert len(deltas) > 5
    assert "".join(deltas) == "*** Begin Patch\n+🎉\n*** End Patch"


def test_response_cut_off_by_length_is_incomplete() -> None:
    """The last item and the response say that something is missing."""
    last = streamed(response_format(), OUTPUT[:2], "length")[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["response"]["output"][-1]["status"] == "incomplete"
    assert whole(response_format(), OUTPUT[:2], "length")["status"] == "incomplete"


def test_complete_response_is_kept_as_it_was_sent() -> None:
    """The stored response is the one that the client got."""
    kept: list[bytes] = []
    last = streamed(response_format(kept=kept), OUTPUT)[-1]
    assert [json.loads(one) for one in kept] == [last["response"]]


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (PromptTooLong("9 tokens", 8, "input", 9), "context_length_exceeded", "is 8 tokens"),
        (unavailable("Busy.", 1.5), "rate_limit_exceeded", "Please try again in 2s."),
        (ApiError(429, "Full.", code="queue_full"), "rate_limit_exceeded", "try again in 5s."),
        (failed("Broken."), "server_error", "Broken."),
        (invalid("Wrong."), "invalid_prompt", "Wrong."),
    ],
)
def test_failed_stream_ends_with_a_code_that_clients_know(
    error: ApiError, code: str, words: str
) -> None:
    """An open item is closed, and the client learns whether and when to try again."""
    made = response_format()
    made.begin(generation())
    made.text(0, "Half", [])
    events = parse(made.fail(error))
    assert [event["type"] for event in events][-2:] == [
        "response.output_item.done",
        "response.failed",
    ]
    response = events[-1]["response"]
    assert response["status"] == "failed"
    assert response["error"]["code"] == code
    assert words in response["error"]["message"]
    assert response["output"][0]["status"] == "incomplete"


def test_log_probabilities_are_equal_streamed_and_whole() -> None:
    """Each text event has those of its tokens, the whole text has all."""
    elements = [orjson.dumps({"token": one, "logprob": -0.5}) for one in "ab"]
    made = response_format()
    made.begin(generation())
    data = b""
    for position, element in enumerate(elements):
        entry = LogprobEntry(position, position, position + 1, (element,))
        data += b"".join(made.text(0, "ab"[position], [entry]))
    data += made.end_choice(0, "stop") + made.end(generation())
    events = parse(data)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [event["logprobs"][0]["token"] for event in deltas] == ["a", "b"]
    lists = [bytearray(b",".join(elements))]
    choice = CollectedChoice(0, lists, [Text("a"), Text("b")], "stop", [2])
    body = orjson.loads(b"".join(response_format().body([choice], generation())))
    part = body["output"][0]["content"][0]
    assert [one["token"] for one in part["logprobs"]] == ["a", "b"]
    assert part == events[-1]["response"]["output"][0]["content"][0]


def test_usage_has_cached_and_all_tokens() -> None:
    """Token counts stand in OpenAI's fields."""
    usage = whole(response_format(), OUTPUT)["usage"]
    assert usage["output_tokens"] == 5
    assert usage["total_tokens"] == usage["input_tokens"] + 5
    assert usage["input_tokens_details"]["cached_tokens"] == 0
    assert usage["output_tokens_details"]["reasoning_tokens"] >= 0
